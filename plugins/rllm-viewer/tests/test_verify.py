"""Tests that the offline checker finds tampering, and nothing in unchanged folders."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tampering
from click.testing import CliRunner

from rllm_core.cli import cli
from rllm_core.errors import ConfigError
from rllm_viewer.verify import Verification, verify

ASYNCHRONOUS = (
    "training.staleness_threshold=1",
    "training.trigger_parameter_sync_step=2",
    "training.checkpoint_every_steps=3",
    "algorithm.filter_uniform_groups=true",
)
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with filtered groups, retried rollouts and generation ahead of training."""
    path = tmp_path_factory.mktemp("original") / "run"
    tampering.train(path, *ASYNCHRONOUS, "training.staleness=strict")
    events = {json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()}
    assert {"filter", "sync", "checkpoint", "error", "consume"} <= events
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.mark.slow
def test_what_is_proven_is_told(folder: Path) -> None:
    result = verify(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert result.holds
    assert (result.steps, result.planned_steps, result.incarnations) == (6, 6, 1)
    assert result.books["trained"] == {"trained": 6 * 4 * 4}
    assert result.books == {"failed": {}, "cancelled": {}, **summary["books_by_reason"]}
    assert 4 < result.max_lead <= 16
    assert result.max_staleness <= 1
    assert result.events == len((folder / "events.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_missing_list_of_launches_is_a_problem(folder: Path) -> None:
    (folder / "plugins.json").unlink()
    [problem] = verify(folder).problems
    assert "plugins.json is missing" in problem


def first(events: Events, name: str, after: int = 0) -> int:
    return next(i for i, event in enumerate(events) if i >= after and event["event"] == name)


def without(name: str) -> Callable[[Events], None]:
    return lambda events: events.pop(first(events, name, after=40))


def without_a_success(end: str) -> Callable[[Events], None]:
    """Removes a rollout's finish from a group that ends with an event of this name."""

    def tamper(events: Events) -> None:
        group = events[first(events, end, after=40)]["group"]
        rollouts = [event["rollout"] for event in events if event["event"] == "start" and event["group"] == group]
        finishes = [event for event in events if event["event"] == "finish" and event["rollout"] in rollouts]
        events.remove(next(event for event in finishes if event["reason"] == "done"))

    return tamper


def twice(name: str) -> Callable[[Events], None]:
    def tamper(events: Events) -> None:
        at = first(events, name)
        events.insert(at, dict(events[at]))

    return tamper


def changed(name: str, **fields: Any) -> Callable[[Events], None]:
    return lambda events: events[first(events, name)].update(fields)


def trained_again(events: Events) -> None:
    steps = [event for event in events if event["event"] == "step"]
    steps[-1]["groups"][0] = steps[0]["groups"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (without("dispatch"), "is due"),
        (without("start"), "ends without running"),
        (without_a_success("enqueue"), "is complete with 3 ended rollouts"),
        (without_a_success("filter"), "is filtered without failures, but 3 rollouts ended"),
        (without("enqueue"), "should be enqueued to become consumed"),
        (without("filter"), "summary.json has books_by_reason"),
        (without("consume"), "should be consumed to become trained"),
        (without("step"), "follows step"),
        (without("sync"), "weight version"),
        (twice("begin"), "incarnations do not increase"),
        (twice("dispatch"), "is dispatched"),
        (twice("start"), "starts twice"),
        (twice("finish"), "ends without running"),
        (twice("enqueue"), "should be dispatched to become enqueued"),
        (twice("filter"), "is not in flight"),
        (twice("consume"), "should be enqueued to become consumed"),
        (twice("step"), "follows step"),
        (trained_again, "is not in flight"),
        (changed("begin", step=3), "resumes from step 3"),
        (changed("dispatch", rollouts=5), "has 5 rollouts, expected 4"),
        (changed("dispatch", group=9), "group 9 is dispatched, but 0 is due"),
        (changed("consume", weight_version=7), "7 versions old, at most 1 allowed"),
        (changed("enqueue", weight_version=9), "not live yet"),
        (changed("step", groups=[]), "trained 0 groups, expected 4"),
        (changed("filter", failed={"timeout": 4}), "summary.json has books_by_reason"),
        (changed("filter", failed=3), "cannot be read as an event"),
        (changed("sync", version=1), "weight version"),
    ],
)
def test_tampered_events_are_found(folder: Path, tamper: Callable[[Events], None], complaint: str) -> None:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    tamper(events)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    problems = verify(folder).problems
    assert any(complaint in problem for problem in problems), problems


def test_generation_too_far_ahead_is_found(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    assert "staleness_threshold = 1.0" in text
    (folder / "run.toml").write_text(text.replace("staleness_threshold = 1.0", "staleness_threshold = 0.0"))
    assert any("groups ahead, at most 8 allowed" in problem for problem in verify(folder).problems)


def cut_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def torn_line(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "ste\n')


def damaged_checkpoint(folder: Path) -> None:
    next(folder.glob("checkpoints/*/backend/policy.json")).write_text("{}")


def summary_of_fewer_steps(folder: Path) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer_steps": 5}))


def unreadable_summary(folder: Path) -> None:
    (folder / "summary.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut_metrics, "metrics.jsonl has the steps"),
        (torn_line, "cannot be read as an event"),
        (damaged_checkpoint, "does not match its manifest"),
        (summary_of_fewer_steps, "summary.json has optimizer_steps 5, expected 6 from events.jsonl"),
        (unreadable_summary, "summary.json cannot be read"),
    ],
)
def test_damaged_files_are_found(folder: Path, damage: Callable[[Path], None], complaint: str) -> None:
    damage(folder)
    assert any(complaint in problem for problem in verify(folder).problems)


def test_a_last_line_that_a_kill_cut_off_is_no_problem(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "ste')
    assert not verify(folder).holds, "a run that completed has written its last line whole"
    (folder / "summary.json").unlink()
    result = verify(folder)
    assert result.problems == []
    assert result.status == "interrupted"


def test_what_is_no_run_folder_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        verify(tmp_path / "nothing")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has no events\.jsonl"):
        verify(tmp_path / "copy")
    (tmp_path / "copy" / "run.toml").write_text("= not toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        verify(tmp_path / "copy")


def test_the_command_says_so_and_exits_accordingly(folder: Path) -> None:
    good = CliRunner().invoke(cli, ["verify", str(folder)])
    assert (good.exit_code, good.output.splitlines()[-1]) == (0, "every rollout is accounted for")
    as_json = json.loads(CliRunner().invoke(cli, ["verify", str(folder), "--json"]).output)
    assert as_json["holds"] is True
    assert as_json["steps"] == 6
    cut_metrics(folder)
    bad = CliRunner().invoke(cli, ["verify", str(folder)])
    assert bad.exit_code == 1
    problems = verify(folder).problems
    assert bad.output.splitlines()[-1] == f"NOT verified: {len(problems)} problem(s)"
    assert bad.stderr.splitlines() == problems


def test_a_run_that_writes_meanwhile_is_not_called_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify_while_it_writes(run_dir: Path) -> Verification:
        with (folder / "events.jsonl").open("a") as journal:
            journal.write("\n" * is_writing)
        return verify(run_dir)

    cut_metrics(folder)
    monkeypatch.setattr("rllm_viewer.verify.verify", verify_while_it_writes)
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_writing = True
        ended = CliRunner().invoke(cli, ["verify", str(folder)])
        assert isinstance(ended.exception, ConfigError)
        assert "is still running, and has written into its files while they were compared" in str(ended.exception)
        is_writing = False
        assert CliRunner().invoke(cli, ["verify", str(folder)]).exit_code == 1, "nothing was written"


@pytest.mark.slow
def test_a_run_killed_between_the_lines_of_its_last_validation_is_sound(folder: Path) -> None:
    """The event of the validation is written before its groups."""
    (folder / "summary.json").unlink()
    lines = (folder / "groups.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["outcome"] for line in lines[-2:]] == ["validation", "validation"]
    for name in ("groups", "groups_index"):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    timings = folder / "group_timings.jsonl"
    timings.write_text("".join(timings.read_text().splitlines(keepends=True)[:-1]))
    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    assert [problem for problem in verify(folder).problems if "tasks" in problem] == []


@pytest.mark.slow
def test_groups_that_are_missing_do_not_blame_their_complete_index(folder: Path) -> None:
    (folder / "groups.jsonl").write_text("")
    problems = verify(folder).problems
    assert any(
        "groups_index.jsonl has" in problem and "more line(s) than groups.jsonl" in problem for problem in problems
    )
    assert [problem for problem in problems if "offsets.groups_index" in problem] == []
