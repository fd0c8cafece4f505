"""``rllm-core compare``: what differs between runs, also between runs of different length and kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from local_runs import train
from recorded_runs import called, write_run

from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager
from rllm_viewer.commands.compare import compare


def compared(*arguments: object, columns: int = 80) -> str:
    result = called(compare, *arguments, columns=columns)
    assert result.exit_code == 0, result.exception
    return result.output


def with_validations(run: Path, *validations: dict[str, Any]) -> Path:
    lines = (json.dumps({"event": "validation", **one}, separators=(",", ":")) for one in validations)
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"event":"valid', encoding="utf-8")
    return run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    short = write_run(
        tmp_path / "short", metrics=[{"step": 1, "reward_mean": 0.25, "workflow/share": 0.5}], training={"steps": 1}
    )
    rows = [{"step": at, "reward_mean": at / 30} for at in range(1, 31)]
    long = write_run(tmp_path / "long", metrics=rows, training={"steps": 30})
    with_validations(short, {"step": 0, "solved": 0.5, "reward_mean": None})
    with_validations(long, {"step": 0, "solved": None}, *({"step": at, "solved": 0.75} for at in range(1, 31)))
    return short, long


@pytest.mark.slow
def test_trained_runs_differ_in_their_settings_only(tmp_path: Path) -> None:
    settings = ("training.groups_per_step=2", "training.validation_rollouts=2")
    plugins = PluginManager.from_environment()
    for name, steps, seed in (("a", 1, 1), ("b", 2, 2)):
        train(tmp_path / name, plugins, "sort", *settings, f"training.steps={steps}", f"training.seed={seed}")
    found = json.loads(compared(tmp_path / "a", tmp_path / "b", "--json"))
    assert found["settings"] == {"training.seed": [1, 2], "training.steps": [1, 2]}
    assert found["versions"] == {}
    assert found["metrics"]["step"] == [1, 2]
    assert set(found["validations"]["solved"]) == {"0", "1", "2"}
    assert found["validations"]["solved"]["2"][0] is None
    text = compared(tmp_path / "a", tmp_path / "b")
    assert "versions: the same" in text
    assert ["training.seed", "1", "2"] in [line.split() for line in text.splitlines()]


def test_runs_of_different_length_and_missing_values(pair: tuple[Path, Path]) -> None:
    text = compared(*pair)
    rows = [line.split() for line in text.splitlines()]
    assert ["training.steps", "1", "30"] in rows
    assert ["step", "0", "50%", "-"] in rows
    assert ["step", "30", "-", "75%"] in rows
    assert ["reward_mean", "0.250", "1"] in rows
    assert ["workflow/share", "0.500", "-"] in rows
    assert "12 of 31 steps" in text
    assert any(line.startswith("B  ▁") and line.endswith("█") for line in text.splitlines())


def test_versions_that_differ(pair: tuple[Path, Path]) -> None:
    for run, version in zip(pair, ("1.0", "1.1"), strict=True):
        launches = [{"python": "3.11", "plugins": {}}, {"python": "3.11", "plugins": {"maze": f"rllm-maze {version}"}}]
        (run / "plugins.json").write_text(json.dumps(launches), encoding="utf-8")
    assert json.loads(compared(*pair, "--json"))["versions"] == {"plugins.maze": ["rllm-maze 1.0", "rllm-maze 1.1"]}


def test_values_that_do_not_fit_are_below_each_other(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(at), **{"workflow": "日本" * 30 + str(at), "parser": f"\u202e{at}"}) for at in range(3)
    ]
    text = compared(*folders, columns=60)
    assert "workflow" in text
    assert r"\u202e1" in text
    assert sum(line.split()[:1] in (["A"], ["B"], ["C"]) for line in text.splitlines()) >= 3


def test_many_runs_have_letters(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"r{at}", training={"seed": at}) for at in range(28)]
    text = compared(*folders)
    assert "Z: " in text
    assert "A1: " in text


def test_runs_without_steps_and_validations(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in "ab"]
    text = compared(*folders)
    assert "settings: the same" in text
    assert "no validation has ended" in text
    assert json.loads(compared(*folders, "--json"))["metrics"] == {}


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl"])
def test_missing_lines_of_a_run_that_has_ended_are_damage(pair: tuple[Path, Path], file: str) -> None:
    short, long = pair
    summary = {"status": "completed", "optimizer_steps": 30, "validation": [{}] * 31}
    (long / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    compared(short, long)
    (long / file).unlink()
    result = called(compare, short, long)
    assert result.exit_code == 1
    assert f"{file} is damaged: it has 0 of 3" in str(result.exception)


def test_a_value_and_its_absence_differ(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in "ab"]
    with (folders[1] / "run.toml").open("a", encoding="utf-8") as file:
        file.write("\n[extra]\nflag = true\n")
    assert json.loads(compared(*folders, "--json"))["settings"] == {"extra.flag": [None, True]}


@pytest.mark.slow
def test_a_plot_is_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for name, start in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml"), ("curves", b"\x89PNG")):
        text = compared(*pair, "--plot", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
        assert text.splitlines()[-1].startswith("plot: ") or name in text
    assert json.loads(compared(*pair, "--plot", tmp_path / "p.png", "--json"))["plot"] == str(tmp_path / "p.png")


def test_a_plot_replaces_no_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_text("mine", encoding="utf-8")
    error = called(compare, *pair, "--plot", tmp_path / "plot.png").exception
    assert isinstance(error, ConfigError)
    assert "exists; choose another name" in str(error)
    assert (tmp_path / "plot.png").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["nowhere/plot.png", "plot.unknown"])
def test_a_plot_that_cannot_be_written_is_one_line(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    error = called(compare, *pair, "--plot", tmp_path / name).exception
    assert isinstance(error, ConfigError)
    assert "cannot be written" in str(error)


def test_without_matplotlib_or_steps_there_is_no_plot(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = [write_run(tmp_path / f"empty{at}") for at in range(2)]
    error = called(compare, *empty, "--plot", tmp_path / "p.png").exception
    assert isinstance(error, ConfigError)
    assert "nothing to plot" in str(error)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = called(compare, *pair, "--plot", tmp_path / "p.png").exception
    assert isinstance(error, ConfigError)
    assert "pip install rllm-core[plots]" in str(error)


def test_folders_that_are_no_runs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    error = called(compare, pair[0], tmp_path).exception
    assert isinstance(error, ConfigError)
    assert "is not a run folder" in str(error)
    assert called(compare, pair[0]).exit_code == 2


@pytest.mark.parametrize("content", ["{\n", "5\n", "{}\n", '{"step": null}\n'])
def test_a_damaged_run_is_one_line(pair: tuple[Path, Path], content: str) -> None:
    (pair[1] / "metrics.jsonl").write_text(content, encoding="utf-8")
    error = called(compare, *pair).exception
    assert isinstance(error, RunError)
    assert "is damaged" in str(error)
