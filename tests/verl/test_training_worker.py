"""verl's ``TrainingWorker`` under FSDP2 on the CPU, compared with Hugging Face, after a resume, and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_runs import Report, train
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return train(model, tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def rows(model: Path) -> dict[str, torch.Tensor]:
    from training_rank import batch

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return batch(config["vocab_size"])


def test_logprobs_are_those_of_hugging_face(alone: Report, model: Path, rows: dict[str, torch.Tensor]) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(**{name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
    expected = logits.log_softmax(-1)[:, rows["prompts"].shape[1] - 1 : -1]
    expected = expected.gather(-1, rows["responses"][..., None])[..., 0]
    present = rows["attention_mask"][:, rows["prompts"].shape[1] :] > 0
    torch.testing.assert_close(alone.rows("logprobs")[present], expected[present], rtol=0, atol=1e-5)


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(alone: Report, rows: dict[str, torch.Tensor]) -> None:
    sampled = rows["response_mask"] > 0
    change = (alone.rows("logprobs_after_update") - alone.rows("logprobs")) * sampled
    mean = change.sum(-1) / sampled.sum(-1)
    assert torch.equal(mean.sign(), rows["advantages"].sum(-1).sign()), mean


def test_a_checkpoint_brings_back_weights_and_optimizer_exactly(alone: Report) -> None:
    saved, continued = alone.weights("updated"), alone.weights("continued")
    loaded, resumed = alone.weights("loaded"), alone.weights("resumed")
    for name in saved:
        assert torch.equal(loaded[name], saved[name]), name
        assert torch.equal(resumed[name], continued[name]), name
        assert not torch.equal(continued[name], saved[name]), name
    assert alone.ranks[0]["resumed"] == alone.ranks[0]["continued"]


def test_two_ranks_give_the_numbers_of_one(alone: Report, two_ranks: Report) -> None:
    two = two_ranks
    torch.testing.assert_close(two.rows("logprobs"), alone.rows("logprobs"), rtol=0, atol=1e-6)
    for rank in two.ranks:
        assert rank["update"] == pytest.approx(alone.ranks[0]["update"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(
        two.rows("logprobs_after_update"), alone.rows("logprobs_after_update"), rtol=0, atol=1e-5
    )
    for name in ("updated", "continued"):
        mine = alone.weights(name)
        for key, weight in two.weights(name).items():
            torch.testing.assert_close(weight, mine[key], rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
