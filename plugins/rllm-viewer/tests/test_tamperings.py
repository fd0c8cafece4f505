"""Tests that `verify` reports every change to a run folder, and nothing in an unchanged one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tampering
from tampering import Edit, event, field, line, swapped, torn, twice, without

from rllm_viewer.verify import verify

EVENTS, METRICS, TIMINGS, KEPT = (f"{name}.jsonl" for name in ("events", "metrics", "timings", "trajectories"))
GROUPS, INDEX, TEXTS = (f"{name}.jsonl" for name in ("groups", "groups_index", "tokens"))
SUMMARY, MANIFEST = "summary.json", "manifest.json"


def named(name: str, **fields: Any) -> Callable[[Any], bool]:
    """Returns a predicate for events with that name and these fields."""
    return lambda e: e["event"] == name and all(e.get(key) == value for key, value in fields.items())


def is_retry(content: Any) -> bool:
    return bool(content["event"] == "start" and content["attempt"] > 0)


def has_failed(content: Any) -> bool:
    return bool(content["event"] == "finish" and content["reason"] == "engine_error")


def of_a_training_rollout(content: Any) -> bool:
    return str(content["rollout"]).startswith("train")


def has_ended(content: Any) -> bool:
    return bool(content["event"] == "finish" and content["reason"] == "done")


def of_training(content: Any) -> bool:
    return not content["episode"]["is_validation"] and bool(content["episode"]["trajectories"])


def of_validation(content: Any) -> bool:
    return bool(content["episode"]["is_validation"] and content["episode"]["trajectories"])


def of_a_rollout(line_of_costs: Any) -> bool:
    return "sampling" in line_of_costs["costs"]


def was_trained(group: Any) -> bool:
    return bool(group["outcome"] == "trained")


def was_validated(group: Any) -> bool:
    return bool(group["outcome"] == "validation")


def was_filtered(group: Any) -> bool:
    return bool(group["outcome"] == "filtered")


def has_failed_rollouts(group: Any) -> bool:
    return bool(group["outcome"] == "failed")


def group(*path: str | int, at: Callable[[Any], bool] = was_trained, to: Any = tampering.changed) -> Edit:
    """Returns an edit of the last group of that kind."""
    return line(GROUPS, *path, at=at, to=to)


def rollout(*path: str | int, to: Any = tampering.changed) -> Edit:
    """Returns an edit of the first rollout of the last trained group."""
    return group("rollouts", 0, *path, to=to)


def rewritten_by_an_observer(folder: Path) -> None:
    """An observer's changed rewards reach metrics and trajectories, but not the earlier events of the rollouts."""
    with tampering.lines(folder, KEPT) as kept:
        for content in kept:
            if content["step"] == 3 and of_training(content):
                content["episode"]["trajectories"][0]["reward"] = 77.0
    with tampering.lines(folder, METRICS) as metrics:
        metrics[2] |= {"reward_mean": 77.0, "trajectory_reward_min": 77.0, "trajectory_reward_max": 77.0}


def shorter(folder: Path) -> None:
    """Removes the last token of a completion, with everything that belongs to it."""
    with tampering.lines(folder, KEPT) as kept:
        step = next(filter(of_training, kept))["episode"]["trajectories"][0]["steps"][0]
        for name in ("completion_ids", "logprobs"):
            step[name].pop()


def of_one_start(folder: Path) -> None:
    (folder / "plugins.json").write_text("[{}]")


def ended(*path: str | int, to: Any = tampering.changed) -> Edit:
    """Returns an edit of a field of the last rollout that succeeded."""
    return event("finish", *path, to=to, where=has_ended)


def reward_of(at: Callable[[Any], bool]) -> Edit:
    return line(KEPT, "episode", "trajectories", 0, "reward", at=at)


def steps_of(*path: str | int, to: Any) -> Edit:
    """Returns an edit of an episode's steps, or of their fields."""
    return line(KEPT, "episode", "trajectories", 0, "steps", *path, at=of_training, to=to)


def before(version: int) -> int:
    return version - 1


def without_last(values: list[Any]) -> list[Any]:
    return values[:-1]


def of_a_step(name: str, to: Any = tampering.changed) -> Edit:
    return line(METRICS, name, at=3, to=to)


SYNC, ASYNC, LOSSY, WITHOUT = "synchronous", "asynchronous", "quarantine", "going without in flight"
RESUMED, IN_FLIGHT = "resumed synchronous", "resumed asynchronous"

# Kind of run, edit, and words the message must contain.
TAMPERINGS: dict[str, tuple[str, Edit, tuple[str, ...]]] = {
    # summary.json
    **{
        f"books.{account}": (SYNC, field(SUMMARY, "books", account), (SUMMARY, "books", account))
        for account in ("dispatched", "trained", "filtered", "failed", "cancelled")
    },
    "reason trained": (SYNC, field(SUMMARY, "books_by_reason", "trained", "trained"), (SUMMARY, "books_by_reason")),
    "reason filtered": (
        LOSSY,
        field(SUMMARY, "books_by_reason", "filtered", "incomplete_group"),
        (SUMMARY, "books_by_reason", "incomplete_group"),
    ),
    "reason failed": (LOSSY, field(SUMMARY, "books_by_reason", "failed", "engine_error"), (SUMMARY, "engine_error")),
    "reason cancelled": (
        "failed", field(SUMMARY, "books_by_reason", "cancelled", "run_failed"), (SUMMARY, "run_failed"),
    ),
    "reason renamed": (
        LOSSY,
        field(SUMMARY, "books_by_reason", "failed", to={"timeout": 40}),
        (SUMMARY, "books_by_reason", "timeout"),
    ),
    "costs of the run": (
        SYNC, field(SUMMARY, "costs", "by_kind", "sampling", "prompt_tokens"), (SUMMARY, "sampling.prompt_tokens"),
    ),
    "costs of a kind": (SYNC, field(SUMMARY, "costs", "by_kind", to={}), (SUMMARY, "by_kind.training.calls 0")),
    "costs of a rollout": (
        LOSSY, line("costs.jsonl", "costs", "sampling", "calls", at=of_a_rollout), ("sampling.calls", "costs.jsonl"),
    ),
    "costs twice": (RESUMED, twice("costs.jsonl", at=of_a_rollout), ("sampling.calls", "costs.jsonl")),
    "optimizer_steps": (SYNC, field(SUMMARY, "optimizer_steps"), (SUMMARY, "optimizer_steps 7", "6")),
    "planned_steps": (SYNC, field(SUMMARY, "planned_steps"), (SUMMARY, "planned_steps 7", "6")),
    "resumed_from_step": (RESUMED, field(SUMMARY, "resumed_from_step"), (SUMMARY, "resumed_from_step 3", "2")),
    "resumed_from_step null": (RESUMED, field(SUMMARY, "resumed_from_step", to=None), (SUMMARY, "resumed_from_step")),
    "weight_version": (SYNC, field(SUMMARY, "weight_version"), (SUMMARY, "weight_version 7", "6")),
    "retries": (SYNC, field(SUMMARY, "retries"), (SUMMARY, "retries")),
    "incarnation": (RESUMED, field(SUMMARY, "incarnation", to=0), (SUMMARY, "incarnation 0", "plugins.json")),
    "later incarnation": (SYNC, field(SUMMARY, "incarnation"), (SUMMARY, "incarnation 1", "plugins.json")),
    "quarantined": (LOSSY, field(SUMMARY, "quarantined", to={}), (SUMMARY, "quarantined")),
    "status": (SYNC, field(SUMMARY, "status", to="failed"), (SUMMARY, "status failed")),
    "status that is none": (SYNC, field(SUMMARY, "status", to="fine"), (SUMMARY, "status fine")),
    "completed after all": ("failed", field(SUMMARY, "status", to="completed"), (SUMMARY, "status completed")),
    **{
        f"validation {name}": (SYNC, field(SUMMARY, "validation", 1, name), (SUMMARY, "validation[1]", name))
        for name in (
            "step", "weight_version", "rollouts", "failed", "reward_mean", "solved", "nll_per_token", "metrics",
        )
    },
    "a validation less": (SYNC, field(SUMMARY, "validation", to=without_last), (SUMMARY, "validation 3 times")),
    "validations reversed": (SYNC, field(SUMMARY, "validation", to=lambda v: v[::-1]), (SUMMARY, "validation[0]")),
    # metrics.jsonl
    **{
        f"metrics {name}": (SYNC, of_a_step(name), (METRICS, "line 4", name))
        for name in (
            "epoch", "weight_version", "reward_mean", "trajectory_reward_min", "trajectory_reward_max", "solved",
            "turns_mean", "response_tokens_mean", "truncated_share", "uniform_groups_share", "groups_solved_by_none",
            "groups_solved_by_some", "groups_solved_by_all", "distinct_samples_share", "staleness_mean",
            "staleness_max", "groups", "trajectories", "samples", "sampled_tokens", "segment_breaks",
            "control_tokens_in_text",
        )
    },
    "metrics reward a bit": (ASYNC, of_a_step("reward_mean", lambda r: r + 1e-4), (METRICS, "reward_mean")),
    "metrics staleness in flight": (ASYNC, of_a_step("staleness_mean"), (METRICS, "staleness_mean")),
    "metrics sampled_tokens in flight": (ASYNC, of_a_step("sampled_tokens"), (METRICS, "sampled_tokens")),
    "metrics without solved": (SYNC, of_a_step("solved", None), (METRICS, "solved None")),
    "metrics with a role": (SYNC, of_a_step("reward_mean/judge", 1.0), (METRICS, "reward_mean/judge")),
    "metrics with a break": (SYNC, of_a_step("segment_breaks/edit", 2.0), (METRICS, "segment_breaks/edit")),
    "metrics step": (SYNC, of_a_step("step"), (METRICS, "has the steps")),
    "groups gone without": (WITHOUT, of_a_step("groups"), (METRICS, "groups")),
    # timings.jsonl
    "timings step": (SYNC, line(TIMINGS, "step"), (TIMINGS, "has the steps")),
    "timings tokens_per_second": (SYNC, line(TIMINGS, "tokens_per_second"), (TIMINGS, "tokens_per_second", METRICS)),
    "timings step_seconds": (SYNC, line(TIMINGS, "step_seconds"), (TIMINGS, "tokens_per_second")),
    "timings training_idle_share": (SYNC, line(TIMINGS, "training_idle_share"), (TIMINGS, "training_idle_share")),
    # events.jsonl
    "finish with error": (SYNC, event("finish", "reason", to="error"), (EVENTS, "finish", "reason error")),
    "finish of version 99": (SYNC, ended("weight_version", to=99), (EVENTS, "weight_version 99")),
    "finish of version 99 in flight": (
        ASYNC, ended("weight_version", to=99), (EVENTS, "finish", "weight_version 99"),
    ),
    "finish of the version before": (
        SYNC, ended("weight_version", to=before), (EVENTS, "finish", "weight_version"),
    ),
    "finish is_correct": (SYNC, event("finish", "is_correct"), (METRICS, "solved", EVENTS)),
    **{
        f"finish {name}": (SYNC, ended("trajectories", 0, name), (KEPT, f"trajectories[0] {name}", "finish"))
        for name in ("role", "reward", "turns", "tokens", "weight_version")
    },
    "finish reward in flight": (ASYNC, ended("trajectories", 0, "reward"), (METRICS, "reward_mean", EVENTS)),
    "enqueue of the next version": (SYNC, event("enqueue", "weight_version"), (EVENTS, "enqueue", "weight_version")),
    "enqueue of the version before": (
        ASYNC, event("enqueue", "weight_version", to=before), (EVENTS, "enqueue", "weight_version"),
    ),
    "enqueue left_out": ("truncated", event("enqueue", "left_out"), (EVENTS, "enqueue", "left_out")),
    "enqueue filtered": (SYNC, event("enqueue", "filtered", to="uniform_reward"), (EVENTS, "enqueue", "filtered")),
    "enqueue trajectories": (
        SYNC, event("enqueue", "trajectories", "agent", to=without_last), (EVENTS, "step", "trajectories"),
    ),
    "dispatch weight_version": (SYNC, event("dispatch", "weight_version"), (EVENTS, "dispatch", "weight_version")),
    "dispatch task": (SYNC, event("dispatch", "task"), (KEPT, "task_id")),
    "dispatch epoch": (SYNC, event("dispatch", "epoch"), (METRICS, "epoch")),
    "start attempt": (SYNC, event("start", "attempt", where=is_retry), (EVENTS, "start", "attempt")),
    "start index": (SYNC, event("start", "index", to=7), (EVENTS, "start", "index 7")),
    "error task": (SYNC, event("error", "task", where=of_a_training_rollout), (EVENTS, "error", "task")),
    "filter reason": ("truncated", event("filter", "reason", to="uniform_reward"), (SUMMARY, "uniform_reward")),
    "filter as incomplete": ("truncated", event("filter", "reason", to="incomplete_group"), (EVENTS, "filter")),
    "filter failed": (LOSSY, event("filter", "failed", to={"timeout": 1}), (EVENTS, "filter", "failed", "timeout")),
    "quarantine error": (LOSSY, event("quarantine", "error"), (SUMMARY, "quarantined")),
    "consume weight_version": (ASYNC, event("consume", "weight_version", to=before), (EVENTS, "consume")),
    "step trajectories": (SYNC, event("step", "trajectories"), (EVENTS, "step", "trajectories")),
    "step samples": (SYNC, event("step", "samples"), (METRICS, "samples", EVENTS)),
    "step sampled_tokens": (ASYNC, event("step", "sampled_tokens"), (METRICS, "sampled_tokens", EVENTS)),
    "sync step": (SYNC, event("sync", "step"), (EVENTS, "sync", "step")),
    "sync version": (SYNC, event("sync", "version"), (EVENTS, "weight version")),
    "sync reason": (SYNC, event("sync", "reason", to="resume"), (EVENTS, "sync", "reason resume")),
    "checkpoint step": (SYNC, event("checkpoint", "step"), (EVENTS, "checkpoint", "step")),
    "begin step": (RESUMED, event("begin", "step"), (EVENTS, "a launch resumes from step")),
    "begin groups_kept_per_step": (SYNC, event("begin", "groups_kept_per_step", to=2), (GROUPS, "expected")),
    "begin trajectories_per_step": (SYNC, event("begin", "trajectories_per_step", to=8), (KEPT, "step")),
    "validation in events": (SYNC, event("validation", "reward_mean"), (EVENTS, "validation", "reward_mean")),
    "validation rollouts in events": (SYNC, event("validation", "rollouts"), (EVENTS, "validation", "rollouts")),
    "validation episode": (
        SYNC, event("validation", "episodes", 0, "trajectories", 0, "reward"), (EVENTS, "validation", "reward_mean"),
    ),
    # groups.jsonl and the files beside it
    **{
        f"group {name}": (kind, group(name, at=was_trained), (GROUPS, name))
        for kind in (SYNC, "two groups")
        for name in ("step", "group", "kept", "outcome", "reason", "weight_version")
    },
    "group of another task": (SYNC, group("task", "task_id"), (GROUPS, "task")),
    "filtered group kept": (ASYNC, group("kept", at=was_filtered), (GROUPS, "kept")),
    "filtered group reason": (ASYNC, group("reason", at=was_filtered), (GROUPS, "reason")),
    "failed group reason": (LOSSY, group("reason", at=has_failed_rollouts), (GROUPS, "reason")),
    "failed group outcome": (LOSSY, group("outcome", at=has_failed_rollouts), (GROUPS, "outcome")),
    "validated group step": (SYNC, group("step", at=was_validated), (GROUPS, "step")),
    "validated group of another task": (SYNC, group("task", "task_id", at=was_validated), (GROUPS, "the tasks")),
    "a rollout less": (SYNC, group("rollouts", to=without_last), (GROUPS, "3 rollouts, expected 4")),
    "rollout of another group": (SYNC, rollout("episode", "rollout_id"), (GROUPS, "does not belong")),
    "rollout outcome": (SYNC, rollout("outcome", to="validation"), (GROUPS, "outcome validation")),
    "rollout reward": (SYNC, rollout("episode", "trajectories", 0, "reward", to=77.0), (GROUPS, "reward 77.0")),
    "rollout is_correct": (SYNC, rollout("episode", "is_correct", to=None), (GROUPS, "is_correct None")),
    "rollout tokens": (
        SYNC, rollout("episode", "trajectories", 0, "steps", 0, "completion_ids", to="<u1:AQ=="), (GROUPS, "line"),
    ),
    "rollout version": (
        SYNC, rollout("episode", "trajectories", 0, "steps", 0, "weight_version", to=1), (GROUPS, "version"),
    ),
    "advantages of a token less": (SYNC, rollout("advantages", 0, 0, to="<f4:AACAPw=="), (GROUPS, "line")),
    "index offset": (SYNC, line(INDEX, "offset"), (INDEX, "offset")),
    "index length": (SYNC, line(INDEX, "length"), (INDEX, "length")),
    "index rewards": (SYNC, line(INDEX, "rewards", 0, to=77.0), (INDEX, "rewards")),
    "index solved": (SYNC, line(INDEX, "solved", 0), (INDEX, "solved")),
    "a token less": (SYNC, without(TEXTS, 0), (TEXTS, "lacks")),
    # trajectories.jsonl
    "episode reward": (ASYNC, reward_of(of_training), (KEPT, "trajectories[0] reward")),
    "episode reward of a validation": (
        ASYNC, reward_of(of_validation), (KEPT, "trajectories[0] reward"),
    ),
    "rewards by an observer": (SYNC, rewritten_by_an_observer, (KEPT, "reward 77.0", "finish")),
    "metrics by an observer": (ASYNC, rewritten_by_an_observer, (METRICS, "line 3", "reward_mean 77.0")),
    "episode is_correct": (SYNC, line(KEPT, "episode", "is_correct"), (KEPT, "is_correct")),
    "episode task_id": (SYNC, line(KEPT, "episode", "task_id", at=of_training), (KEPT, "task_id")),
    "episode rollout_index": (SYNC, line(KEPT, "episode", "rollout_index", at=of_training), (KEPT, "rollout_index")),
    "episode rollout_id": (SYNC, line(KEPT, "episode", "rollout_id"), (KEPT, "rollout_id")),
    "episode reason": (SYNC, line(KEPT, "episode", "termination_reason", to="timeout"), (KEPT, "reason timeout")),
    "episode step": (SYNC, line(KEPT, "step"), (KEPT, "step 7")),
    "episode tokens": (SYNC, shorter, (KEPT, "tokens")),
    "episode logprobs": (SYNC, steps_of(0, "logprobs", to=without_last), (KEPT, "logprobs")),
    "episode weight_version": (SYNC, steps_of(0, "weight_version", to=before), (KEPT, "weight_version")),
    "a turn less": (SYNC, steps_of(to=without_last), (KEPT, "turns")),
    # manifests and plugins.json; no sha256 covers the manifest itself
    **{
        f"manifest {'.'.join(path)}": (SYNC, field(MANIFEST, *path), (MANIFEST, ".".join(path)))
        for path in (
            ("step",), ("synced_step",), ("incarnation",), ("coordinator", "weight_version"),
            ("coordinator", "consumed"), ("coordinator", "consumed_in_window"),
            ("books", "dispatched"), ("books", "retries"), ("books", "ended"),
            ("generation", "next_ordinal"), ("generation", "due_ordinals"), ("generation", "buffered_ordinals"),
            ("generation", "difficulty"), ("offsets", "events"), ("offsets", "metrics"), ("offsets", "timings"),
            ("offsets", "trajectories"), ("offsets", "groups"), ("offsets", "groups_index"), ("recording",),
            ("validations",),
        )
    },
    "manifest epoch": (SYNC, field(MANIFEST, "generation", "epoch", to=9), (MANIFEST, "generation.epoch 9")),
    "manifest quarantine": (
        LOSSY, field(MANIFEST, "generation", "quarantine", "tasks", to={}), (MANIFEST, "generation.quarantine.tasks"),
    ),
    "a start less": (RESUMED, of_one_start, ("plugins.json", "1 launch")),
}  # fmt: skip

DELETED = {
    EVENTS: (
        *(named(name) for name in ("begin", "sync", "dispatch", "start", "finish", "enqueue", "consume", "step")),
        named("validation"), named("checkpoint"), named("error"),
    ),
    METRICS: (0, 3, -1),
    TIMINGS: (0, 3, -1),
    KEPT: (of_training, of_validation, 0),
    GROUPS: (was_trained, was_validated, 0),
    INDEX: (was_trained, 0),
}  # fmt: skip
LINES = {
    f"{how.__name__} {name} {number}": (SYNC, how(name, at), (name,))
    for name, places in DELETED.items()
    for number, at in enumerate(places)
    for how in (without, twice, swapped)
    if not (how is swapped and at in (-1, of_validation, was_validated, *DELETED[EVENTS]))
}
MORE = {
    **{f"torn {name}": (SYNC, torn(name), (name,)) for name in (EVENTS, METRICS, TIMINGS, KEPT, GROUPS, INDEX)},
    **{
        f"swapped {name}": (SYNC, swapped(EVENTS, named(name, **{number: 3})), (EVENTS,))
        for name, number in (("sync", "step"), ("step", "step"))
    },
    "swapped begin": (SYNC, swapped(EVENTS, named("begin")), (EVENTS, "before the first begin")),
    "swapped consume": (SYNC, swapped(EVENTS, named("consume")), (EVENTS, "should be")),
    "swapped enqueue": (SYNC, swapped(EVENTS, named("enqueue")), (EVENTS, "should be")),
    "without quarantine": (LOSSY, without(EVENTS, named("quarantine")), (SUMMARY, "quarantined")),
    "twice quarantine": (LOSSY, twice(EVENTS, named("quarantine")), (EVENTS, "quarantined twice")),
    "without filter": (ASYNC, without(EVENTS, named("filter")), (EVENTS,)),
    "without the second begin": (IN_FLIGHT, without(EVENTS, named("begin")), (EVENTS, "sync")),
    "without retry": (SYNC, without(EVENTS, is_retry), (EVENTS, "ends without running")),
    "without failure": (SYNC, without(EVENTS, has_failed), (EVENTS, "error")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a run of that kind, created once."""
    folders: dict[str, Path] = {}

    def made(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("kinds") / kind
            tampering.make(folders[kind], kind)
        return folders[kind]

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "edit", "names"), [*(TAMPERINGS | LINES | MORE).values()], ids=[*(TAMPERINGS | LINES | MORE)]
)
def test_what_was_changed_is_named(
    made: Callable[[str], Path], tmp_path: Path, kind: str, edit: Edit, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made(kind), folder)
    edit(folder)
    problems = verify(folder).problems
    assert any(all(name in problem for name in names) for problem in problems), problems


EARLIER_VERSIONS_LACK = {
    "begin": ("trajectories_per_step", "groups_kept_per_step"),
    "dispatch": ("epoch",),
    "finish": ("is_correct", "trajectories"),
    "enqueue": ("trajectories",),
    "step": ("trajectories", "samples", "sampled_tokens"),
    "validation": ("episodes",),
}


def as_of_an_earlier_version(folder: Path) -> None:
    """Removes fields that earlier versions did not write, and corrects the offsets."""
    path = folder / EVENTS
    before, ends = path.read_bytes().splitlines(keepends=True), {0: 0}
    old, new = 0, b""
    for text in before:
        content = json.loads(text)
        for name in EARLIER_VERSIONS_LACK.get(content["event"], ()):
            del content[name]
        old += len(text)
        new += json.dumps(content, separators=(",", ":")).encode() + b"\n"
        ends[old] = len(new)
    path.write_bytes(new)
    for name in (GROUPS, INDEX, TEXTS):
        (folder / name).unlink()
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        content = json.loads(manifest.read_text())
        content["offsets"]["events"] = ends[content["offsets"]["events"]]
        del content["recording"], content["offsets"]["groups"], content["offsets"]["groups_index"]
        manifest.write_text(json.dumps(content))


ALL_KINDS = [*tampering.KINDS, "failed", *(f"resumed {kind}" for kind in tampering.KINDS if kind != "unmeasured")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nothing_is_found_in_what_was_not_changed(made: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made(kind), folder)
    result = verify(folder)
    assert result.problems == []
    assert result.status == ("failed" if kind == "failed" else "completed")
    (folder / SUMMARY).unlink()
    result = verify(folder)
    assert (result.problems, result.status) == ([], "interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nothing_is_found_in_a_folder_of_an_earlier_version(
    made: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made(kind), folder)
    as_of_an_earlier_version(folder)
    assert verify(folder).problems == []


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (event("finish", "reason", to="error"), (EVENTS, "finish", "reason error")),
        (ended("weight_version", to=99), (EVENTS, "weight_version 99")),
        (event("enqueue", "weight_version"), (METRICS, "staleness_mean")),
        (of_a_step("staleness_max"), (METRICS, "staleness_max")),
        (of_a_step("groups"), (METRICS, "groups")),
        (field(SUMMARY, "retries"), (SUMMARY, "retries")),
        (field(SUMMARY, "books", "trained"), (SUMMARY, "books")),
        (line(KEPT, "episode", "rollout_id", at=of_training), (KEPT, "rollout_id")),
        (twice(KEPT, of_training), (KEPT,)),
    ],
)
def test_what_was_changed_in_a_folder_of_an_earlier_version_is_named(
    made: Callable[[str], Path], tmp_path: Path, edit: Edit, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made(SYNC), folder)
    as_of_an_earlier_version(folder)
    edit(folder)
    problems = verify(folder).problems
    assert any(all(name in problem for name in names) for problem in problems), problems


@pytest.mark.parametrize("name", [EVENTS, METRICS, TIMINGS, KEPT, GROUPS, INDEX])
def test_a_line_that_a_kill_cut_off_makes_a_run_interrupted(
    made: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """No checkpoint is newer than the remaining files; only the last lines of a step or a validation may be missing."""
    folder = tmp_path / "run"
    shutil.copytree(made("failed"), folder)
    (folder / SUMMARY).unlink()
    torn(name)(folder)
    result = verify(folder)
    assert (result.problems, result.status) == ([], "interrupted")
