"""Adapters with real verl and real vLLM: what is trained, served, saved and started from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rllm_verl.backend import ADAPTER
from sessions import Session, greatest, in_peft, keep_weights_only, opened, rollout_logprobs
from verl_runs import SEPARATED, run_config

from rllm_core.errors import RunError
from rllm_core.types import TrainingSample

GREATEST_GAP = 1e-5
CLEAR_GAP = 1e-2
ADAPTERS = ("verl.lora.rank=8", "verl.lora.alpha=24")
KL = ("algorithm.kl.coefficient=0.1",)
FAST = ("optimizer.learning_rate=0.005", "optimizer.warmup_steps=0")
LOSSES = ("algorithm.loss=ppo_clip", "algorithm.proximal_policy=forward", "verl.old_logprob=last_sync")
PLACEMENTS = {
    "colocated": ("training.trigger_parameter_sync_step=2",),
    "separated": (*SEPARATED, "training.staleness_threshold=1", "training.trigger_parameter_sync_step=2"),
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def session(request: pytest.FixtureRequest, model: Path) -> Iterator[Session]:
    with opened(run_config(model, *ADAPTERS, *LOSSES, *KL, *FAST, *PLACEMENTS[request.param])) as session:
        yield session


def trained(session: Session, seed: int) -> list[TrainingSample]:
    """Samples that a step has just been taken on."""
    samples = session.sampled(session.run(session.sample(8, seed=seed)), [1, -1] * 4)
    session.train(samples)
    return samples


def test_servers_serve_what_is_trained_after_every_sync(session: Session) -> None:
    for step in range(3):
        samples = session.sampled(session.run(session.sample(8, seed=step)), [1, -1] * 4)
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) <= GREATEST_GAP
        session.train(samples)
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) > CLEAR_GAP
        session.publish()


def test_the_reference_is_the_base_model_without_a_second_copy(session: Session, model: Path) -> None:
    samples = trained(session, 100)
    reference = session.logprobs(samples, "reference")
    assert session.backend._reference is None
    assert greatest(reference, in_peft(model, None, samples)) <= GREATEST_GAP
    assert greatest(reference, session.logprobs(samples)) > CLEAR_GAP


def test_the_weights_of_the_last_sync_are_those_of_its_adapters(session: Session) -> None:
    session.publish()
    samples = session.sampled(session.run(session.sample(8, seed=200)), [1, -1] * 4)
    at_sync = session.logprobs(samples)
    session.train(samples)
    assert greatest(session.logprobs(samples, "proximal"), at_sync) == 0
    assert greatest(session.logprobs(samples), at_sync) > CLEAR_GAP


def test_a_checkpoint_holds_adapters_that_peft_computes_with_alike_and_resumes_exactly(
    session: Session, model: Path, tmp_path: Path
) -> None:
    samples = trained(session, 300)
    session.run(session.backend.save_checkpoint(tmp_path))
    saved, step = session.logprobs(samples), session.step
    assert greatest(saved, in_peft(model, tmp_path / ADAPTER, samples)) <= GREATEST_GAP
    described = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["bias"]) == (8, 24, "none")
    assert described["base_model_name_or_path"] == str(model.resolve())
    weights = sum(file.stat().st_size for file in tmp_path.rglob("model_world_size_*"))
    adapters = (tmp_path / ADAPTER / "adapter_model.safetensors").stat().st_size
    assert weights < 1.5 * adapters, "the base model was saved too"

    session.train(samples)
    after = session.logprobs(samples)
    assert greatest(after, saved) > CLEAR_GAP
    session.run(session.backend.load_checkpoint(tmp_path))
    assert greatest(session.logprobs(samples), saved) == 0
    session.step = step
    session.train(samples)
    assert greatest(session.logprobs(samples), after) <= 1e-6


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "has all weights, and this run trains adapters of rank 8 and alpha 24 in all linear layers"),
        ({"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}, "has adapters of rank 4 and alpha 8 in q_proj, and"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(session: Session, tmp_path: Path, saved: object, said: str) -> None:
    session.run(session.backend.save_checkpoint(tmp_path))
    state = json.loads((tmp_path / "verl.json").read_text())
    (tmp_path / "verl.json").write_text(json.dumps(state | {"adapter": saved}))
    with pytest.raises(RunError, match=said):
        session.run(session.backend.load_weights(tmp_path))


def test_the_adapters_of_another_run_become_the_reference(session: Session, tmp_path: Path) -> None:
    """Must run last in a session, because the reference stays."""
    samples = trained(session, 400)
    session.run(session.backend.save_checkpoint(tmp_path))
    saved = session.logprobs(samples)
    session.train(samples)
    keep_weights_only(tmp_path)
    session.run(session.backend.load_weights(tmp_path))
    assert greatest(session.logprobs(samples), saved) == 0
    session.train(samples)
    assert greatest(session.logprobs(samples), saved) > CLEAR_GAP
    assert greatest(session.logprobs(samples, "reference"), saved) == 0
