"""Tests that need no tracker library: records, sections, installation hints and run ids."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rllm_trackers
from rllm_trackers.identity import identity
from rllm_trackers.mlflow import valid_name
from rllm_trackers.tables import flat

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.missing import first_party
from rllm_core.providers import TrackerProvider

LIBRARIES = {
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
every_tracker = pytest.mark.parametrize("tracker", sorted(LIBRARIES))


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    manager.register(rllm_trackers, "trackers")
    return manager


def assembled(plugins: PluginManager, tracker: str, *overrides: str) -> Parts:
    named = (f'training.trackers=["{tracker}"]', *overrides)
    return assemble(load_run_config("say_yes", plugins, overrides=named, backend="scripted"), plugins)


def without(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a library look missing, even if it is installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)


def test_the_records(plugins: PluginManager) -> None:
    assert set(plugins.providers(TrackerProvider)) == set(LIBRARIES)
    assert {name for kind, name in first_party() if kind is TrackerProvider} == set(LIBRARIES)


@every_tracker
def test_finding_and_loading_a_tracker_imports_no_library(tracker: str, plugins: PluginManager) -> None:
    provided = plugins.select(TrackerProvider, tracker)
    assert plugins.load(provided).name == tracker
    assert LIBRARIES[tracker] not in sys.modules


@every_tracker
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(
    tracker: str, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(LIBRARIES[tracker], monkeypatch)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with pytest.raises(PluginError) as caught:
        assembled(plugins, tracker)
    message = str(caught.value)
    assert message.startswith(f"tracker '{tracker}' needs {LIBRARIES[tracker]}")
    assert message.endswith(f"pip install 'rllm-trackers[{tracker}]'")
    assert "\n" not in message


@every_tracker
def test_each_extra_brings_the_library(tracker: str) -> None:
    import tomllib

    about = tomllib.loads((Path(rllm_trackers.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = about["project"]["optional-dependencies"]
    assert set(extras) == set(LIBRARIES)
    assert any(requirement.startswith(LIBRARIES[tracker]) for requirement in extras[tracker])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("wandb.mode=cloud", "wandb.mode"),
        ("wandb.api_key=secret", "api_key"),
        ("mlflow.experiment=''", "mlflow.experiment"),
        ("swanlab.mode=disabled", "swanlab.mode"),
        ("tensorboard.dir=x", "tensorboard.dir"),
        ("trackio.tags=[]", "trackio.tags"),
    ],
)
def test_sections_are_checked(override: str, says: str, plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match=says):
        assembled(plugins, override.partition(".")[0], override)


@every_tracker
def test_nothing_leaves_the_machine_unless_the_run_file_says_so(tracker: str, plugins: PluginManager) -> None:
    config = load_run_config(
        "say_yes", plugins, overrides=(f'training.trackers=["{tracker}"]',), backend="scripted"
    ).plugins[tracker]
    sends = {"mode": "offline", "tracking_uri": "", "space_id": "", "server_url": ""}
    found: dict[str, Any] = {key: value for key, value in config if key in sends}
    assert found == {key: sends[key] for key in found}


def test_flat_tables() -> None:
    tables = {"workflow": "sort", "training": {"steps": 3, "trackers": ["a"]}, "a": {"b": {"c": True}}}
    assert flat(tables) == {"workflow": "sort", "training.steps": 3, "training.trackers": "['a']", "a.b.c": True}


def test_an_id_is_made_once_for_a_run_folder(tmp_path: Path) -> None:
    made = iter(["one", "two", "three"])
    assert identity(str(tmp_path), "wandb", lambda: next(made)) == ("one", False)
    assert identity(str(tmp_path), "wandb", lambda: next(made)) == ("one", True)
    assert identity(str(tmp_path), "trackio", lambda: next(made)) == ("two", False)
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text()) == {"id": "one"}
    assert {path.name for path in (tmp_path / "trackers").iterdir()} == {"wandb.json", "trackio.json"}


def test_names_as_mlflow_takes_them() -> None:
    assert valid_name("reward_mean/solver") == "reward_mean/solver"
    assert valid_name("validation/pass@4: #1") == "validation/pass_4_ _1"
    assert len(valid_name("x" * 300)) == 250
    assert [valid_name(name) for name in ("/a", "a/", "a//b", "a/../b", "a/.")] == ["_a", "a_", "a/_b", "a/_/b", "a/_"]
    assert valid_name("..a/.b/...") == "_a/.b/..."


def test_the_module_is_light() -> None:
    importlib.reload(rllm_trackers)
    assert not {"wandb", "mlflow", "tensorboard"} & set(sys.modules)
