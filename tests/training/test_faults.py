"""Tests every fault at every injection point: a timely end, one clear line, rollout accounting, and resuming."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.engine import EngineBusy, EngineError
from rllm_core.errors import RunError, StallError, UserError
from rllm_core.limits import request_retries as retries
from rllm_core.observers import Observers
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import Episode, FinishReason, TokenOutput, TrainingSample, Trajectory
from rllm_devkit import faults as fault
from rllm_devkit.faults import Faults, at, blocks, cancels, changes, hangs, raises, returns, share, since
from rllm_viewer.verify import verify

pytestmark = pytest.mark.slow  # one run per fault
STEPS = 6
ENDS_WITHIN_SECONDS = 300.0
ENGINE = "engine.get_token_outputs_from_token_input"


@dataclass
class Run:
    """Files and result of a run."""

    path: Path
    summary: dict[str, Any]
    error: BaseException | None
    faults: Faults
    backend: Any

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Trains the scripted policy with faults; checks the invariants of every run, however it ended."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.001)

    def run(
        faults: Faults, *overrides: str, resume: bool = False, threaded: bool = False, path: Path = tmp_path / "run"
    ) -> Run:
        plugins = PluginManager.from_environment(no_plugins=True)
        plugins.register(rllm_devkit.scripted_plugin, "testing")
        plugins.register(faults.plugin(threaded=threaded), "faults")
        small = (
            f"training.steps={STEPS}", "training.groups_per_step=4", "training.rollouts_per_group=4",
            "training.validation_rollouts=6", "training.checkpoint_every_steps=2", 'training.trackers=["faults"]',
        )  # fmt: skip
        config = load_run_config("say_yes", plugins, overrides=(*small, *overrides), backend="scripted")
        assembly = assemble(config, plugins)
        error: BaseException | None = None
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
    """Asserts that the run continues from that checkpoint without the fault."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROLLOUT_FAULTS if name != "returns None"])
def test_a_rollout_that_goes_wrong_now_and_then_is_tried_again(play: Any, name: str) -> None:
    seam, action, reason = ROLLOUT_FAULTS[name]
    faults = Faults()
    now_and_then = share(0.1, seed=1)
    faults.inject(seam, action, when=(lambda c: c.turn == 2 and now_and_then(c)) if "step 2" in name else now_and_then)
    seconds = 0.5 if name == "hangs" else 60
    run = play(faults, "say_yes.turns=2", f"rollout.rollout_timeout_seconds={seconds}", "rollout.max_attempts=60")
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_an_engine_that_fails_now_and_then_costs_nothing(play: Any, name: str, mode: str) -> None:
    action, is_retry_of_rollout = ENGINE_FAULTS[name]
    faults = Faults()
    faults.inject(ENGINE, action, when=share(0.2, seed=3))
    ahead = ("training.staleness_threshold=2", "training.partial_rollout=true") if mode == "async" else ()
    # Pauses make it a matter of time which call fails, so that no number of attempts is too few by chance.
    attempts = ("rollout.max_request_attempts=30", "rollout.max_attempts=60")
    run = play(faults, "rollout.request_timeout_seconds=0.5", "say_yes.turns=2", *attempts, *ahead)
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
    assert_one_line(run.error, "20 consecutive rollout attempts failed")


def test_completions_out_of_order_are_matched_by_request(play: Any) -> None:
    """Reordering the results of calls changes nothing."""
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
    "NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "None": None, "str": "1",
    "1e308": 1e308, "-1e308": -1e308,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "return_to_go"])
@pytest.mark.parametrize("name", REWARDS)
def test_what_is_no_reward_never_reaches_the_backend(play: Any, name: str, estimator: str) -> None:
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
    run = play(faults, f"algorithm.name={estimator}", "rollout.quarantine_after_groups=1000")
    assert run.error is None
    assert faults.injected
    assert run.summary["retries"] == 0  # a retry would fail in the same way
    assert run.summary["books"]["failed"] > 0
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
    run = play(faults, "say_yes.turns=2", "rollout.quarantine_after_groups=1000")
    assert run.error is None
    assert run.summary["books"]["failed"] > 0
    assert run.summary["retries"] == 0


# --------------------------------------------------------------------------------------------------------------------
# Backend and weight sync


class DeviceLost(Exception):
    pass


@pytest.mark.parametrize("after", [False, True], ids=["before", "after it was done"])
@pytest.mark.parametrize(
    ("method", "number", "resumes_from"),
    [
        ("transform_to_backend_batch", 4, 2),
        ("process_backend_batch", 4, 2),
        ("update_policy", 4, 2),
        ("save_checkpoint", 2, 2),
        ("on_policy_updated", 4, 2),
        ("on_policy_updated", 1, None),
        ("init_rollout_engine", 1, None),
    ],
)
def test_a_backend_that_raises_ends_the_run_with_its_own_error(
    play: Any, method: str, number: int, resumes_from: int | None, after: bool
) -> None:
    faults = Faults()
    faults.inject(f"backend.{method}", raises(DeviceLost("device 3 is gone"), after=after), when=at(number))
    run = play(faults)
    assert isinstance(run.error, DeviceLost)
    assert run.summary["error"].endswith("DeviceLost: device 3 is gone")
    assert faults.calls["backend.shutdown"] == 1
    if method == "update_policy":
        assert run.summary["optimizer_steps"] == 3, "only the return of the call books the step"
        assert run.backend.calls.names().count("update_policy") == 3 + after
    assert_goes_on(play, resumes_from)


@pytest.mark.parametrize("method", ["load_checkpoint", "load_state_dict"])
def test_a_backend_that_cannot_load_leaves_the_checkpoint_as_it_was(play: Any, method: str) -> None:
    faults = Faults()
    faults.inject("backend.update_policy", raises(DeviceLost("gone")), when=at(4))
    play(faults)
    faults = Faults()
    faults.inject(f"backend.{method}", raises(DeviceLost("gone again")))
    run = play(faults, resume=True)
    assert isinstance(run.error, DeviceLost)
    assert_goes_on(play, 2)


def test_part_of_a_step_and_then_an_error_is_no_step(play: Any) -> None:
    """The step fails after two of four passes; the next launch repeats it exactly once."""
    streamed = ("training.groups_per_forward_backward=1",)
    faults = Faults()
    faults.inject("backend.process_backend_batch", raises(DeviceLost("gone"), after=True), when=at(3 * 4 + 2))
    run = play(faults, *streamed)
    assert isinstance(run.error, DeviceLost)
    assert run.summary["optimizer_steps"] == 3
    assert_goes_on(play, 2, *streamed)


def test_a_backend_that_fails_at_its_end_changes_nothing(play: Any) -> None:
    faults = Faults()
    faults.inject("backend.shutdown", raises(DeviceLost("gone")))
    assert play(faults).error is None
    faults = Faults()
    faults.inject("backend.shutdown", raises(DeviceLost("gone")))
    faults.inject("backend.init_rollout_engine", raises(ValueError("what really happened")))
    run = play(faults, resume=True)
    assert isinstance(run.error, ValueError)


def test_a_backend_that_cancels_its_own_call_is_named(play: Any) -> None:
    faults = Faults()
    faults.inject("backend.update_policy", cancels(), when=at(4))
    faults.inject("backend.shutdown", cancels())
    run = play(faults)
    assert_one_line(run.error, "update_policy of backend 'scripted' was cancelled from within")
    assert_goes_on(play, 2)


@pytest.mark.parametrize("ahead", [(), ("training.staleness_threshold=2", "training.partial_rollout=true")])
@pytest.mark.parametrize("when", ["before", "midway", "never ends", "an older version"])
def test_a_synchronisation_that_fails_lets_nothing_sample_at_an_unknown_version(
    play: Any, when: str, ahead: tuple[str, ...]
) -> None:
    faults, engines = Faults(), []

    def keep(engine: Any) -> Any:
        engines.append(engine)
        return engine

    async def regresses(call: fault.Call, proceed: Any) -> None:
        await proceed()
        engines[0].weight_version -= 2

    faults.inject("backend.init_rollout_engine", changes(keep))
    action, error = {
        "before": (raises(DeviceLost("no route")), DeviceLost),
        "midway": (raises(DeviceLost("no route"), after=True), DeviceLost),
        "never ends": (hangs(), StallError),
        "an older version": (regresses, RunError),
    }[when]
    faults.inject("backend.on_policy_updated", action, when=at(4))
    run = play(faults, f"training.sync_timeout_seconds={1 if when == 'never ends' else 60}", *ahead)
    assert isinstance(run.error, error)
    assert "\n" not in str(run.error)
    versions = [event["weight_version"] for event in run.lines("events") if event["event"] == "dispatch"]
    assert max(versions) == 2, "version 3 never was live"
    syncs = [event["version"] for event in run.lines("events") if event["event"] == "sync"]
    assert syncs == [0, 1, 2]
    assert_goes_on(play, 2, *ahead)


# --------------------------------------------------------------------------------------------------------------------
# Observers and trackers

HOOKS = [seam for seam in fault.SEAMS if seam.startswith("hook.")]


@pytest.mark.parametrize("threaded", [False, True], ids=["async", "threaded"])
@pytest.mark.parametrize("what", ["raise", "exit", "return garbage"])
def test_observers_that_misbehave_everywhere_change_nothing(play: Any, what: str, threaded: bool) -> None:
    faults = Faults()
    garbage: dict[str, Any] = {
        "raise": raises(ValueError("observer is broken")),
        "exit": raises(SystemExit(3)),
        "return garbage": returns(object()),
    }
    for seam in HOOKS:
        faults.inject(seam, garbage[what], when=since(1))
    run = play(faults, threaded=threaded)
    assert run.error is None
    assert run.summary["books"]["trained"] == STEPS * 16
    assert set(faults.calls) >= set(HOOKS), "all of them were called"
    told = sum(faults.calls[seam] for seam in HOOKS)
    assert run.summary["observer_failures"] == ({} if what == "return garbage" else {"faults": told})


@pytest.mark.parametrize("threaded", [False, True], ids=["async", "threaded"])
@pytest.mark.parametrize("seam", ["hook.on_policy_updated", "hook.on_episode_finished", "hook.on_checkpoint_saved"])
def test_an_observer_that_takes_too_long_is_not_asked_again(
    play: Any, seam: str, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "Observers", lambda plugins: Observers(plugins, deadline_seconds=1.5))
    faults = Faults()
    faults.inject(seam, blocks(4) if threaded else hangs(), when=since(2))
    run = play(faults, threaded=threaded)
    assert run.error is None
    assert faults.calls[seam] == 2
    assert run.summary["observer_failures"] == {"faults": 1}


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_switched_off(play: Any, method: str) -> None:
    faults = Faults()
    faults.inject(f"tracker.{method}", raises(ConnectionError("no network")))
    run = play(faults)
    assert run.error is None
    [failure] = run.summary["tracker_failures"].values()
    assert failure.endswith("ConnectionError: no network")
    assert faults.calls[f"tracker.{method}"] == 1


# --------------------------------------------------------------------------------------------------------------------
# Disk

REFUSALS = {"full": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}
# The core never looks at the number of an error, so the second kind goes the way of the first.
every_refusal = pytest.mark.parametrize(
    "refusal", ["full", pytest.param("broken", marks=pytest.mark.by_hand), "read-only"]
)


def refuses(number: int) -> fault.Action:
    async def action(call: fault.Call, proceed: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return action


def disk_seams(*operations: str) -> list[str]:
    return [seam for seam in fault.SEAMS if seam.startswith("disk.") and (not operations or seam[5:] in operations)]


def writes_to(name: str) -> Callable[[fault.Call], bool]:
    return lambda call: name in str(call.arguments[0])


PLACES = {
    "run.toml": ("run.toml", None),
    "plugins.json": ("plugins.json", None),
    "events.jsonl": ("events.jsonl", None),
    "metrics.jsonl": ("metrics.jsonl", None),
    "timings.jsonl": ("timings.jsonl", None),
    "groups.jsonl": ("groups.jsonl", None),
    "groups_index.jsonl": ("groups_index.jsonl", None),
    "group_timings.jsonl": ("group_timings.jsonl", None),
    "tokens.jsonl": ("tokens.jsonl", None),
    "first checkpoint": ("step-000002", None),
    "files of the backend": ("step-000004/backend", 2),
    "manifest": ("step-000004/.manifest.json", 2),
    "buffered groups": ("step-000004/buffer.jsonl", 2),
    "summary.json": ("summary.json", 6),
}


@pytest.mark.slow
@every_refusal
@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_refuses_one_file_ends_the_run_with_its_name(play: Any, place: str, refusal: str) -> None:
    name, resumes_from = PLACES[place]
    faults = Faults()
    faults.inject("backend.update_policy", hangs(0.02), when=since(1))  # so that groups are waiting at a checkpoint
    when = writes_to(name) if place == "summary.json" else once(writes_to(name))  # the summary is written twice
    for seam in disk_seams("write", "open", "mkdir") if refusal == "read-only" else disk_seams("write"):
        faults.inject(seam, refuses(REFUSALS[refusal]), when=when)
    ahead = ("training.staleness_threshold=2", "training.partial_rollout=true")
    run = play(faults, *ahead)
    assert faults.injected
    assert_one_line(run.error, os.strerror(REFUSALS[refusal]), str(run.path))
    assert run.error.exit_code != 0
    if place == "run.toml":
        return  # the run does not exist yet
    again = play(Faults(), *ahead, resume=True)
    assert again.error is None
    assert again.summary["resumed_from_step"] == resumes_from
    assert again.summary["optimizer_steps"] == STEPS


def once(when: fault.When) -> fault.When:
    seen = []

    def first(call: fault.Call) -> bool:
        if seen or not when(call):
            return False
        seen.append(call)
        return True

    return first


@pytest.mark.parametrize("operation", ["fsync", "rename"])
@pytest.mark.parametrize("name", ["events.jsonl", "policy.json", "manifest.json", "buffer.jsonl", "step-000004"])
def test_a_checkpoint_that_cannot_be_made_durable_is_none(play: Any, name: str, operation: str) -> None:
    wanted = name if operation == "fsync" else "manifest.json"
    faults = Faults()
    in_second = lambda call: faults.calls["backend.save_checkpoint"] == 2 and wanted in str(call.arguments[0])  # noqa: E731
    faults.inject(f"disk.{operation}", refuses(errno.EIO), when=once(in_second))
    run = play(faults)
    assert_one_line(run.error, os.strerror(errno.EIO), str(run.path))
    complete = [path.name for path in checkpoint.complete(run.path / "checkpoints")]
    assert complete[0] == "step-000002"


@pytest.mark.slow
@pytest.mark.parametrize("moments", [10, pytest.param(1000, marks=pytest.mark.by_hand)])
@every_refusal
def test_a_disk_that_refuses_everything_from_some_moment_on(
    play: Any, tmp_path: Path, refusal: str, moments: int
) -> None:
    """At any operation: one error line, no partial file taken for a complete one, and a resume once there is space."""
    seams = disk_seams() if refusal == "read-only" else disk_seams("write")
    whole = Faults()
    assert play(whole, path=tmp_path / "whole").error is None
    operations = sum(whole.calls[seam] for seam in seams)
    assert operations > 20
    for number in range(1, operations - 5, max(1, operations // moments)):  # their number varies a little
        faults, path = Faults(), tmp_path / str(number)
        refused = since_any(number)
        for seam in seams:
            faults.inject(seam, refuses(REFUSALS[refusal]), when=refused)
        run = play(faults, path=path)
        assert faults.injected
        assert_one_line(run.error, os.strerror(REFUSALS[refusal]), str(path))
        again = play(Faults(), path=path, resume=(path / "run.toml").exists())
        assert again.error is None
        assert again.summary["optimizer_steps"] == STEPS


def since_any(number: int) -> fault.When:
    """Matches from this call on, counted over all fault-injection points."""
    seen = []

    def when(call: fault.Call) -> bool:
        seen.append(call)
        return len(seen) >= number

    return when


def test_a_full_disk_while_groups_are_spilled(play: Any) -> None:
    faults = Faults()
    faults.inject("disk.write", refuses(errno.ENOSPC), when=once(writes_to("spill")))
    run = play(faults, "training.staleness_threshold=3", "training.buffer_max_bytes=1", "training.buffer_spill=true")
    assert_one_line(run.error, "No space left on device", "spill")


# --------------------------------------------------------------------------------------------------------------------
# The end of an epoch


@pytest.mark.parametrize("ahead", [(), ("training.staleness_threshold=2", "training.partial_rollout=true")])
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_stop_at_the_edge_of_an_epoch_skips_nothing(play: Any, ahead: tuple[str, ...], stop_at: int) -> None:
    """An epoch is two steps, so the checkpoints of steps 2 and 4 are written exactly at its end."""
    short = ("say_yes.tasks=8", "training.checkpoint_every_steps=1", *ahead)
    faults = Faults()
    faults.inject("backend.update_policy", raises(DeviceLost("gone")), when=at(stop_at + 1))
    assert isinstance(play(faults, *short).error, DeviceLost)
    run = play(Faults(), *short, resume=True)
    assert run.error is None
    assert run.summary["resumed_from_step"] == stop_at
    task_of = {event["group"]: event["task"] for event in run.lines("events") if event["event"] == "dispatch"}
    trained = [group for event in run.lines("events") if event["event"] == "step" for group in event["groups"]]
    every_task = sorted(f"train-{number}" for number in range(8))
    for epoch in range(STEPS * 4 // 8):
        tasks = [task_of[group] for group in sorted(trained)[epoch * 8 : epoch * 8 + 8]]
        assert sorted(tasks) == every_task, f"epoch {epoch} has every task once"
