"""Tests that every hook has a page that equals its spec, with a working example."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hook_pages
import pytest
from hook_pages import RECORDS, REMARK_HOOKS, SPECS, STATE_HOOKS
from pages import ROOT, Page, write_files

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import BackendProtocol, OptimizerStep, UpdateResult
from rllm_core.engine import RolloutEngine
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.providers import CommandProvider, Provider
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

PAGES = {name: Page(hook_pages.FOLDER / f"{name}.md") for name in SPECS}
HOOKS = Page(ROOT / "docs" / "hooks.md")
CONTRACTS = [Page(path) for path in sorted((ROOT / "docs" / "contracts").glob("*.md"))]
SMALL = (
    "training.groups_per_step=4",
    "training.rollouts_per_group=4",
    "training.checkpoint_every_steps=1",
    "say_yes.tasks=6",
)
OBSERVERS = [name for name in SPECS if name not in RECORDS]


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Any]:
    """Imports the module on a hook's page."""

    def imported(name: str) -> Any:
        [block] = [b for b in PAGES[name].blocks if b.language == "python" and b.file in (None, "rllm_x/__init__.py")]
        path = tmp_path / f"example_of_{name}.py"
        path.write_text(block.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Package formed by the pages of hooks and contracts, importable during the test."""
    for page in (*CONTRACTS, PAGES["cli_commands"]):
        write_files(page, tmp_path)
    (tmp_path / "rllm_x" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "rllm_x"]:
        del sys.modules[name]


def test_every_hook_has_a_page_and_every_page_a_hook() -> None:
    assert {path.stem for path in hook_pages.FOLDER.glob("*.md")} == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_the_page_is_that_of_the_spec(name: str) -> None:
    text = PAGES[name].text
    assert text.startswith(f"# {hook_pages.signature(name)}\n")
    assert hook_pages.page(name, text) == text, "run make docs-reference"


@pytest.mark.parametrize("name", SPECS)
def test_the_overview_leads_to_the_page(name: str) -> None:
    assert f"hooks/{name}.md" in re.findall(r"\]\(([^)]+)\)", HOOKS.section(hook_pages.signature(name)))


@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", RECORDS)
def test_what_the_example_provides_is_there(name: str, example: Callable[[str], Any]) -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(example(name), "x")
    kind = RECORDS[name]
    [provided] = [p for p in plugins.providers(kind).values() if p.plugin.name == "x"]
    chosen = plugins.load(plugins.select(kind, provided.record.name))
    assert callable(chosen)
    if hasattr(chosen, "name"):
        assert chosen.name == provided.record.name
    for path in (provided.record.config, getattr(provided.record, "run_file", None)):
        if path is not None:
            assert callable(plugins.load(provided, path))


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_examples_train_together(tmp_path: Path, example: Callable[[str], Any]) -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    names = ("backends", "parsers", "workflows", "trackers", "advantage_estimators")
    for name in names:
        plugins.register(example(name), f"x-{name}")
    overrides = ("training.steps=2", "training.trackers=['csv']", "algorithm.name=signs", "csv.delimiter=';'")
    config = load_run_config("parrot", plugins, overrides=overrides, backend="bandit")
    assembly = assemble(config, plugins)
    assert isinstance(assembly.backend, BackendProtocol)
    assert isinstance(assembly.parser(), BaseParser)
    summary = asyncio.run(launch.train(assembly, tmp_path / "run", resume=False, progress=Progress()))
    assert summary["status"] == "completed"
    assert verify(tmp_path / "run").holds
    rows = (tmp_path / "run" / "trackers" / "csv" / "metrics.csv").read_text().splitlines()
    assert any(re.fullmatch(r"2;reward_mean;[\d.e-]+", row) for row in rows)


@pytest.mark.usefixtures("package")
def test_the_example_of_an_engine_is_asked_without_a_backend(example: Callable[[str], Any]) -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(example("rollout_engines"), "x")
    config = load_run_config("say_yes", plugins, backend="scripted")
    engine_class = plugins.load(plugins.select(RECORDS["rollout_engines"], "coin"))
    engine = engine_class.from_config(config, importlib.import_module("rllm_x.parser").LinesParser())
    assert isinstance(engine, RolloutEngine)


async def breaks(step: OptimizerStep) -> UpdateResult:
    raise RunError("made to fail")


def train(
    folder: Path, observers: dict[str, object], *, steps: int, resume: bool = False, fails: bool = False
) -> dict[str, Any]:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    for name, observer in observers.items():
        plugins.register(observer, name)
    config = load_run_config("say_yes", plugins, overrides=[*SMALL, f"training.steps={steps}"], backend="scripted")
    assembly = assemble(config, plugins)
    update = assembly.backend.update_policy
    assembly.backend.update_policy = lambda step: (breaks if fails and step.step == steps else update)(step)  # type: ignore[method-assign]
    run = launch.train(assembly, folder, resume=resume, progress=Progress())
    if fails:
        with pytest.raises(RunError, match="made to fail"):
            asyncio.run(run)
    else:
        asyncio.run(run)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.mark.slow
def test_the_examples_observe_a_run_and_its_resumption(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: Callable[[str], Any],
) -> None:
    monkeypatch.setenv("RLLM_TRACE_PLUGINS", "1")
    examples = {name: example(name) for name in OBSERVERS}
    for is_resumed in (False, True):
        summary = train(tmp_path / "run", examples, steps=3, resume=is_resumed, fails=not is_resumed)
        assert summary["observer_failures"] == {}
    called = set(re.findall(r"\[plugins\] (\w+) -> (\w+): ", capsys.readouterr().err))
    assert {hook for hook, plugin in called if hook == plugin} == set(OBSERVERS)
    assert examples["on_validation_end"].solved.keys() == {0, 3}
    assert (tmp_path / "run" / "ends.txt").read_text().splitlines() == [
        "start 0: failed after 2 steps",
        "start 1: completed after 3 steps",
    ]
    assert examples["on_policy_updated"].live[2] == ("resume", 2)
    assert examples["load_plugin_state"].seen_tasks


@pytest.mark.slow
def test_the_order_of_events_is_that_of_a_run(tmp_path: Path) -> None:
    heard: list[str] = []

    def listener(name: str) -> object:
        module = types.ModuleType(name)
        setattr(module, name, hookimpl(lambda: heard.append(name)))
        return module

    events = [name for name in SPECS if name not in {*RECORDS, *STATE_HOOKS, *REMARK_HOOKS}]
    train(tmp_path / "run", {name: listener(name) for name in events}, steps=1)
    seen = [name for place, name in enumerate(heard) if place == 0 or heard[place - 1] != name]
    [listed] = [b.text.split() for b in HOOKS.blocks if b.language == "text"]
    assert seen == listed


def test_the_fields_of_the_state_are_there() -> None:
    from rllm_core.events import TrainerState

    assert list(HOOKS.rows("The state")) == list(TrainerState.__dataclass_fields__)


def test_every_record_has_a_contract_or_is_a_command() -> None:
    records: dict[str, type[Provider]] = {hook: kind for hook, kind in RECORDS.items() if kind is not CommandProvider}
    assert set(hook_pages.CONTRACT_PAGES) == set(records)
