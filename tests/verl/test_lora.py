"""Adapters with real verl and real vLLM: what is trained, served, saved and started from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rllm_verl.backend import ADAPTER
from safetensors.torch import load_file, save_file
from sessions import Session, greatest, in_peft, keep_weights_only, opened, rollout_logprobs
from transformers import AutoModelForCausalLM
from verl_runs import SEPARATED, run_config

from rllm_core.errors import RunError
from rllm_core.types import TrainingSample

GREATEST_GAP = 1e-5
CLEAR_GAP = 1e-2
KL = ("algorithm.kl.coefficient=0.1",)
FAST = ("optimizer.learning_rate=0.005", "optimizer.warmup_steps=0")
LOSSES = ("algorithm.loss=ppo_clip", "algorithm.proximal_policy=forward", "verl.old_logprob=last_sync")
SYNCS = ("training.trigger_parameter_sync_step=2",)


@dataclass(frozen=True)
class Case:
    """What a session starts from.

    Attributes:
        options: Its settings.
        rank: Rank of its adapters.
        alpha: Scale times rank.
        layers: Layers that have them, as errors name them.
        start: Folder of the adapters that it starts from; None for new ones, which have no effect.
    """

    options: tuple[str, ...]
    rank: int
    alpha: int
    layers: str
    start: Path | None


def of_peft(model: Path, folder: Path) -> Path:
    """Adapters with an effect, in the folder that PEFT wrote."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "down_proj"]
    get_peft_model(base, LoraConfig(r=6, lora_alpha=9, target_modules=targets)).save_pretrained(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    random = {name: 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    save_file(random, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["colocated", "separated"])
def case(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "colocated":
        start = of_peft(model, tmp_path_factory.mktemp("peft"))
        return Case((*SYNCS, f"verl.lora.adapter={start}"), 6, 9, "down_proj, q_proj", start)
    new = ("verl.lora.rank=8", "verl.lora.alpha=24")
    options = (*SYNCS, *new, *SEPARATED, "training.staleness_threshold=1")
    return Case(options, 8, 24, "all linear layers", None)


@pytest.fixture(scope="module")
def session(case: Case, model: Path) -> Iterator[Session]:
    with opened(run_config(model, *case.options, *LOSSES, *KL, *FAST)) as session:
        yield session


def trained(session: Session, seed: int) -> list[TrainingSample]:
    """Samples that a step has just been taken on."""
    samples = session.sampled(session.run(session.sample(8, seed=seed)), [1, -1] * 4)
    session.train(samples)
    return samples


def test_a_run_starts_from_its_adapters(session: Session, case: Case, model: Path) -> None:
    """Must run first in a session."""
    samples = session.sampled(session.run(session.sample(8, seed=500)))
    expected = in_peft(model, case.start, samples)
    assert greatest(rollout_logprobs(samples), expected) <= GREATEST_GAP
    assert greatest(session.logprobs(samples), expected) <= GREATEST_GAP
    assert (greatest(expected, in_peft(model, None, samples)) > CLEAR_GAP) is (case.start is not None)


def test_servers_serve_what_is_trained_after_every_sync(session: Session) -> None:
    for step in range(3):
        samples = session.sampled(session.run(session.sample(8, seed=step)), [1, -1] * 4)
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) <= GREATEST_GAP
        session.train(samples)
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) > CLEAR_GAP
        session.publish()


def test_the_reference_is_what_the_run_started_from_without_a_second_copy(
    session: Session, case: Case, model: Path
) -> None:
    samples = trained(session, 100)
    reference = session.logprobs(samples, "reference")
    assert session.backend._reference is None
    assert greatest(reference, in_peft(model, case.start, samples)) <= GREATEST_GAP
    assert greatest(reference, session.logprobs(samples)) > CLEAR_GAP


def test_the_weights_of_the_last_sync_are_those_of_its_adapters(session: Session) -> None:
    session.publish()
    samples = session.sampled(session.run(session.sample(8, seed=200)), [1, -1] * 4)
    at_sync = session.logprobs(samples)
    session.train(samples)
    assert greatest(session.logprobs(samples, "proximal"), at_sync) == 0
    assert greatest(session.logprobs(samples), at_sync) > CLEAR_GAP


def test_a_checkpoint_holds_adapters_that_peft_computes_with_alike_and_resumes_exactly(
    session: Session, case: Case, model: Path, tmp_path: Path
) -> None:
    samples = trained(session, 300)
    session.run(session.backend.save_checkpoint(tmp_path))
    saved, step = session.logprobs(samples), session.step
    assert greatest(saved, in_peft(model, tmp_path / ADAPTER, samples)) <= GREATEST_GAP
    described = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["bias"]) == (case.rank, case.alpha, "none")
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
        (None, "has all weights, and this run trains {adapters}; set verl.lora alike"),
        ({"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}, "has adapters of rank 4 and alpha 8 in q_proj, and"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    session: Session, case: Case, tmp_path: Path, saved: object, said: str
) -> None:
    session.run(session.backend.save_checkpoint(tmp_path))
    state = json.loads((tmp_path / "verl.json").read_text())
    (tmp_path / "verl.json").write_text(json.dumps(state | {"adapter": saved}))
    adapters = f"adapters of rank {case.rank} and alpha {case.alpha} in {case.layers}"
    with pytest.raises(RunError, match=said.format(adapters=adapters)):
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
