"""Float32 on one core, compiled by numba on first use and then kept in a folder of the user's cache.

Arrays are flat. Keys of decoding are in blocks of 16 positions, ``(rows, heads, blocks, dim, 16)``, so that a vector
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

QUERIES = 8  # that training handles at once
HIDDEN, ZERO, ONE = np.float32(-1e30), np.float32(0), np.float32(1)
two_zeros, many_zeros = v.zeros(2), v.zeros(QUERIES)


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
                even, odd = two_zeros(), two_zeros()
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
                even, odd = two_zeros(), two_zeros()
                last = first + (length - first) // 2 * 2
                for p in range(first, last, 2):
                    at = base + p * dim + d
                    even = v.fma_tile(even, v.load(values, at), scores, p, width)
                    odd = v.fma_tile(odd, v.load(values, at + dim), scores, p + 1, width)
                if last < length:
                    even = v.fma_tile(even, v.load(values, base + last * dim + d), scores, last, width)
                v.store(mixed, to + stride + d, (even[1] + odd[1]) * share1)
                v.store(mixed, to + d, (even[0] + odd[0]) * share0)


@numba.njit
def _block(source, at, tokens, dim, blocks):  # type: ignore[no-untyped-def]
    """Copies ``(tokens, dim)`` numbers to blocks of 16 positions."""
    for p in range(tokens):
        to = p // LANES * LANES * dim + p % LANES
        for d in range(dim):
            blocks[to + d * LANES] = source[at + p * dim + d]


@numba.njit
def _multiply(left, blocks, dim, end, width, scores):  # type: ignore[no-untyped-def]
    """Writes the products of each row of ``left`` with the first ``end`` positions of blocks."""
    for block in range(0, end, LANES):
        sums = many_zeros()
        for d in range(dim):
            sums = v.fma_tile(sums, v.load(blocks, block * dim + d * LANES), left, d, dim)
        for row in range(QUERIES):
            v.store(scores, row * width + block, sums[row])


@numba.njit
def _mix(scores, width, values, at, dim, end, mixed):  # type: ignore[no-untyped-def]
    """Writes the sums of values that are weighted by each row of ``scores``."""
    for d in range(0, dim, LANES):
        sums = many_zeros()
        for p in range(end):
            sums = v.fma_tile(sums, v.load(values, at + p * dim + d), scores, p, width)
        for row in range(QUERIES):
            v.store(mixed, row * dim + d, sums[row])


@numba.njit
def _add_outer(scores, width, rows, dim, end, sums, at):  # type: ignore[no-untyped-def]
    """Adds to each position the sum of ``rows``, weighted by their scores of it."""
    for d in range(0, dim, LANES):
        tile = v.load_tile(many_zeros(), rows, d, dim)
        for p in range(end):
            to = at + p * dim + d
            v.store(sums, to, v.fma_sum(v.load(sums, to), tile, scores, p, width))


@_kept
def forward(queries, keys, values, mixed, norms, tokens, heads, groups, dim, scaling):  # type: ignore[no-untyped-def]
    """Computes causal attention of whole sequences.

    Args:
        queries: ``(rows, heads, tokens, dim)``.
        keys: ``(rows, heads / groups, tokens, dim)``.
        values: Likewise.
        mixed: The result, ``(rows, tokens, heads, dim)``.
        norms: The logarithms of sums of exponentials, which `backward` needs, ``(rows, heads, tokens)``.
        tokens: Number of tokens.
        heads: Heads of queries.
        groups: Queries per head of keys.
        dim: Numbers of a head, a multiple of 16.
        scaling: Scale of scores, float32.
    """
    width = (tokens + LANES - 1) // LANES * LANES
    blocks, scores = np.zeros(width * dim, np.float32), np.empty(QUERIES * width, np.float32)
    asking, answers = np.zeros(QUERIES * dim, np.float32), np.empty(QUERIES * dim, np.float32)
    for head in range(len(norms) // tokens):
        at = head // groups * tokens * dim
        if head % groups == 0:
            _block(keys, at, tokens, dim, blocks)
        for start in range(0, tokens, QUERIES):
            end = min(start + QUERIES, tokens)
            for i in range((end - start) * dim):
                asking[i] = queries[(head * tokens + start) * dim + i] * scaling
            _multiply(asking, blocks, dim, end, width, scores)
            for row in range(end - start):
                seen, base, top, total = start + row + 1, row * width, v.spread(HIDDEN), v.spread(ZERO)
                for block in range(0, seen, LANES):
                    top = v.largest(top, v.within(v.load(scores, base + block), 0, seen - block, HIDDEN))
                highest = v.top_of(top)
                for block in range(0, seen, LANES):
                    weight = v.within(v.exp(v.load(scores, base + block) - v.spread(highest)), 0, seen - block, ZERO)
                    v.store(scores, base + block, weight)
                    total = total + weight
                norms[head * tokens + start + row] = highest + np.float32(math.log(v.sum_of(total)))
                share = v.spread(ONE / v.sum_of(total))
                for block in range(0, seen, LANES):
                    v.store(scores, base + block, v.load(scores, base + block) * share)
                scores[base + seen : base + end] = ZERO
            _mix(scores, width, values, at, dim, end, answers)
            for row in range(end - start):
                to = ((head // heads * tokens + start + row) * heads + head % heads) * dim
                mixed[to : to + dim] = answers[row * dim : (row + 1) * dim]


@_kept
def backward(  # type: ignore[no-untyped-def]
    queries, keys, values, mixed, norms, gradient, of_queries, of_keys, of_values, tokens, heads, groups, dim, scaling
):
    """Adds the gradients of `forward`, of which ``gradient`` belongs to ``mixed``, to zeros; computes weights again."""
    width = (tokens + LANES - 1) // LANES * LANES
    key_blocks, value_blocks = np.zeros(width * dim, np.float32), np.zeros(width * dim, np.float32)
    weights, of_scores = np.zeros(QUERIES * width, np.float32), np.zeros(QUERIES * width, np.float32)
    asking, of_mixed = np.zeros(QUERIES * dim, np.float32), np.zeros(QUERIES * dim, np.float32)
    answers, deltas = np.zeros(QUERIES * dim, np.float32), np.zeros(QUERIES, np.float32)
    for head in range(len(norms) // tokens):
        at = head // groups * tokens * dim
        if head % groups == 0:
            _block(keys, at, tokens, dim, key_blocks)
            _block(values, at, tokens, dim, value_blocks)
        for start in range(0, tokens, QUERIES):
            end = min(start + QUERIES, tokens)
            asking[(end - start) * dim :] = of_mixed[(end - start) * dim :] = ZERO
            for row in range(end - start):
                of, deltas[row] = ((head // heads * tokens + start + row) * heads + head % heads) * dim, ZERO
                for d in range(dim):
                    asking[row * dim + d] = queries[(head * tokens + start + row) * dim + d] * scaling
                    of_mixed[row * dim + d] = gradient[of + d]
                    deltas[row] += gradient[of + d] * mixed[of + d]
            _multiply(asking, key_blocks, dim, end, width, weights)
            _multiply(of_mixed, value_blocks, dim, end, width, of_scores)
            for row in range(QUERIES):
                # Rows after the last token see nothing.
                seen, base = start + row + 1 if start + row < tokens else 0, row * width
                norm, delta = v.spread(norms[head * tokens + min(start + row, tokens - 1)]), v.spread(deltas[row])
                for block in range(0, seen, LANES):
                    weight = v.within(v.exp(v.load(weights, base + block) - norm), 0, seen - block, ZERO)
                    v.store(weights, base + block, weight)
                    v.store(of_scores, base + block, weight * (v.load(of_scores, base + block) - delta))
                weights[base + seen : base + end] = of_scores[base + seen : base + end] = ZERO
            _mix(of_scores, width, keys, at, dim, end, answers)
            for i in range((end - start) * dim):
                of_queries[(head * tokens + start) * dim + i] = answers[i] * scaling
            _add_outer(weights, width, of_mixed, dim, end, of_values, at)
            _add_outer(of_scores, width, asking, dim, end, of_keys, at)
