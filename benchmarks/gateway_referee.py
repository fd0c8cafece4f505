"""The referee of `benchmarks.gateway`: compares training samples with the engine's requests and completions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.gateway_policy import ByteParser, Given
from benchmarks.trials import Row
from rllm_core.types import Floats, TokenIds

_LABEL = re.compile(r"\[[a-z]+[0-9.]*\]")


class Receipt(NamedTuple):
    """An answer that a client got.

    Attributes:
        rollout: Rollout of the client.
        asked: Labels in the messages that it sent, in order.
        text: Text of the answer.
    """

    rollout: int
    asked: tuple[str, ...]
    text: str


class Trained(NamedTuple):
    """A sample: a sequence of tokens, and those of them that are trained.

    Attributes:
        token_ids: ``(tokens,)`` the sequence.
        spans: Start and stop of each trained completion.
        logprobs: ``(trained_tokens,)`` log-probabilities.
    """

    token_ids: TokenIds
    spans: Sequence[tuple[int, int]]
    logprobs: Floats


def labels(text: str) -> list[str]:
    """Returns the labels in a text, in order. Clients rewrite everything else."""
    return _LABEL.findall(text)


def judge(given: Sequence[Given], receipts: Sequence[Receipt], trained: Mapping[int, Sequence[Trained]]) -> Row:
    """Counts tokens.

    Args:
        given: Requests and completions of the engine.
        receipts: Answers to clients.
        trained: Samples, by rollout.

    Returns:
        ``misattributed_tokens``: trained in another context or rollout than they were sampled in, or with other
        log-probabilities, or without a client who got them, or sampled for messages that the client who got them did
        not send. ``tokens_trained_twice``, and ``tokens_uncounted``: a client got them, and they are not trained.
    """
    got: dict[int, Receipt] = {}
    wrong: set[int] = set()
    for receipt in receipts:
        index = _number(receipt.text)
        one = given[index]
        got[index] = receipt
        if one.rollout != receipt.rollout or _asked(one.prompt) != receipt.asked:
            wrong.add(index)
    by_key = {one.key: index for index, one in enumerate(given)}
    times: Counter[int] = Counter()
    misattributed = 0
    for rollout, samples in trained.items():
        for sample in samples:
            read = 0
            for start, stop in sample.spans:
                read += stop - start
                logprobs = sample.logprobs[read - (stop - start) : read]
                key = Given(rollout, sample.token_ids[:start], sample.token_ids[start:stop], logprobs).key
                known = by_key.get(key)
                if known is None or known not in got or known in wrong or given[known].rollout != rollout:
                    misattributed += stop - start
                if known is not None:
                    times[known] += 1
    return {
        "calls": len(receipts),
        "given": len(given),
        "given_tokens": sum(len(one.completion) for one in given),
        "trained_spans": sum(times.values()),
        "misattributed_tokens": misattributed,
        "tokens_trained_twice": sum((count - 1) * len(given[index].completion) for index, count in times.items()),
        "tokens_uncounted": sum(len(given[index].completion) for index in got if not times[index]),
    }


def _number(text: str) -> int:
    return int(labels(text)[0].strip("[n]"))


def _asked(prompt: TokenIds) -> tuple[str, ...]:
    return tuple(labels(prompt[prompt < ByteParser.START].astype("uint8").tobytes().decode()))
