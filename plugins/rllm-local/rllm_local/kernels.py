"""Float32 on one core, compiled by numba on first use and then kept in a folder of the user's cache.

Arrays are flat. Keys are in blocks of 16 positions, ``(rows, heads, blocks, dim, 16)``, so that a vector
holds one number of 16 keys. Nothing here starts a thread, and the interpreter lock is not held.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numba
import numpy as np

from rllm_local import fast
from rllm_local import vectors as v
from rllm_local.fast import LANES
from rllm_local.starter import cache_dir

HIDDEN, ZERO, ONE = np.float32(-1e30), np.float32(0), np.float32(1)


def _kept(function: Any) -> Any:
    """Compiles a function that other modules call; keeps its code in a folder that no other code of it shares."""
    sources = b"".join(Path(file).read_bytes() for file in (__file__, v.__file__, fast.__file__))
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(cache_dir() / "kernels" / hashlib.sha256(sources).hexdigest()[:16])  # type: ignore[attr-defined]
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@numba.njit
def _normalise(numbers, at, size, epsilon, result, to):  # type: ignore[no-untyped-def]
    """Divides ``size`` numbers, a multiple of 16, by the root of their mean square."""
    total = v.spread(ZERO)
    for i in range(0, size, LANES):
        total = total + v.load(numbers, at + i) * v.load(numbers, at + i)
    scale = v.spread(np.float32(ONE / math.sqrt(v.sum_of(total) / size + epsilon)))
    for i in range(0, size, LANES):
        v.store(result, to + i, v.load(numbers, at + i) * scale)


@_kept
def normalise(numbers, size, epsilon, result):  # type: ignore[no-untyped-def]
    """Normalizes each row of ``size`` numbers, a multiple of 16."""
    for at in range(0, len(numbers), size):
        _normalise(numbers, at, size, epsilon, result, at)


@_kept
def activate(gate_up, size, result):  # type: ignore[no-untyped-def]
    """Computes ``silu(gate) * up`` of ``(rows, 2, size)``, where ``size`` is a multiple of 16."""
    least, one = v.spread(np.float32(-80)), v.spread(ONE)
    for row in range(len(result) // size):
        for i in range(0, size, LANES):
            gate = v.load(gate_up, 2 * row * size + i)
            share = one + v.exp(v.spread(ZERO) - v.largest(gate, least))
            v.store(result, row * size + i, gate / share * v.load(gate_up, (2 * row + 1) * size + i))


@numba.njit
def _append(projected, gains, epsilon, rotations, keys, values, padding, heads, groups, dim, last):  # type: ignore[no-untyped-def]
    """Normalizes and rotates queries and keys of position ``last`` in place; writes keys and values to the cache."""
    rows, rotated = len(padding), heads * groups + heads
    room = len(keys) // (rows * heads * dim)
    for row in range(rows):
        base, angle = row * (rotated + heads) * dim, (last - padding[row]) * dim
        for head in range(rotated):
            at = base + head * dim
            if len(gains):
                _normalise(projected, at, dim, epsilon, projected, at)
                for d in range(0, dim, LANES):
                    v.store(projected, at + d, v.load(projected, at + d) * v.load(gains, head * dim + d))
            for d in range(0, dim, 2):
                real, imaginary = projected[at + d], projected[at + d + 1]
                cos, sin = rotations[angle + d], rotations[angle + d + 1]
                projected[at + d] = real * cos - imaginary * sin
                projected[at + d + 1] = real * sin + imaginary * cos
        for head in range(heads):
            of_key, to = base + (heads * groups + head) * dim, (row * heads + head) * room * dim
            of_value, place = of_key + heads * dim, to + last // LANES * LANES * dim + last % LANES
            for d in range(dim):
                keys[place + d * LANES] = projected[of_key + d]
                values[to + last * dim + d] = projected[of_value + d]


@_kept
def decode(  # type: ignore[no-untyped-def]
    projected, gains, epsilon, rotations, keys, values, padding, mixed, heads, groups, dim, length
):
    """Appends one position per row to the cache of a layer, and attends from it.

    Args:
        projected: Queries, with the scale of attention, keys and values of the position,
            ``(rows, heads * groups + 2 * heads, dim)``; overwritten.
        gains: Gains of normalized queries and keys, ``(heads * groups + heads, dim)``; empty without norms.
        epsilon: What norms add to mean squares.
        rotations: Cosines and sines, ``(positions, dim / 2, 2)``.
        keys: ``(rows, heads, blocks, dim, 16)``.
        values: ``(rows, heads, positions, dim)``.
        padding: Positions at the start of each row that it does not see, ``(rows,)``.
        mixed: The result, ``(rows, heads, groups, dim)``.
        heads: Heads of keys and values.
        groups: Queries per head.
        dim: Numbers of a head, a multiple of 16.
        length: Number of positions that are used, with the new one.
    """
    _append(projected, gains, epsilon, rotations, keys, values, padding, heads, groups, dim, length - 1)
    rows = len(padding)
    room = len(keys) // (rows * heads * dim)
    width = (length + LANES - 1) // LANES * LANES
    scores = np.empty(2 * width, np.float32)
    for pair in range(rows * heads):
        first = padding[pair // heads]
        start, base = first // LANES * LANES, pair * room * dim
        for group in range(0, groups, 2):
            query = (pair // heads * heads * (groups + 2) + pair % heads * groups + group) * dim
            to = (pair * groups + group) * dim
            stride = dim if group + 1 < groups else 0  # a single query is computed twice
            top0 = top1 = v.spread(HIDDEN)
            for block in range(start, length, LANES):
                even, odd = v.two_zeros(), v.two_zeros()
                for d in range(0, dim, 2):
                    at = base + block * dim + d * LANES
                    even = v.fma_tile(even, v.load(keys, at), projected, query + d, stride)
                    odd = v.fma_tile(odd, v.load(keys, at + LANES), projected, query + d + 1, stride)
                score0 = v.within(even[0] + odd[0], first - block, length - block, HIDDEN)
                score1 = v.within(even[1] + odd[1], first - block, length - block, HIDDEN)
                top0, top1 = v.largest(top0, score0), v.largest(top1, score1)
                v.store(scores, block, score0)
                v.store(scores, width + block, score1)
            top0, top1 = v.spread(v.top_of(top0)), v.spread(v.top_of(top1))
            total0 = total1 = v.spread(ZERO)
            for block in range(start, length, LANES):
                weight0, weight1 = v.exp(v.load(scores, block) - top0), v.exp(v.load(scores, width + block) - top1)
                total0, total1 = total0 + weight0, total1 + weight1
                v.store(scores, block, weight0)
                v.store(scores, width + block, weight1)
            share0, share1 = v.spread(ONE / v.sum_of(total0)), v.spread(ONE / v.sum_of(total1))
            for d in range(0, dim, LANES):
                even, odd = v.two_zeros(), v.two_zeros()
                last = first + (length - first) // 2 * 2
                for p in range(first, last, 2):
                    at = base + p * dim + d
                    even = v.fma_tile(even, v.load(values, at), scores, p, width)
                    odd = v.fma_tile(odd, v.load(values, at + dim), scores, p + 1, width)
                if last < length:
                    even = v.fma_tile(even, v.load(values, base + last * dim + d), scores, last, width)
                v.store(mixed, to + stride + d, (even[1] + odd[1]) * share1)
                v.store(mixed, to + d, (even[0] + odd[0]) * share0)
