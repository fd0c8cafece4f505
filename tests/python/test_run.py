"""Tests `rllm_core.Run`: everything that a run has written, from Python."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest

import rllm_core
from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode, Step, Task, Trajectory

SMALL = {"training": {"steps": 4, "groups_per_step": 2, "rollouts_per_group": 4, "validation_rollouts": 8}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    rllm_core.train("sort", SMALL, backend="local", run_dir=path)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> rllm_core.Run:
    return rllm_core.Run(shutil.copytree(trained, tmp_path / "run"))


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a library look as if it were not installed."""
    original = builtins.__import__

    def imported(module: str, *arguments: Any, **more: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ImportError(name)
        return original(module, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", imported)


def test_what_a_run_has_measured(run: rllm_core.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.status == "completed"
    assert run.summary["optimizer_steps"] == 4
    assert run.config["training"]["groups_per_step"] == 2
    assert [validation["step"] for validation in run.validations] == [0, 4]
    assert isinstance(run.metrics, pandas.DataFrame)
    assert list(run.metrics["step"]) == [1, 2, 3, 4]
    assert list(run.timings["step"]) == [1, 2, 3, 4]
    without("pandas", monkeypatch)
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert run.metrics == [json.loads(line) for line in lines]


def test_it_is_one_line_also_as_html(run: rllm_core.Run) -> None:
    first, last = (validation["solved"] for validation in run.validations)
    assert repr(run) == f"Run({str(run.path)!r}): completed, 4 of 4 steps, solved {first:.3f} -> {last:.3f}"
    path = run.path.rename(run.path.with_name("<b>\x1b[2J"))
    assert repr(rllm_core.Run(path)).isprintable()
    assert "<b>" not in rllm_core.Run(path)._repr_html_()


def test_a_run_without_a_summary_is_unfinished(run: rllm_core.Run) -> None:
    validations = run.validations
    (run.path / "summary.json").unlink()
    assert run.status == "unfinished"
    assert run.summary == {}
    assert run.validations == validations
    assert "unfinished, 4 of 4 steps" in repr(run)
    assert run.plot().axes


def test_a_plot_that_a_notebook_shows(run: rllm_core.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    figure: Any = run.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.axes[0].get_lines()
    without("matplotlib", monkeypatch)
    with pytest.raises(RunError, match=r"rllm-core\[plots\]"):
        run.plot()


def recorded(step: int, group: int | None, reward: float) -> RecordedGroup:
    episodes = [
        Episode(
            task_id=f"task-{step}",
            rollout_id=f"{step}-{index}-0",
            rollout_index=index,
            trajectories=[Trajectory(steps=[Step(prompt_ids=[1, 2], completion_ids=[index])], reward=reward)],
        )
        for index in range(2)
    ]
    outcome = "validation" if group is None else "trained"
    rollouts = [RecordedRollout(episode, outcome, outcome) for episode in episodes]
    return RecordedGroup(step, group, Task(task_id=f"task-{step}"), "first", outcome, outcome, 1, rollouts)


def test_groups_and_episodes_by_step(run: rllm_core.Run) -> None:
    groups = [recorded(0, None, 0.5), recorded(1, 0, 0.0), recorded(2, 3, 1.0), recorded(2, None, 0.75)]
    offset, index = 0, []
    with (run.path / "groups.jsonl").open("wb") as file:
        for group in groups:
            line = group.to_json().encode()
            index.append(json.dumps(IndexedGroup.of(group, offset, len(line)).to_json()))
            file.write(line + b"\n")
            offset += len(line) + 1
    (run.path / "groups_index.jsonl").write_text("".join(f"{line}\n" for line in index), encoding="utf-8")
    assert [(group.step, group.group) for group in run.groups()] == [(0, None), (1, 0), (2, 3), (2, None)]
    assert [group.group for group in run.groups(2)] == [3, None]
    assert [group.step for group in run.groups(validation=True)] == [0, 2]
    assert [group.group for group in run.groups(2, validation=False)] == [3]
    assert [episode.trajectories[0].reward for episode in run.episodes(validation=True)] == [0.5, 0.5, 0.75, 0.75]
    assert list(run.episodes(1)) == [rollout.episode for rollout in groups[1].rollouts]
    assert list(run.groups(7)) == []


@pytest.mark.parametrize(
    ("file", "damaged", "read"),
    [
        ("metrics.jsonl", '{"step":1}\n{"step":,}\n', lambda run: run.metrics),
        ("summary.json", '{"status": "comp', lambda run: run.status),
        ("groups_index.jsonl", "{}\n5\n", lambda run: list(run.groups())),
        ("groups_index.jsonl", '{"offset": 0}\n', lambda run: list(run.groups())),
        ("groups_index.jsonl", "", lambda run: list(run.groups())),
        ("summary.json", "[1]", lambda run: run.status),
        ("run.toml", "[training", lambda run: run.config),
    ],
)
def test_a_damaged_file_is_named(run: rllm_core.Run, file: str, damaged: str, read: Any) -> None:
    (run.path / file).write_text(damaged, encoding="utf-8")
    with pytest.raises(RunError, match=re.escape(str(run.path / file))):
        read(run)
    assert "\n" not in repr(run), "a notebook shows it, whatever the folder has"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no run\.toml"):
        rllm_core.Run(tmp_path)


def test_it_is_a_path(run: rllm_core.Run) -> None:
    assert Path(run) == run.path
