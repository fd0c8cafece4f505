"""Values of the tokens of a recorded group, such as entropies: one text for all rollouts, instead of one for each step.

Rollouts of a task share beginnings, and trainer and sampler almost agree on log-probabilities. So all values are
compressed together, the first bytes of all numbers before all second bytes and so on, and log-probabilities of the
trainer without the bits that they share with those of the sampler. Nothing is rounded.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rllm_core.types import Floats, Step

Values = Sequence[Floats | None]
"""``(completion_tokens,)`` values for each step of a group, or None for a step without them."""

_NEAR_LOGPROBS = "trainer_logprobs"
_LEVEL = 1  # level 9 takes twice as long, and saves 1% of long answers


def written_values(values: Mapping[str, Values], steps: Sequence[Step], usual: Sequence[int]) -> dict[str, Any] | None:
    """Returns the values of a group as JSON data for `read_values`, or None if there are none.

    ``usual`` are the positions of steps that usually have values; those of others are written, too.
    """
    positions = {name: [at for at, value in enumerate(each) if value is not None] for name, each in values.items()}
    positions = {name: found for name, found in positions.items() if found}
    if not positions:
        return None
    parts = []
    for name, found in positions.items():
        bits = _bits([value for value in values[name] if value is not None])
        parts.append(bits ^ _bits([_sampled(steps[at]) for at in found]) if name == _NEAR_LOGPROBS else bits)
    planes = np.concatenate(parts).view(np.uint8).reshape(-1, 4).T
    content = binascii.b2a_base64(zlib.compress(planes.tobytes(), _LEVEL), newline=False)
    of_steps = {name: None if found == usual else found for name, found in positions.items()}
    return {"steps": of_steps, "planes": content.decode()}


def read_values(written: Mapping[str, Any], steps: Sequence[Step], usual: Sequence[int]) -> dict[str, Values]:
    """Inverts `written_values`.

    Raises:
        ValueError: If the data is damaged.
    """
    positions = {name: usual if found is None else found for name, found in written["steps"].items()}
    lengths = [steps[at].completion_tokens for found in positions.values() for at in found]
    expected = 4 * sum(lengths)
    try:
        content = b64decode(written["planes"], validate=True)
        planes = zlib.decompressobj().decompress(content, expected + 1)  # not more, whatever the text says
    except (ValueError, zlib.error) as error:
        raise ValueError(f"values of tokens are damaged: {error}") from error
    if len(planes) != expected:
        raise ValueError(f"values of tokens have {len(planes)} bytes, expected {expected}")
    numbers = np.frombuffer(planes, np.uint8).reshape(4, -1).T.copy().view("<u4").ravel()
    parts = iter(np.split(numbers, np.cumsum(lengths)))
    values: dict[str, Values] = {}
    for name, found in positions.items():
        of_steps: list[Floats | None] = [None] * len(steps)
        values[name] = of_steps
        for at in found:
            bits = next(parts)
            of_steps[at] = (bits ^ _bits([_sampled(steps[at])]) if name == _NEAR_LOGPROBS else bits).view("<f4")
    return values


def _sampled(step: Step) -> Floats:
    return np.zeros(step.completion_tokens, np.float32) if step.logprobs is None else step.logprobs


def _bits(numbers: Sequence[Floats]) -> npt.NDArray[np.uint32]:
    return np.concatenate(numbers).astype("<f4", copy=False).view("<u4")
