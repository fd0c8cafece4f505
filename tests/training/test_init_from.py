"""Tests runs that start from the weights of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.folder import RunDir
from rllm_devkit.scripted import ScriptedBackend
from rllm_viewer.verify import verify

if TYPE_CHECKING:  # at run time, the name is another folder's conftest where several are collected
    from conftest import Run, RunScripted

KEPT = ("training.checkpoint_every_steps=2", "training.keep_checkpoints=9")


@pytest.fixture
def source(run_scripted: RunScripted, tmp_path: Path) -> Run:
    """A run with checkpoints of steps 2, 4 and 6."""
    found = run_scripted(*KEPT, path=tmp_path / "source")
    assert found.error is None
    return found


def skill_of(run: Run, step: int) -> float:
    skill: float = run.lines("metrics")[step - 1]["skill"]
    return skill


def initial_calls(run: Run) -> list[tuple[Any, ...]]:
    backend = run.assembly.backend
    assert isinstance(backend, ScriptedBackend)
    return [call for call in backend.calls.log if call[0] in ("load_weights", "load_checkpoint", "update_policy")][:2]


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "step"), [("", 6), (":4", 4), (":2", 2)])
def test_only_the_weights_come_from_the_other_run(
    source: Run, run_scripted: RunScripted, tmp_path: Path, suffix: str, step: int
) -> None:
    run = run_scripted(f"training.init_from={source.path}{suffix}", path=tmp_path / "next")
    assert run.error is None
    assert initial_calls(run) == [("load_weights", skill_of(source, step)), ("update_policy", 1)]
    assert run.summary["optimizer_steps"] == 6
    assert run.summary["resumed_from_step"] is None
    begin, *_ = run.lines("events")
    assert (begin["step"], begin["incarnation"]) == (0, 0)
    syncs = [event for event in run.lines("events") if event["event"] == "sync"]
    assert (syncs[0]["version"], syncs[0]["reason"]) == (0, "start")
    dispatched = [
        [event["task"] for event in each.lines("events") if event["event"] == "dispatch"] for each in (source, run)
    ]
    assert dispatched[0] == dispatched[1]
    written = load_run_config(str(run.path / "run.toml"), run.assembly.plugins).training.init_from
    assert written == f"{source.path}:{step}"
    assert json.loads((run.path / "initial.json").read_text()).keys() == {"run", "step", "manifest_sha256"}


def crashed_at_once(run: Run) -> None:
    """Leaves what a run leaves that was killed before its first checkpoint."""
    shutil.rmtree(run.path / "checkpoints")


@pytest.mark.slow
def test_a_run_that_crashed_before_its_first_checkpoint_starts_from_the_same_weights(
    source: Run, run_scripted: RunScripted, tmp_path: Path
) -> None:
    path, reference = tmp_path / "next", f"training.init_from={source.path}"
    whole = run_scripted(reference, path=tmp_path / "whole")
    first = run_scripted(reference, "training.steps=2", path=path, prepare=None)
    crashed_at_once(first)
    longer = run_scripted(*KEPT, "training.steps=8", path=source.path, resume=True)  # a later checkpoint
    assert longer.error is None
    again = run_scripted(reference, path=path, resume=True)
    assert again.error is None
    assert initial_calls(again)[0] == ("load_weights", skill_of(source, 6))
    assert (again.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_resumed_run_does_not_need_the_other_run_any_more(
    source: Run, run_scripted: RunScripted, tmp_path: Path
) -> None:
    reference = f"training.init_from={source.path}"
    run = run_scripted(reference, path=tmp_path / "next")
    shutil.rmtree(source.path)
    resumed = run_scripted(f"{reference}:6", "training.steps=8", path=run.path, resume=True)
    assert resumed.error is None
    assert initial_calls(resumed)[0][0] == "load_checkpoint"


@pytest.mark.slow
def test_a_reference_policy_is_loaded_again_on_resume(source: Run, run_scripted: RunScripted, tmp_path: Path) -> None:
    with_reference = {"policies": frozenset({"current", "reference"}), "kl_loss": True}
    settings = (f"training.init_from={source.path}", "algorithm.kl.coefficient=0.1")

    def run(*more: str, resume: bool) -> Run:
        return run_scripted(*settings, *more, path=tmp_path / "next", resume=resume, backend="scripted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedBackend, "capability_overrides", with_reference)
        assert run(resume=False).error is None
        resumed = run("training.steps=8", resume=True)
        assert resumed.error is None
        assert [call[0] for call in initial_calls(resumed)] == ["load_weights", "load_checkpoint"]
        shutil.rmtree(source.path)
        config = load_run_config(str(tmp_path / "next" / "run.toml"), resumed.assembly.plugins)
        with pytest.raises(ConfigError, match="is not a run folder"):
            RunDir(tmp_path / "next", config, resume=True)


@pytest.mark.slow
def test_another_checkpoint_in_the_same_place_is_refused(
    source: Run, run_scripted: RunScripted, tmp_path: Path
) -> None:
    run = run_scripted(f"training.init_from={source.path}", path=tmp_path / "next")
    crashed_at_once(run)
    shutil.rmtree(source.path)
    other = run_scripted(*KEPT, "training.seed=5", path=source.path)
    assert other.error is None
    config = load_run_config(str(run.path / "run.toml"), run.assembly.plugins)
    with pytest.raises(ConfigError, match="is not the checkpoint that this run started from"):
        RunDir(run.path, config, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{source}:3", "has no checkpoint of step 3, but of 2, 4, 6"),
        ("{source}/nothing", "is not a run folder; name one, or RUN:STEP"),
        ("", "at least 1 character"),
    ],
)
def test_what_does_not_exist_is_one_line(
    source: Run, plugins: PluginManager, tmp_path: Path, reference: str, message: str
) -> None:
    named = reference.format(source=source.path)

    def begin() -> None:
        overrides = [f"training.init_from={json.dumps(named)}"]
        config = load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")
        RunDir(tmp_path / "next", config, resume=False)

    with pytest.raises(ConfigError, match=message) as refused:
        begin()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "next").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "backend", "both"),
    [
        (("model.path=other",), "scripted", ("model.path = ''", "'other'")),
        ((), "scripted_colocated", ("'scripted'", "'scripted_colocated'")),
    ],
)
def test_another_backend_or_model_is_refused_with_both(
    source: Run, plugins: PluginManager, tmp_path: Path, overrides: tuple[str, ...], backend: str, both: tuple[str, str]
) -> None:
    given = (f"training.init_from={source.path}", *overrides)
    config = load_run_config("say_yes", plugins, overrides=given, backend=backend)
    with pytest.raises(ConfigError) as refused:
        RunDir(tmp_path / "next", config, resume=False)
    assert all(name in str(refused.value) for name in both)
    assert not (tmp_path / "next").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy.json", "foreign.pt"])
def test_a_damaged_or_foreign_file_is_refused_before_anything_is_loaded(
    source: Run, plugins: PluginManager, tmp_path: Path, name: str
) -> None:
    (source.path / "checkpoints" / "step-000006" / "backend" / name).write_text("{}")
    config = load_run_config("say_yes", plugins, overrides=[f"training.init_from={source.path}"], backend="scripted")
    with pytest.raises(RunError, match=f"is damaged: backend/{name}"):
        RunDir(tmp_path / "next", config, resume=False)
    assert not (tmp_path / "next").exists()


@pytest.mark.slow
def test_a_backend_that_cannot_is_refused_before_it_is_allocated(
    source: Run, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ScriptedBackend, "load_weights")
    config = load_run_config("say_yes", plugins, overrides=[f"training.init_from={source.path}"], backend="scripted")
    with pytest.raises(ConfigError, match="backend 'scripted' cannot start from another run's weights"):
        assemble(config, plugins)


@pytest.mark.slow
def test_a_run_file_names_a_run_relative_to_itself(source: Run, plugins: PluginManager, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    file = folder / "run.toml"
    file.write_text('workflow = "say_yes"\nbackend = "scripted"\n[training]\ninit_from = "../source:4"\n')
    assert load_run_config(str(file), plugins).training.init_from == f"{source.path}:4"


@pytest.mark.slow
def test_what_a_resume_refuses_names_the_way_to_keep_the_weights(source: Run, plugins: PluginManager) -> None:
    config = load_run_config(str(source.path / "run.toml"), plugins, overrides=["training.groups_per_step=2"])
    with pytest.raises(ConfigError, match=f"--init-from {source.path}"):
        RunDir(source.path, config, resume=True)


@pytest.mark.slow
def test_the_folder_of_such_a_run_verifies(source: Run, run_scripted: RunScripted, tmp_path: Path) -> None:
    run = run_scripted(f"training.init_from={source.path}", path=tmp_path / "next")
    assert verify(run.path).problems == []
