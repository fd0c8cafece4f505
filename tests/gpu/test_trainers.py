"""Tests the trainers: precisions, several devices, and the memory that a dry run predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cases import CASES

if TYPE_CHECKING:
    from live import Live

    from rllm_core.types import Floats

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# Of a token, between kernels in bfloat16; the mean is far smaller.
GREATEST_MEAN_GAP = 0.03
COUNT, TOKENS, VOCABULARY = 16, 256, 150_000
# The prediction is an upper bound: it adds peaks that do not coincide.
LEAST_SHARE = 0.5

ModelOf = Callable[[str], Path]


@contextmanager
def case(name: str, model_of: ModelOf, *overrides: str) -> Iterator[Live]:
    from live import live

    chosen = CASES[name]
    with live(model_of(chosen.shape), *chosen.overrides, *overrides) as found:
        yield found


def before_and_after_a_step(name: str, model_of: ModelOf, *overrides: str) -> tuple[Floats, Floats]:
    """Returns log-probabilities of the same samples with the initial weights, and after one step on them."""
    from live import fixed_samples

    samples = fixed_samples(COUNT, TOKENS, vocabulary=VOCABULARY)
    with case(name, model_of, *overrides) as found:
        before = found.logprobs(samples)
        found.train(samples)
        return before, found.logprobs(samples)


def check_agreement(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> None:
    before, after = (np.abs(mine - theirs).mean() for mine, theirs in zip(one, other, strict=True))
    moved = np.abs(one[1] - one[0]).mean()
    print({"before": float(before), "after": float(after), "moved by the step": float(moved)})
    assert before <= GREATEST_MEAN_GAP
    assert after <= GREATEST_MEAN_GAP
    assert moved > 3 * after, "the step moved too little to compare updates"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["float32", "no_flash"])
def test_precisions_and_attentions_agree(name: str, model_of: ModelOf) -> None:
    check_agreement(before_and_after_a_step("bfloat16", model_of), before_and_after_a_step(name, model_of))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["bfloat16", "entropy"])
def test_a_step_needs_no_more_memory_than_a_dry_run_predicts(name: str, model_of: ModelOf) -> None:
    from live import fixed_samples

    with case(name, model_of, "verl.max_tokens_per_device=8192") as found:
        samples = fixed_samples(64, 512, vocabulary=VOCABULARY)
        found.train(samples)
        measured = 2**30 * found.train(samples)["trainer_memory_gb"]
        estimate = found.backend.memory(None)
        assert not isinstance(estimate, str)
        uses = {use.what: use.size_bytes for use in estimate.devices[0].uses if use.phase == "training"}
        predicted = sum(size for what, size in uses.items() if what != "contexts")
        print({"measured": measured, "predicted": predicted, "uses": uses})
        assert LEAST_SHARE * predicted <= measured <= predicted


@pytest.mark.gpu(8)
@pytest.mark.parametrize("name", ["eight_ranks", "sequence_parallel"])
def test_many_devices_compute_what_one_does(name: str, model_of: ModelOf) -> None:
    alone = ("verl.devices_per_node=1", "verl.sequence_parallel=1")
    check_agreement(before_and_after_a_step(name, model_of, *alone), before_and_after_a_step(name, model_of))


@pytest.mark.gpu(8)
@pytest.mark.parametrize("name", ["experts", "megatron"])
def test_servers_of_a_mixture_of_experts_pass_the_check_after_ten_syncs(name: str, model_of: ModelOf) -> None:
    with case(name, model_of) as found:  # every sync compares trainer and servers, and fails if they disagree
        for _ in range(10):
            found.train(found.samples(16))
            found.publish()
