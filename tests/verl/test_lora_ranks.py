"""Adapters on verl's ``TrainingWorker``: two ranks compared with one, and what is merged with what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_runs import RANKS, Report, train
from training_rank import LORA_RANK
from transformers import AutoModelForCausalLM

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def reports(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, Report]]:
    """With adapters, on one rank and on two."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(LORA_RANK, "8")
        alone = train(model, tmp_path_factory.mktemp("alone"), 1)
        yield alone, train(model, tmp_path_factory.mktemp("two"), RANKS)


def test_two_ranks_give_the_numbers_of_one(reports: tuple[Report, Report]) -> None:
    alone, two = reports
    torch.testing.assert_close(two.rows("logprobs"), alone.rows("logprobs"), rtol=0, atol=1e-6)
    for rank in two.ranks:
        assert rank["update"] == pytest.approx(alone.ranks[0]["update"], rel=1e-5, abs=1e-6)
    after = "logprobs_after_update"
    torch.testing.assert_close(two.rows(after), alone.rows(after), rtol=0, atol=1e-5)
    for name in ("updated", "continued"):
        mine = alone.weights(name)
        for key, weight in two.weights(name).items():
            torch.testing.assert_close(weight, mine[key], rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def test_only_linear_layers_change_and_a_resume_is_exact(reports: tuple[Report, Report], model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for report in reports:
        saved, continued = report.weights("updated"), report.weights("continued")
        for name, weight in saved.items():
            is_adapted = any(f".{layer}.weight" in name for layer in LINEAR)
            assert torch.equal(weight, base[name]) is not is_adapted, name
            assert torch.equal(report.weights("loaded")[name], weight), name
            assert torch.equal(report.weights("resumed")[name], continued[name]), name
        assert report.ranks[0]["resumed"] == report.ranks[0]["continued"]
