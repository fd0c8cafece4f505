"""Tests that every block of every page is covered by some test, and covers the remaining ones.

``python`` runs in `test_docs` and `test_hooks`; commands in ``sh`` and ``console`` parse in `test_docs`; ``toml`` that
is a run file loads there. Here: other programs' commands, output, other TOML, JSON, and names in the text.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from generate import first_party_plugins
from in_process import run_in_process
from pages import PAGES, ROOT, Block, Page, exists, texts

from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import to_toml
from rllm_core.plugins.discovery import GROUP

# test_tutorial.py follows this page literally: every command, change and output.
FOLLOWED = "docs/writing-a-workflow.md"
BLOCKS = [(page, block) for page in PAGES for block in page.blocks if page.name != FOLLOWED]
# Text blocks are pictures or output; these tests compare them.
TEXT = {
    "README.md": "test_a_picture_names_what_there_is",
    "docs/asynchronous-training.md": "test_the_live_view",
    "docs/contracts/backend.md": "test_the_order_of_a_step",
    "docs/index.md": "test_what_a_run_prints",
    "docs/hooks.md": "test_hooks.test_the_order_of_events_is_that_of_a_run",
    "docs/looking-at-runs.md": "test_looking_at_runs.test_the_page_has_what_the_commands_print",
    "docs/memory.md": "test_memory.test_the_page_has_what_a_dry_run_prints",
    "docs/quickstart.md": "test_what_a_run_prints",
    "docs/run-folder.md": "test_reference.test_the_files_of_a_run_folder",
}
# Shell programs other than rllm-core and make. This test does not check what they install or start.
PROGRAMS = (
    "apt install ",
    "docker run ",
    "python -m venv ",
    ".venv-verifiers/bin/pip install ",
    "python tasks.py > tasks.jsonl",
    "pip install ",
    'export PIP_FIND_LINKS="$PWD/dist"',
    "pytest ",
    "touch ",
    "pre-commit",
    "ray start ",
    "sbatch --nodes 4 slurm.sh ",
    "bash ray-job.sh ",
    "tensorboard --logdir ",
    "vllm serve ",
    'eval "$(rllm-core completion ',
)


def blocks_of(language: str) -> list[tuple[Page, Block]]:
    return [(page, block) for page, block in BLOCKS if block.language == language]


def test_every_block_has_a_language_that_is_looked_at() -> None:
    assert {block.language for _, block in BLOCKS} <= {"python", "sh", "console", "toml", "json", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_a_block(page: Page) -> None:
    assert len(re.findall(r"^\s*(?:```|~~~)", page.text, re.M)) == 2 * len(page.blocks)


def test_all_text_is_compared_by_somebody() -> None:
    assert {page.name for page, _ in blocks_of("text")} == set(TEXT)
    for test in TEXT.values():
        module, _, name = test.rpartition(".")
        assert callable(getattr(importlib.import_module(module) if module else sys.modules[__name__], name))


def commands(language: str) -> list[str]:
    lines = [line for _, block in blocks_of(language) for line in block.text.splitlines()]
    if language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return sorted({line.partition(" #")[0].strip() for line in lines if line and not line.startswith("#")})


@pytest.mark.parametrize("command", [*commands("sh"), *commands("console")])
def test_a_command_is_one_that_is_known(command: str) -> None:
    without_variables = re.sub(r"^(\w+=\S* )+", "", command)
    module = re.fullmatch(r"(?:\.venv/bin/)?python -m ((?:benchmarks|rllm_\w+)\.[\w.]+)(?: .*)?", without_variables)
    if module:
        assert importlib.util.find_spec(module[1])
    else:
        assert without_variables.startswith(("rllm-core", "make ", *PROGRAMS)), command
    shlex.split(command)


# --------------------------------------------------------------------------------------------------------------------
# TOML and JSON


@pytest.mark.parametrize(("page", "block"), blocks_of("toml"), ids=lambda value: getattr(value, "name", None))
def test_toml_is_a_run_file_a_part_of_one_or_a_package(page: Page, block: Block) -> None:
    tables = tomllib.loads(block.text)
    if "project" in tables:
        [points] = [tables["project"]["entry-points"][GROUP]]
        modules = {str(b.file).removesuffix("/__init__.py").removesuffix(".py") for b in page.blocks if b.file}
        assert set(points.values()) <= modules, "the entry point names a module that the page does not show"
    elif "workflow" not in tables and page.path.parent.name != "hooks":  # other tests check those
        workflow = "agent" if "agent" in tables else "sort"
        if workflow == "agent":  # which has keys without defaults
            tables["agent"] = {"command": ["x"], "reward": "x", "train_file": "x"} | tables["agent"]
        overrides = [f"{section}.{key}={as_toml(value)}" for section, key, value in leaves(tables)]
        load_run_config(workflow, first_party_plugins(), overrides=overrides, backend="local")


def as_toml(value: object) -> str:
    return to_toml({"section": {"key": value}}).partition("=")[2].strip()


def leaves(tables: dict[str, object], path: str = "") -> list[tuple[str, str, object]]:
    found = []
    for key, value in tables.items():
        if isinstance(value, dict):
            found += leaves(value, f"{path}.{key}" if path else key)
        else:
            found.append((path, key, value))
    return found


@pytest.mark.parametrize(("page", "block"), blocks_of("json"), ids=lambda value: getattr(value, "name", None))
def test_json_is_json(page: Page, block: Block) -> None:
    assert [json.loads(line) for line in block.text.splitlines()]


# --------------------------------------------------------------------------------------------------------------------
# Output


@pytest.mark.parametrize(("page", "block"), blocks_of("console"), ids=lambda value: getattr(value, "name", None))
def test_output_is_what_the_command_prints(page: Page, block: Block) -> None:
    command, shown = "", []
    for line in [*block.text.splitlines(), "$ "]:
        if not line.startswith("$ "):
            shown.append(line.split())
            continue
        if shown:
            printed = run(ROOT, *shlex.split(command)[1:])
            assert [row for row in shown if row not in [out.split() for out in printed.splitlines()]] == []
        command, shown = line[2:], []


def run(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLLM_")}
    done = run_in_process(arguments, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_a_run_prints(tmp_path: Path) -> None:
    short = ("training.steps=20", "training.validation_rollouts=64", "optimizer.warmup_steps=0")
    arguments = ("train", "sort", "--backend", "local", *(word for one in short for word in ("-o", one)))
    done = run_in_process(arguments, folder=tmp_path, environment=os.environ)
    printed = [shape(line) for line in (done.stderr + done.stdout).splitlines()]
    for name in ("quickstart", "index"):
        [block] = [block for block in Page(ROOT / "docs" / f"{name}.md").blocks if block.language == "text"]
        lines = iter(printed)  # all in their order, with others between them
        assert [line for line in block.text.splitlines() if shape(line) not in lines] == [], name


def shape(line: str) -> str:
    line = re.sub(r"runs/sort-[\d-]+", "runs/sort-N", re.sub(r'"[^"]*"', '"..."', line))
    return re.sub(r"[▁▂▃▄▅▆▇█]+", "▁", re.sub(r"\d[\d.,]*", "N", line))


def test_the_live_view() -> None:
    [block] = [b for b in Page(ROOT / "docs" / "asynchronous-training.md").blocks if b.language == "text"]
    said = " ".join(text for path in (ROOT / "rllm_core" / "run_folder").glob("*.py") for text in texts(path))
    for word in {*re.findall(r"[a-z][a-z-]+", block.text)} - {"s"}:
        assert word in said, word


def test_the_order_of_a_step() -> None:
    from rllm_core import backend

    [block] = [b for b in Page(ROOT / "docs" / "contracts" / "backend.md").blocks if b.language == "text"]
    assert block.text.strip() in (backend.__doc__ or "")


def test_a_picture_names_what_there_is() -> None:
    from rllm_core import hookspecs, providers

    [block] = [b for b in Page(ROOT / "README.md").blocks if b.language == "text"]
    assert re.findall(r"on_\w+", block.text) == [name for name in vars(hookspecs) if name == "on_policy_updated"]
    assert {kind.kind for kind in (providers.WorkflowProvider, providers.BackendProvider)} <= set(block.text.split())


# --------------------------------------------------------------------------------------------------------------------
# Names in the prose


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a page lists deprecated names
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_exist(page: Page) -> None:
    for name in sorted(set(re.findall(r"`(rllm_core(?:\.\w+)+)", page.prose))):
        assert exists(name), f"{page.name} names {name}"
