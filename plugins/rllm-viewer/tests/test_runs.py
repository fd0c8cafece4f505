"""``rllm-core runs``: a line for every run folder, whatever state it is in."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_runs import train
from recorded_runs import called, write_run

from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager
from rllm_viewer import results
from rllm_viewer.commands.runs import runs


def listed(folder: Path, columns: int = 80, charset: str = "utf-8") -> list[str]:
    result = called(runs, folder, columns=columns, charset=charset)
    assert result.exit_code == 0, result.exception
    return [str(line) for line in result.output.splitlines()]


def objects(folder: Path) -> dict[str, dict[str, Any]]:
    result = called(runs, folder, "--json")
    assert result.exit_code == 0, result.exception
    return {Path(found["path"]).name: found for found in json.loads(result.output)}


def finish(run: Path, **fields: Any) -> None:
    summary = {"status": "completed", "optimizer_steps": 2, "validation": []} | fields
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def metrics(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": at, "reward_mean": at / count, **fields} for at in range(1, count + 1)]


@pytest.mark.slow
def test_a_trained_run_has_its_result(tmp_path: Path) -> None:
    settings = ("training.steps=3", "training.groups_per_step=2", "training.validation_rollouts=2")
    train(tmp_path / "mine", PluginManager.from_environment(), "sort", *settings)
    found = objects(tmp_path)["mine"]
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text(encoding="utf-8"))
    values = [validation["solved"] for validation in summary["validation"]]
    assert (found["status"], found["steps"], found["planned_steps"]) == ("completed", 3, 3)
    assert (found["workflow"], found["backend"]) == ("sort", "local")
    assert (found["measure"], found["source"], found["first"], found["last"]) == (
        "solved", "validation", values[0], values[-1],
    )  # fmt: skip
    assert len(found["curve"]) == 3
    header, line = listed(tmp_path)
    assert header.split()[0] == "NAME"
    assert line.split()[:5] == ["mine", "sort", "(local)", "completed", "3/3"]
    assert listed(tmp_path / "mine")[1].startswith("mine"), "a run folder is itself"


def test_results_come_from_training_steps_until_there_is_a_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "killed", metrics=metrics(5))
    write_run(tmp_path / "fresh")
    found = objects(tmp_path)
    assert found["killed"]["status"] == "interrupted"
    assert found["killed"]["steps"] == 5
    assert (found["killed"]["source"], found["killed"]["first"], found["killed"]["last"]) == ("training", 0.2, 1.0)
    assert (found["fresh"]["steps"], found["fresh"]["measure"], found["fresh"]["first"]) == (0, None, None)


def test_a_run_stopped_after_its_first_validation_has_the_result_of_its_steps(tmp_path: Path) -> None:
    first = [{"step": 0, "reward_mean": 0.1}]
    run = write_run(tmp_path / "stopped", metrics=metrics(5))
    finish(run, status="interrupted", validation=first)
    unstarted = write_run(tmp_path / "unstarted")
    finish(unstarted, status="failed", validation=first)
    found = objects(tmp_path)
    assert (found["stopped"]["source"], found["stopped"]["first"], found["stopped"]["last"]) == ("training", 0.2, 1.0)
    assert (found["unstarted"]["source"], found["unstarted"]["first"]) == ("validation", 0.1)


def test_a_broken_line_of_times_only_hides_what_was_spent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "killed", metrics=metrics(5))
    (run / "timings.jsonl").write_text("{broken\n", encoding="utf-8")
    found = objects(tmp_path)["killed"]
    assert (found["status"], found["steps"], found["tokens"]) == ("interrupted", 5, None)


def test_a_broken_line_is_said_with_its_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bad")
    (run / "metrics.jsonl").write_text("{broken\n", encoding="utf-8")
    assert objects(tmp_path)["bad"]["error"].startswith("metrics.jsonl has a line that is not JSON")


def test_figures_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    run = write_run(tmp_path / "foreign", metrics=metrics(3))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 0.5}\n', encoding="utf-8")
    finish(run, validation=[{"step": 0, "loss": math.inf}, {"step": 2, "loss": 0.5}])
    found = objects(tmp_path)["foreign"]
    assert (found["first"], found["last"], found["curve"]) == (None, 0.5, [None, 0.5])


def test_a_locked_folder_is_a_running_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "now", metrics=metrics(2))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert objects(tmp_path)["now"]["status"] == "running"
    assert objects(tmp_path)["now"]["status"] == "interrupted"
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # listing did not keep it


def test_supervised_runs_have_a_loss(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sft", metrics=[{"step": 1, "loss": 2.0}])
    finish(run, validation=[{"step": 0, "nll_per_token": 3.0, "solved": None}, {"step": 2, "nll_per_token": 1.5}])
    found = objects(tmp_path)["sft"]
    assert (found["measure"], found["first"], found["last"]) == ("nll_per_token", 3.0, 1.5)
    assert "loss 3 -> 1.500" in listed(tmp_path)[1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.toml", "x = ["),
        ("summary.json", "[]"),
        ("summary.json", "{"),
        ("metrics.jsonl", "5\n"),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n'),
        ("run.toml", None),
    ],
)
def test_a_damaged_folder_is_a_line(tmp_path: Path, name: str, content: str | None) -> None:
    write_run(tmp_path / "good", metrics=metrics(2))
    run = write_run(tmp_path / "bad", metrics=metrics(2))
    finish(run)
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_text(content, encoding="utf-8")
    found = objects(tmp_path)
    assert found["bad"]["status"] == "damaged"
    error = found["bad"]["error"]
    assert name in error if name != "metrics.jsonl" else error, "only a wrong value of a metric has no file"
    assert found["good"]["status"] == "interrupted"
    assert any(line.startswith("bad (damaged): ") for line in listed(tmp_path))


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    finish(write_run(tmp_path / "lost"), status="failed", error="every rollout failed " * 20)
    lines = listed(tmp_path)
    assert lines[1].split()[:4] == ["lost", "sort", "(local)", "failed"]
    assert lines[2].startswith("lost (failed): every rollout failed")


def test_folders_without_runs(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "file").touch()
    assert "no runs" in listed(tmp_path, 300)[0]
    assert objects(tmp_path) == {}
    error = called(runs, tmp_path / "nowhere").exception
    assert isinstance(error, ConfigError)
    assert "there is no folder" in str(error)


def test_the_run_that_changed_last_is_at_the_end(tmp_path: Path) -> None:
    for name, seconds in (("b", 2_000), ("a", 1_000), ("c", 3_000)):
        run = write_run(tmp_path / name)
        for file in run.iterdir():
            os.utime(file, (seconds, seconds))
    assert [line.split()[0] for line in listed(tmp_path)[1:]] == ["a", "b", "c"]
    assert objects(tmp_path)["a"]["changed"] == "1970-01-01T00:16:40+00:00"


def test_a_long_run_is_sampled(tmp_path: Path) -> None:
    """Reading all steps of hundreds of runs would take too long; the first and the last step are exact."""
    run = write_run(tmp_path / "long", metrics=metrics(5_000, more="x" * 200))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5001, "rew')  # the run writes a line right now
    found = objects(tmp_path)["long"]
    assert (found["steps"], found["first"], found["last"]) == (5_000, 1 / 5_000, 1.0)
    assert 10 < len(found["curve"]) < 50
    assert found["curve"] == sorted(found["curve"])


def test_a_last_line_longer_than_a_chunk_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "wide", metrics=metrics(3, more="x" * 300_000))
    assert objects(tmp_path)["wide"]["steps"] == 3


def test_hostile_and_wide_names_fit(tmp_path: Path) -> None:
    """`called` measures every line."""
    for name in ("\x1b[31mred\u202e", "日本語" * 25, "x" * 200, "short"):
        finish(
            write_run(tmp_path / name, metrics=metrics(9), workflow="日本" * 20), error="\x1b" * 200, status="failed"
        )
    for columns in (40, 80):
        lines = listed(tmp_path, columns)
        assert any(r"\x1b" in line for line in lines)
        assert any("日本" in line for line in lines)


def test_the_error_of_a_run_is_shown_in_full(tmp_path: Path) -> None:
    error = "model.path is not set: " + "name a folder " * 20 + "that has config.json"
    finish(write_run(tmp_path / "bad", metrics=metrics(2)), status="failed", error=error)
    assert error in " ".join(line.strip() for line in listed(tmp_path, 60))


def test_a_curve_is_shown_where_there_is_room(tmp_path: Path) -> None:
    write_run(tmp_path / "r", metrics=metrics(9))
    assert "CURVE" in listed(tmp_path)[0]
    assert listed(tmp_path)[1].endswith("█")
    assert listed(tmp_path, charset="ascii")[1].endswith("#")
    assert "CURVE" not in listed(tmp_path, 50)[0]


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("events.jsonl", b"\xf4\n", results.validations),
        ("events.jsonl", b'{"event":"validation"\n', results.validations),
        ("summary.json", b"", results.where_rollouts_ran),
        ("summary.json", b"[]", results.where_rollouts_ran),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], Any]) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name} is damaged: "):
        read(run)
