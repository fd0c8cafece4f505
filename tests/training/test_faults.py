"""Every fault at every seam: the run ends in time, says one clear line, its books balance, and it can go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rllm_core.testing.plugin
from rllm_core.config import load_run_config
from rllm_core.engine import EngineBusy, EngineError
from rllm_core.errors import UserError
from rllm_core.plugins import PluginManager
from rllm_core.testing import faults as fault
from rllm_core.testing.faults import Faults, at, cancels, changes, hangs, raises, returns, share, since
from rllm_core.training import checkpoint, launch, requests
from rllm_core.training.progress import Progress
from rllm_core.training.verify import verify
from rllm_core.types import Episode, FinishReason, TokenOutput, TrainingSample, Trajectory

STEPS = 6
ENDS_WITHIN_SECONDS = 60.0
ENGINE = "engine.get_token_outputs_from_token_input"


@dataclass
class Run:
    """What is left of a run."""

    path: Path
    summary: dict[str, Any]
    error: BaseException | None
    faults: Faults
    backend: Any

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Train the scripted policy with faults; checks what holds for every run, however it ended."""
    monkeypatch.setattr(requests, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(launch.report, "plot_reward", lambda path: path)  # takes longer than such a run

    def run(
        faults: Faults, *overrides: str, resume: bool = False, backend: str = "scripted", threaded: bool = False
    ) -> Run:
        plugins = PluginManager.from_environment(no_plugins=True)
        plugins.register(rllm_core.testing.plugin, "testing")
        plugins.register(faults.plugin(threaded=threaded), "faults")
        small = (
            f"training.steps={STEPS}", "training.groups_per_step=4", "training.rollouts_per_group=4",
            "training.validation_rollouts=6", "training.checkpoint_every_steps=2", 'training.trackers=["faults"]',
        )  # fmt: skip
        config = load_run_config("say_yes", plugins, overrides=(*small, *overrides), backend=backend)
        assembly = launch.assemble(config, plugins)
        path, error = tmp_path / "run", None
        (path / "summary.json").unlink(missing_ok=True)

        async def train() -> None:
            async with asyncio.timeout(ENDS_WITHIN_SECONDS) as deadline:
                await launch.train(assembly, path, resume=resume, progress=Progress())
            assert not deadline.expired()

        with faults.installed(assembly, path):
            try:
                asyncio.run(train())
            except (Exception, asyncio.CancelledError) as raised:
                error = raised
        summary_path = path / "summary.json"
        summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
        ended = Run(path, summary, error, faults, assembly.backend)
        assert_accounted(ended)
        return ended

    return run


def assert_accounted(run: Run) -> None:
    for folder in checkpoint.complete(run.path / "checkpoints"):
        checkpoint.read(folder)
    if (run.path / "events.jsonl").exists() and (run.path / "run.toml").exists():
        assert verify(run.path).problems == []
    if run.summary:
        books = run.summary["books"]
        assert books["dispatched"] == sum(books[account] for account in ("trained", "filtered", "failed", "cancelled"))
        assert run.summary["status"] == ("completed" if run.error is None else "failed")


def assert_one_line(error: BaseException | None, *parts: str) -> None:
    assert isinstance(error, UserError), repr(error)
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def assert_goes_on(play: Callable[..., Run], from_step: int | None, *overrides: str) -> None:
    """The run goes on from that checkpoint once nothing is wrong any more."""
    again = play(Faults(), *overrides, resume=True)
    assert again.error is None
    assert again.summary["resumed_from_step"] == from_step
    assert again.summary["optimizer_steps"] == STEPS
    trained = [group for event in again.lines("events") if event["event"] == "step" for group in event["groups"]]
    assert len(trained) == len(set(trained)) == STEPS * 4
    assert {path.name for path in (again.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}


# --------------------------------------------------------------------------------------------------------------------
# Rollouts


def one_trajectory_less(episode: Episode) -> Episode:
    return episode.model_copy(update={"trajectories": []})


def not_a_number(outputs: list[TokenOutput]) -> list[TokenOutput]:
    return [with_logprobs(output, np.full(len(output.token_ids), np.nan)) for output in outputs]


def wrong_length(outputs: list[TokenOutput]) -> list[TokenOutput]:
    return [with_logprobs(output, np.full(1, -1.0)) for output in outputs]


def with_logprobs(output: TokenOutput, logprobs: Any) -> TokenOutput:
    return TokenOutput.model_validate({**dict(output), "logprobs": logprobs})


ROLLOUT_FAULTS = {
    "raises": ("workflow.run", raises(ZeroDivisionError("the game broke")), "error"),
    "raises at step 2": ("completer.complete", raises(KeyError("board")), "error"),
    "hangs": ("workflow.run", hangs(), "timeout"),
    "is cancelled": ("workflow.run", cancels(), "cancelled"),
    "returns None": ("workflow.run", returns(None), "error"),
    "has no trajectory": ("workflow.run", changes(one_trajectory_less), None),
    "NaN logprob": (ENGINE, changes(not_a_number), "error"),
    "logprobs of another length": (ENGINE, changes(wrong_length), "error"),
}


@pytest.mark.parametrize("name", ROLLOUT_FAULTS)
def test_a_rollout_that_goes_wrong_now_and_then_is_tried_again(play: Any, name: str) -> None:
    seam, action, reason = ROLLOUT_FAULTS[name]
    faults = Faults()
    now_and_then = share(0.1, seed=1)
    faults.inject(seam, action, when=(lambda c: c.turn == 2 and now_and_then(c)) if "step 2" in name else now_and_then)
    run = play(faults, "say_yes.turns=2", "rollout.rollout_timeout_seconds=0.2", "rollout.max_attempts=4")
    assert run.error is None
    assert faults.injected
    assert run.summary["books"]["trained"] == STEPS * 16
    if reason is not None:
        assert run.summary["retries"] > 0
        ends = [event["reason"] for event in run.lines("events") if event["event"] == "finish"]
        assert set(ends) == {"done", reason}
    else:
        assert run.summary["books_by_reason"]["filtered"]["incomplete_group"] > 0


@pytest.mark.parametrize("name", [name for name in ROLLOUT_FAULTS if name != "hangs"])
def test_a_rollout_that_always_goes_wrong_ends_the_run_and_trains_nothing(play: Any, name: str) -> None:
    seam, action, _ = ROLLOUT_FAULTS[name]
    faults = Faults()
    faults.inject(seam, action, when=since(1))
    run = play(faults, "training.validation_rollouts=0", "rollout.max_consecutive_failures=30")
    assert_one_line(run.error)
    assert run.summary["books"]["trained"] == 0


def test_a_completion_of_a_million_tokens_is_trained(play: Any) -> None:
    length, seen = 10**6, []

    def longer(outputs: list[TokenOutput]) -> list[TokenOutput]:
        [first, *rest] = outputs
        update = {"token_ids": np.full(length, 120, np.int32), "logprobs": np.full(length, -0.1, np.float32)}
        return [TokenOutput(**{**dict(first), **update}), *rest]

    def look(call: fault.Call) -> bool:
        seen.extend(len(sample.token_ids) for sample in call.arguments[0])
        return False

    faults = Faults()
    faults.inject(ENGINE, changes(longer), when=at(3))
    faults.inject("backend.transform_to_backend_batch", returns(None), when=look)
    run = play(faults, "training.validation_rollouts=0", "training.steps=2", "training.trajectories_per_step=0")
    assert run.error is None
    assert max(seen) > length
    assert run.summary["books"]["trained"] == 2 * 16


def test_a_poison_task_is_set_aside_and_the_rest_is_trained(play: Any) -> None:
    faults = Faults()
    faults.inject("workflow.run", raises(MemoryError("poison")), when=lambda call: call.task_id == "train-2")
    run = play(faults, "say_yes.tasks=8", "rollout.max_attempts=1")
    assert run.error is None
    assert list(run.summary["quarantined"]) == ["train-2"]
    assert "MemoryError: poison" in run.summary["quarantined"]["train-2"]
    assert run.summary["books"]["failed"] == 2 * 4
    assert run.summary["books"]["trained"] == STEPS * 16


# --------------------------------------------------------------------------------------------------------------------
# Engine


def aborted(outputs: list[TokenOutput]) -> list[TokenOutput]:
    return [output.model_copy(update={"finish_reason": FinishReason.ABORT}) for output in outputs]


def empty(outputs: list[TokenOutput]) -> list[TokenOutput]:
    return [output.model_copy(update={"token_ids": output.token_ids[:0], "logprobs": None}) for output in outputs]


ENGINE_FAULTS = {
    "429": (raises(EngineBusy("429 too many requests")), False),
    "500": (raises(EngineBusy("500 internal error")), False),
    "no answer": (hangs(), False),
    "dropped in the middle": (raises(ConnectionResetError("peer is gone"), after=True), True),
    "gone": (raises(EngineError("400 bad request")), True),
    "abort": (changes(aborted), True),
    "one answer twice": (changes(lambda outputs: [*outputs, outputs[0]]), True),
    "one answer missing": (changes(lambda outputs: outputs[:-1]), True),
    "nothing": (changes(empty), True),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_an_engine_that_fails_now_and_then_costs_nothing(play: Any, name: str, mode: str) -> None:
    action, is_retry_of_rollout = ENGINE_FAULTS[name]
    faults = Faults()
    faults.inject(ENGINE, action, when=share(0.2, seed=3))
    ahead = ("training.staleness_threshold=2", "training.partial_rollout=true") if mode == "async" else ()
    run = play(faults, "rollout.request_timeout_seconds=0.1", "rollout.max_attempts=10", "say_yes.turns=2", *ahead)
    assert run.error is None
    assert faults.injected
    assert run.summary["books"]["trained"] == STEPS * 16
    assert (run.summary["retries"] > 0) == is_retry_of_rollout, "the request is repeated, or the rollout is"


@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_an_engine_that_is_down_ends_the_run_and_says_what_it_said(play: Any, name: str) -> None:
    action, _ = ENGINE_FAULTS[name]
    faults = Faults()
    faults.inject(ENGINE, action, when=since(6))
    run = play(
        faults, "training.validation_rollouts=0", "rollout.request_timeout_seconds=0.05",
        "rollout.max_consecutive_failures=20", "rollout.max_request_attempts=2",
    )  # fmt: skip
    assert_one_line(run.error, "20 attempts at rollouts failed in a row")


def test_completions_out_of_order_are_matched_by_request(play: Any) -> None:
    """Calls that end in another order than they began change nothing."""
    plain = play(Faults(), "say_yes.turns=2")
    metrics = (plain.path / "metrics.jsonl").read_bytes()
    plain.path.rename(plain.path.with_name("plain"))
    faults = Faults()
    faults.inject(ENGINE, hangs(0.01), when=share(0.3, seed=5))
    shuffled = play(faults, "say_yes.turns=2")
    assert faults.injected
    assert (shuffled.path / "metrics.jsonl").read_bytes() == metrics


def test_a_completion_of_an_old_version_is_seen_as_old(play: Any) -> None:
    def old(outputs: list[TokenOutput]) -> list[TokenOutput]:
        return [output.model_copy(update={"weight_version": 0}) for output in outputs]

    faults = Faults()
    faults.inject(ENGINE, changes(old), when=since(1))
    run = play(faults)
    assert [row["staleness_max"] for row in run.lines("metrics")] == [0, 1, 2, 3, 4, 5]


# --------------------------------------------------------------------------------------------------------------------
# Rewards

REWARDS: dict[str, Any] = {
    "NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "None": None, "str": "1", "bool": True,
    "1e308": 1e308, "-1e308": -1e308,
}  # fmt: skip


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "return_to_go"])
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_is_none_never_reaches_the_backend(play: Any, name: str, estimator: str) -> None:
    faults, samples = Faults(), []

    async def misjudged(call: fault.Call, proceed: Any) -> Any:
        episode = await proceed()
        [trajectory] = episode.trajectories
        return episode.model_copy(update={"trajectories": [Trajectory(steps=trajectory.steps, reward=REWARDS[name])]})

    def look(call: fault.Call) -> bool:
        samples.extend(call.arguments[0])
        return False

    faults.inject("workflow.episode", misjudged, when=share(0.2, seed=4))
    faults.inject("backend.transform_to_backend_batch", returns(None), when=look)
    run = play(faults, f"algorithm.name={estimator}", "rollout.max_attempts=10")
    assert run.error is None
    assert faults.injected
    assert run.summary["retries"] > 0
    assert len(samples) == run.summary["books"]["trained"] == STEPS * 16
    for sample in samples:
        assert_finite(sample)


def assert_finite(sample: TrainingSample) -> None:
    assert np.isfinite(sample.advantages).all()
    assert sample.logprobs is not None
    assert np.isfinite(sample.logprobs).all()


def test_rewards_of_steps_that_add_up_to_infinity_are_no_reward(play: Any) -> None:
    faults = Faults()

    async def endless(call: fault.Call, proceed: Any) -> Any:
        episode = await proceed()
        steps = [step.model_copy(update={"reward": 1e308}) for step in episode.trajectories[0].steps]
        return episode.model_copy(update={"trajectories": [Trajectory(steps=steps)]})

    faults.inject("workflow.episode", endless, when=share(0.2, seed=4))
    run = play(faults, "say_yes.turns=2", "rollout.max_attempts=10")
    assert run.error is None
    assert run.summary["retries"] > 0
