"""Tests distillation through the whole loop, on the scripted backend."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.engine import EngineBusy, EngineError, RolloutEngine
from rllm_core.errors import ConfigError, RunError
from rllm_core.parser import Vocabulary
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, TokenIds, TrainingSample
from rllm_devkit.scripted import (
    ByteParser,
    Script,
    ScriptedBackend,
    ScriptedEngine,
    ScriptedWorkflow,
    text_logprobs,
)

SKILL = 0.9
DISTILL = ("algorithm.name=distill", "teacher.engine=scripted", "teacher.model=wise")

Distil = Callable[..., Any]


@pytest.fixture
def teachers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RolloutEngine]]:
    """Returns a function that replaces teacher engine ``scripted`` and returns the list of teachers created."""

    def use(kind: type[ScriptedEngine] = ScriptedEngine, **script: Any) -> list[RolloutEngine]:
        made: list[RolloutEngine] = []

        def from_config(cls: type[ScriptedEngine], config: Any, parser: Any) -> ScriptedEngine:
            assert config.model.path == "wise"
            made.append(kind(parser, Script(**script), skill=SKILL))
            return made[-1]  # type: ignore[return-value]

        monkeypatch.setattr(ScriptedEngine, "from_config", classmethod(from_config))
        return made

    return use


@pytest.fixture
def distil(run_scripted: Callable[..., Any]) -> Distil:
    def run(*overrides: str, **more: Any) -> Any:
        return run_scripted(*DISTILL, "training.groups_per_step=8", *overrides, **more)

    return run


def skill_of(run: Any) -> float:
    assert isinstance(run.assembly.backend, ScriptedBackend)
    return run.assembly.backend.skill


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ["training.steps=60"],
        ["training.steps=60", "training.rollouts_per_group=1", "training.groups_per_step=32"],
        ["training.steps=80", "training.staleness_threshold=1"],
        ["training.steps=60", "say_yes.turns=3"],
    ],
    ids=["synchronous", "groups of one", "asynchronous", "several turns"],
)
def test_the_student_becomes_its_teacher(distil: Distil, teachers: Any, mode: list[str]) -> None:
    teachers()
    run = distil(*mode)
    assert run.error is None
    assert skill_of(run) == pytest.approx(SKILL, abs=0.06), "neither stays where it was nor goes beyond the teacher"
    metrics = run.lines("metrics")
    assert metrics[0]["teacher_kl_mean"] > 4 * abs(metrics[-1]["teacher_kl_mean"])
    assert {line["teacher_unscored_tokens"] for line in metrics} == {0}
    assert all("reward_mean" in line for line in metrics), "rewards that exist are reported"
    assert run.summary["validation"][-1]["reward_mean"] is not None


@pytest.mark.slow
def test_advantages_are_differences_of_log_probabilities(distil: Distil, teachers: Any) -> None:
    [*_, teacher] = teachers() or [None]
    run = distil("training.steps=1", "training.trajectories_per_step=32")
    steps = [s for line in run.lines("trajectories") for t in line["episode"]["trajectories"] for s in t["steps"]
             if not line["episode"]["is_validation"]]  # fmt: skip
    assert len(steps) == 32
    for step in steps:
        said = math.log(SKILL if step["response"]["content"] == "yes" else 1 - SKILL)
        ratio = (said - math.log(0.5)) / len(step["completion_ids"])
        assert step["advantages"] == pytest.approx([ratio] * len(step["completion_ids"]), abs=1e-5)
    assert teacher is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "is_asynchronous"),
    [
        (["training.staleness_threshold=2", "training.partial_rollout=true"], True),
        (["training.trigger_parameter_sync_step=4"], False),
    ],
    ids=["asynchronous", "several steps per weight sync"],
)
def test_what_older_weights_sampled_is_compared_with_the_policy_as_it_is(
    distil: Distil, teachers: Any, monkeypatch: pytest.MonkeyPatch, mode: list[str], is_asynchronous: bool
) -> None:
    teachers(unscored=lambda place: place == 0)
    seen: list[tuple[float, TrainingSample]] = []
    transform = ScriptedBackend.transform_to_backend_batch

    async def compute(self: ScriptedBackend, samples: Sequence[TrainingSample], policy: str) -> list[Floats]:
        assert policy == "current"
        engine = self.rollout_engine
        assert engine.skill != self.skill or all(max(s.weight_versions) < engine.weight_version for s in samples)
        return [self._of_written(sample) for sample in samples]

    def spy(self: ScriptedBackend, samples: Sequence[TrainingSample]) -> Any:
        seen.extend((self.skill, sample) for sample in samples)
        return transform(self, samples)

    monkeypatch.setattr(ScriptedBackend, "compute_logprobs", compute)
    monkeypatch.setattr(ScriptedBackend, "transform_to_backend_batch", spy)
    run = distil("training.steps=12", *mode)
    assert run.error is None
    assert (max(line["staleness_max"] for line in run.lines("metrics")) > 0) is is_asynchronous
    for skill, sample in seen:
        spans = [sample.token_ids[start:stop] for start, stop in sample.turn_spans]
        theirs, ours = (np.concatenate([text_logprobs(Script(), s, span) for span in spans]) for s in (SKILL, skill))
        assert sample.advantages[0] == 0, "the teacher did not say"
        assert sample.advantages[1:] == pytest.approx((theirs - ours)[1:], abs=1e-5)


@pytest.mark.slow
def test_validation_asks_no_teacher(distil: Distil, teachers: Any) -> None:
    made = teachers()
    distil("training.steps=2")
    [teacher] = made
    assert isinstance(teacher, ScriptedEngine)
    assert teacher.requests == 2 * 8 * 4


@pytest.mark.slow
def test_tokens_without_a_log_probability_are_masked_and_counted(distil: Distil, teachers: Any) -> None:
    teachers(unscored=lambda place: place % 2 == 0)
    run = distil("training.steps=3", "training.trajectories_per_step=32")
    expected = sum(
        math.ceil(len(s["completion_ids"]) / 2)
        for line in run.lines("trajectories") if line["step"] == 1 and not line["episode"]["is_validation"]
        for t in line["episode"]["trajectories"] for s in t["steps"]
    )  # fmt: skip
    assert run.lines("metrics")[0]["teacher_unscored_tokens"] == expected
    for line in run.lines("trajectories"):
        if not line["episode"]["is_validation"]:
            [step] = line["episode"]["trajectories"][0]["steps"]
            assert [value == 0 for value in step["advantages"]] == [p % 2 == 0 for p in range(len(step["advantages"]))]
    teachers(unscored=lambda place: True)
    blind = distil("training.steps=3", path=run.path.with_name("blind"))
    assert blind.error is None
    assert skill_of(blind) == 0.5
    assert "teacher_kl_mean" not in blind.lines("metrics")[0]


@pytest.mark.slow
def test_a_teacher_that_fails_is_asked_again_and_counted(distil: Distil, teachers: Any) -> None:
    teachers(failure=lambda request: EngineError("out of memory") if request % 5 == 0 else None)
    run = distil("training.steps=6", "rollout.max_attempts=6")
    assert run.error is None
    assert run.summary["retries"] > 0
    reasons = {event["reason"] for event in run.lines("events") if event["event"] == "finish"}
    assert reasons == {"done", "engine_error"}
    assert any("out of memory" in event["error"] for event in run.lines("events") if event["event"] == "error")


@pytest.mark.slow
def test_a_busy_teacher_is_waited_for(distil: Distil, teachers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm_core.limits.request_retries.pause_seconds", lambda *arguments: 0.0)
    teachers(failure=lambda request: EngineBusy("later") if request <= 20 else None)
    run = distil("training.steps=2")
    assert run.error is None
    assert run.summary["retries"] == 0


@pytest.mark.slow
def test_a_teacher_that_never_answers_ends_the_run_and_not_the_patience(distil: Distil, teachers: Any) -> None:
    class Silent(ScriptedEngine):
        async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
            await asyncio.sleep(3600)
            raise AssertionError

    teachers(Silent)
    limits = ("rollout.request_timeout_seconds=0.05", "rollout.max_request_attempts=1", "rollout.max_attempts=1")
    run = distil(*limits, "rollout.max_consecutive_failures=8")
    assert isinstance(run.error, RunError)
    assert "did not answer within 0.05 s" in str(run.error)


@pytest.mark.slow
def test_answers_of_another_length_are_refused(distil: Distil, teachers: Any) -> None:
    class Short(ScriptedEngine):
        async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
            return np.zeros(1, np.float32)

    teachers(Short)
    run = distil("rollout.max_consecutive_failures=8")
    assert "returned (1,) log-probabilities for" in str(run.error)


class PairParser(ByteParser):
    """Parser for the same texts with a different tokenizer: ``ye`` is one token, and control tokens have other ids."""

    name = "pairs"
    YE, START, END = 256, 300, 301

    def vocabulary(self) -> Vocabulary:
        spellings = [*(bytes([byte]) for byte in range(256)), b"ye", *([None] * 45)]
        return Vocabulary(spellings, {"<start>": self.START, "<end>": self.END}, self._encoded)

    def _encoded(self, text: str) -> list[int]:
        raw, ids = text.encode(), []
        while raw:
            ids.append(self.YE if raw.startswith(b"ye") else raw[0])
            raw = raw[2 if raw.startswith(b"ye") else 1 :]
        return ids


class PairTeacher(ScriptedEngine):
    """Teacher that reads its own tokens only."""

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        assert isinstance(self.parser, PairParser)
        assert bytes(t for t in tokens[:start].tolist() if t < 256).startswith(b"user\ntask train-")
        assert {int(tokens[0]), int(tokens[-1])} == {PairParser.START, PairParser.END}
        completion: list[int] = []
        for token in tokens[start:].tolist():
            completion += [*b"ye"] if token == PairParser.YE else [token]
        known = text_logprobs(self.script, self.skill, np.array(completion))
        spans = [2 if token == PairParser.YE else 1 for token in tokens[start:].tolist()]
        return np.add.reduceat(known, np.cumsum([0, *spans[:-1]])).astype(np.float32)


@pytest.mark.slow
def test_a_teacher_with_other_tokens_is_aligned_by_bytes(
    distil: Distil, teachers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers(PairTeacher)
    original = ByteParser.from_model
    monkeypatch.setattr(
        ByteParser,
        "from_model",
        classmethod(lambda cls, path, config=None: PairParser() if path == "wise" else original(path, config)),
    )
    run = distil("training.steps=60", "training.trajectories_per_step=8")
    assert run.error is None
    assert skill_of(run) == pytest.approx(SKILL, abs=0.06)
    line = next(x for x in run.lines("trajectories") if not x["episode"]["is_validation"])
    [step] = line["episode"]["trajectories"][0]["steps"]
    said = math.log(SKILL if step["response"]["content"] == "yes" else 1 - SKILL)
    assert sum(step["advantages"]) == pytest.approx(said - math.log(0.5), abs=1e-5)
    assert run.lines("metrics")[0]["teacher_unscored_tokens"] == 0


@pytest.fixture
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers a tool in every call; prompts begin with it."""
    render = ByteParser.render

    def rendered(self: ByteParser, messages: Sequence[Any], *, tools: Any = None, **more: Any) -> list[int]:
        said = [{"role": "system", "content": json.dumps(tools)}, *messages] if tools else messages
        return render(self, said, **more)

    monkeypatch.setattr(ByteParser, "render", rendered)
    monkeypatch.setattr(ByteParser, "supports_tools", True)
    original = ScriptedWorkflow.run

    async def run_with_tools(self: Any, task: Any, completer: Any) -> Any:
        complete = completer.complete
        completer.complete = lambda messages: complete(messages, tools=[{"name": "add"}])
        return await original(self, task, completer)

    monkeypatch.setattr(ScriptedWorkflow, "run", run_with_tools)


@pytest.mark.slow
@pytest.mark.usefixtures("with_tools")
def test_a_teacher_with_its_own_parser_is_shown_the_tools(distil: Distil, teachers: Any) -> None:
    shown: list[bytes] = []

    class ReadingTeacher(ScriptedEngine):
        async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
            shown.append(bytes(token for token in tokens[:start].tolist() if token < 256))
            return await super().compute_logprobs(tokens, start=start)

    teachers(ReadingTeacher)
    assert distil("teacher.parser=bytes", "training.steps=1").error is None
    assert shown
    assert all(b'[{"name": "add"}]' in prompt for prompt in shown)


@pytest.mark.slow
@pytest.mark.usefixtures("with_tools")
def test_a_teacher_whose_parser_does_not_support_tools_is_refused(
    distil: Distil, teachers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers(PairTeacher)
    original = ByteParser.from_model
    monkeypatch.setattr(PairParser, "supports_tools", False)
    monkeypatch.setattr(
        ByteParser,
        "from_model",
        classmethod(lambda cls, path, config=None: PairParser() if path == "wise" else original(path, config)),
    )
    run = distil()
    assert isinstance(run.error, ConfigError)
    assert "the teacher's parser 'pairs' does not support them" in str(run.error)


@pytest.mark.slow
def test_scale_and_clip(distil: Distil, teachers: Any, tmp_path: Path) -> None:
    teachers()
    one = "training.steps=1"
    plain = skill_of(distil(one, path=tmp_path / "plain"))
    doubled = skill_of(distil(one, "algorithm.estimator_options.scale=2.0", path=tmp_path / "doubled"))
    assert doubled - 0.5 == pytest.approx(2 * (plain - 0.5))
    clipped = skill_of(distil(one, "algorithm.estimator_options.clip=0.01", path=tmp_path / "clipped"))
    assert 0 < clipped - 0.5 < plain - 0.5


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["teacher.engine=scripted"], "estimator 'grpo' uses no teacher; set algorithm.name = 'distill'"),
        (["algorithm.name=distill"], "estimator 'distill' needs a teacher: set teacher.engine"),
        (["algorithm.name=distill", "teacher.engine=scripted"], "teacher.model is not set"),
        ([*DISTILL, "teacher.model=runs/t/checkpoints/step-1/backend"], "step-1/backend': there is no such folder"),
        ([*DISTILL, "teacher.model=./wise"], "teacher.model = './wise': there is no such folder"),
        ([*DISTILL, f"teacher.model={Path(__file__).parent}"], "is not a model folder: it has no config.json"),
        ([*DISTILL, f"teacher.model={__file__}"], "test_distillation.py': there is no such folder"),
        ([*DISTILL, "teacher.engine=scriptd"], "did you mean 'scripted'"),
        (
            [*DISTILL, "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward"],
            "'distill' uses no rewards",
        ),
        ([*DISTILL, "teacher.temperature=1"], "unknown key 'teacher.temperature'"),
    ],
)
def test_what_does_not_go_together(plugins: PluginManager, overrides: list[str], complaint: str) -> None:
    with pytest.raises(Exception, match=complaint) as raised:
        assemble(load_run_config("say_yes", plugins, overrides=overrides, backend="scripted"), plugins)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_model_that_its_parser_cannot_read_is_refused_early(
    plugins: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_folder: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = str(tmp_path) if is_folder else "nobody"

    def from_model(path: str, section: object) -> ByteParser:
        raise ConfigError(f"{path} has no tokenizer")

    monkeypatch.setattr(ByteParser, "from_model", from_model)
    overrides = [*DISTILL, f"teacher.model={model}"]
    config = load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")
    with pytest.raises(ConfigError, match=f"teacher.model = '{model}': {model} has no tokenizer"):
        assemble(config, plugins)


def test_an_engine_that_cannot_score_is_refused_early(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "computes_logprobs", False)
    config = load_run_config("say_yes", plugins, overrides=DISTILL, backend="scripted")
    with pytest.raises(ConfigError, match=r"teacher.engine = 'scripted' cannot score given tokens"):
        assemble(config, plugins)
    with pytest.raises(NotImplementedError, match="engine 'scripted' does not compute"):
        asyncio.run(RolloutEngine.compute_logprobs(ScriptedEngine(), np.array([1, 2]), start=1))


@pytest.mark.slow
def test_a_resumed_run_is_one_that_was_never_stopped(distil: Distil, teachers: Any, tmp_path: Path) -> None:
    teachers()
    whole = distil("training.steps=6", path=tmp_path / "whole")

    def fails(assembly: Parts) -> None:
        original = assembly.backend.update_policy

        async def update(step: Any) -> Any:
            if step.step == 4:
                raise RuntimeError("made to fail")
            return await original(step)

        assembly.backend.update_policy = update  # type: ignore[method-assign]

    settings = ("training.steps=6", "training.checkpoint_every_steps=2")
    distil(*settings, path=tmp_path / "broken", prepare=fails)
    again = distil(*settings, path=tmp_path / "broken", resume=True)
    assert again.lines("metrics") == whole.lines("metrics")
