"""Tests the reference pages against configuration models, a real run folder and the command line."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import generate
import pytest
from pages import ROOT, Page

import rllm_devkit.scripted_plugin
import rllm_viewer
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import OptimizerStep
from rllm_core.cli import CORE_COMMANDS, Session, cli
from rllm_core.engine import EngineError
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.metrics import CORE_METRICS
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.resuming import RESUMABLE
from rllm_core.runs import launch
from rllm_devkit.scripted import ScriptedBackend
from rllm_devkit.templates import KINDS

RUN_FOLDER = Page(ROOT / "docs" / "run-folder.md")
CLI = Page(ROOT / "docs" / "cli.md")

# --------------------------------------------------------------------------------------------------------------------
# run-file.md


def test_the_run_file_reference_is_up_to_date() -> None:
    page = generate.PAGE.read_text(encoding="utf-8")
    assert generate.generated(page, generate.first_party_plugins()) == page, "run make docs-reference"
    written = {path.name: path.read_text(encoding="utf-8") for path in generate.SECTIONS.iterdir()}
    assert written == generate.pages(generate.first_party_plugins()), "run make docs-reference"


def test_the_table_of_capabilities_is_up_to_date() -> None:
    page = generate.CAPABILITIES.read_text(encoding="utf-8")
    assert generate.generated_capabilities(page, generate.first_party_plugins()) == page, "run make docs-reference"


def test_the_table_of_capabilities_follows_the_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    before = generate.capability_table(plugins)
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"vision": True, "losses": frozenset({"magic"})})
    after = generate.capability_table(plugins)
    assert "| losses | `reinforce` | yes | yes |" in before
    assert "| vision |  | no | no |" in before
    assert "`magic`" in after
    assert "| vision |  | yes | no |" in after


def test_every_key_says_what_it_means() -> None:
    plugins = generate.first_party_plugins()
    sections = [(path, model) for path, _, model in generate.sections(plugins)]
    sections += [(f"{path} of {name}", model) for path, name, _, model in generate.options(plugins)]
    silent = [f"{path}.{name}" for path, model in sections for name, _, text in generate.keys(model) if not text]
    assert silent == []


def test_the_options_of_every_piece_are_there() -> None:
    plugins = generate.first_party_plugins()
    text = generate.reference(plugins)["algorithm-options"]
    for section, name, _, model in generate.options(plugins):
        part = text.partition(f"## `[{section}]` of `{name}`\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \|", part, re.M)
        assert rows == list(model.model_fields), name


def test_a_description_can_come_from_the_docstring() -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    assert "| `turns` | integer | `1` | Model calls per rollout. |" in generate.reference(plugins)["workflows"]


# --------------------------------------------------------------------------------------------------------------------
# run-folder.md


@pytest.fixture(scope="module")
def failed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with failed rollouts that itself fails and is resumed, and the summary of its first launch."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(rllm_viewer, "viewer")
    overrides = ["training.steps=6", "training.groups_per_step=4", "training.rollouts_per_group=4",
                 "training.validation_rollouts=10", "training.checkpoint_every_steps=2",
                 "training.staleness_threshold=1", "rollout.max_attempts=1",
                 "rollout.quarantine_after_groups=1", "say_yes.tasks=14",
                 "training.trajectories_per_step=8"]  # fmt: skip
    config = load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")

    async def breaks(step: OptimizerStep) -> None:
        raise RunError("made to fail")

    def start(*, fails_at_step: int | None, resume: bool) -> dict[str, Any]:
        assembly = assemble(config, plugins)
        original = assembly.backend.update_policy
        assembly.backend.update_policy = lambda s: breaks(s) if s.step == fails_at_step else original(s)  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(assembly.backend).script, "failure", lambda n: EngineError("no") if n % 9 == 0 else None)
            asyncio.run(launch.train(assembly, folder, resume=resume, progress=Progress()))
        return json.loads((folder / "summary.json").read_text())

    with pytest.raises(RunError, match="made to fail"):
        start(fails_at_step=4, resume=False)
    before = json.loads((folder / "summary.json").read_text())
    start(fails_at_step=None, resume=True)
    return folder, before


def objects(folder: Path, name: str) -> list[dict[str, Any]]:
    files = [*folder.glob(f"{name}.jsonl"), *folder.glob(f"lost/*/{name}.jsonl")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_the_files_of_a_run_folder(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = failed_and_resumed
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = {re.sub(r"step-\d{6}", "step-NNNNNN", re.sub(r"^lost/0/.*", "lost/N/", name)) for name in found}
    [tree] = [block.text for block in RUN_FOLDER.blocks if block.text.startswith("run.toml")]
    documented, parent = {".lock"}, ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = ""
        if name.startswith("checkpoints/"):
            parent = name
        elif name == "backend/":
            documented.add(f"{parent}backend/policy.json")
        else:
            documented.add(parent + name)
    assert found == documented - {
        "trackers/NAME.json",
        "trackers/NAME/",
        "files.json",
        "files/NAME.py",
        "initial.json",
        "workers/worker-N.log",
    }, "a run without any"


def test_the_names_in_summary_json(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, before = failed_and_resumed
    summary = json.loads((folder / "summary.json").read_text())
    rows = RUN_FOLDER.rows("summary.json")
    assert before["status"] == "failed"
    assert summary["status"] == "completed"
    assert set(before) == set(rows)
    assert set(summary) == set(rows) - {"error"}
    assert set(re.findall(r"`(\w+)`", rows["books"][0])) == set(summary["books"])
    for books in (before["books"], summary["books"]):
        assert books["dispatched"] == sum(books.values()) - books["dispatched"]
    assert all(set(validation) == set(RUN_FOLDER.rows("validation")) for validation in summary["validation"])
    assert summary["validation"][0]["step"] == 0


@pytest.mark.parametrize("name", ["timings", "groups", "trajectories"])
def test_the_names_in_lines(failed_and_resumed: tuple[Path, dict[str, Any]], name: str) -> None:
    assert {frozenset(line) for line in objects(failed_and_resumed[0], name)} == {
        frozenset(RUN_FOLDER.rows(f"{name}.jsonl")) - {"values"}
    }, "a run whose tokens have only advantages"


def test_the_names_in_costs_jsonl(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    rows = RUN_FOLDER.rows("costs.jsonl")
    lines = objects(failed_and_resumed[0], "costs")
    assert {"rollout", "step", "costs"} <= {name for line in lines for name in line} <= set(rows)
    amounts = {name for line in lines for kind in line["costs"].values() for name in kind}
    assert amounts <= set(re.findall(r"`(\w+)`", rows["costs"][0]))


def test_the_names_in_metrics_jsonl(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    documented = set(RUN_FOLDER.rows("metrics.jsonl"))
    assert documented == {"step", "epoch", "weight_version", *CORE_METRICS}
    for line in objects(failed_and_resumed[0], "metrics"):
        assert set(line) == documented | {"skill"}  # "skill" is the scripted backend's own metric


def test_the_events(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    fields: dict[str, set[str]] = {}
    for line in objects(failed_and_resumed[0], "events"):
        event = line.pop("event")
        assert fields.setdefault(event, set(line)) == set(line), event
    rows = RUN_FOLDER.rows("events.jsonl")
    assert set(fields) == set(rows) - {"score"}, "a run without a group scorer"
    outcome = set(re.findall(r"`(\w+)`", rows["finish"][0].partition(":")[0]))
    assert fields.pop("validation") == {*RUN_FOLDER.rows("validation"), "episodes"}
    for event, names in fields.items():
        assert names == set(re.findall(r"`(\w+)`", rows[event][0].partition(":")[0])), event
    ends = [line for line in objects(failed_and_resumed[0], "events") if line["event"] in ("finish", "validation")]
    ends = [end for line in ends for end in line.get("episodes", [line])]
    assert {frozenset(end) - {"event"} for end in ends} == {frozenset(outcome)}
    parts = [part for end in ends for part in end["trajectories"]]
    assert {frozenset(part) for part in parts} == {frozenset(RUN_FOLDER.rows("Outcomes of rollouts"))}


def test_the_names_in_plugins_json_and_manifest(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = failed_and_resumed
    starts = json.loads((folder / "plugins.json").read_text())
    assert [set(start) for start in starts] == [set(RUN_FOLDER.rows("plugins.json"))] * 2
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        assert set(json.loads(manifest.read_text())) == set(RUN_FOLDER.rows("manifest.json"))


def test_the_resolved_run_file_is_a_run_file(failed_and_resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = failed_and_resumed
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    again = load_run_config(str(folder / "run.toml"), plugins)
    assert again.to_tables() == tomllib.loads((folder / "run.toml").read_text())


def test_the_keys_that_may_change_on_resume() -> None:
    listed = re.findall(r"^- `([\w.]+)`$", RUN_FOLDER.section("Resuming"), re.M)
    assert sorted(listed) == sorted(".".join(key) for key in RESUMABLE)


# --------------------------------------------------------------------------------------------------------------------
# cli.md


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command below ``group``, with the words that call it."""
    yield path, group
    context = click.Context(group, obj=Session())
    names = DOCUMENTED if group is cli else group.list_commands(context)
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


# Other plugins document their commands on their own pages.
OF_VIEWER = ["chat", "compare", "diagnose", "export", "export-model", "import", "runs", "show", "verify", "view"]
DOCUMENTED = [*CORE_COMMANDS, "new", *OF_VIEWER]
COMMANDS = dict(commands(cli, "rllm-core"))


def test_every_command_is_documented() -> None:
    assert sorted(re.findall(r"^## (rllm-core.*)$", CLI.text, re.M)) == sorted(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_documented(path: str) -> None:
    options = {
        name
        for parameter in COMMANDS[path].params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    section = CLI.section(path)
    documented = set() if "It has no options." in section else set(CLI.rows(path))
    assert documented == options
    if path != "rllm-core":
        assert re.search(r"\bExits with 0\b", section)


def test_every_kind_of_new_is_documented() -> None:
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes)? ?\|$", CLI.section("rllm-core new"), re.M)
    assert {kind: bool(file) for kind, file in table} == {kind: bool(made.target) for kind, made in KINDS.items()}
