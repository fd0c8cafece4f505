"""Follows ``docs/agents.md`` with fewer steps, and checks what the pages of frameworks say."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sysconfig
from pathlib import Path

import pytest
from following import followed
from in_process import run_in_process
from pages import PAGES, ROOT, Page, write_files
from rllm_gateway.agent import ENDPOINT

from rllm_core.run_folder.recorded import group_at, index_of

PAGE = Page(ROOT / "docs" / "agents.md")
OF_AGENTS = [PAGE, *(page for page in PAGES if page.name.startswith("docs/agents/"))]
BLOCKS = [(page, block) for page in OF_AGENTS for block in page.blocks if block.language == "python"]
# The page tells its readers to activate their environment, so that python and rllm-core are the same one's.
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
SHORT = ("steps=2", "groups_per_step=1", "rollouts_per_group=2", "validation_rollouts=1")
TRAINING = [
    command for command in PAGE.commands if command.startswith("rllm-core train") and "--dry-run" not in command
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(PAGE, tmp_path)
    followed("python tasks.py > tasks.jsonl", tmp_path, ENVIRONMENT)
    return tmp_path


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda value: getattr(value, "name", None))
def test_python_of_the_pages_compiles(page: Page, block: object) -> None:
    compile(block.text, page.name, "exec")  # type: ignore[attr-defined]


def test_functions_of_the_pages_get_what_they_ask_for() -> None:
    functions = [
        (page.name, node)
        for page, block in BLOCKS
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "solve"
    ]
    assert len(functions) >= 8
    for name, function in functions:
        parameters = {argument.arg for argument in function.args.args}
        assert parameters & {*ENDPOINT}, name
        assert len(parameters - {*ENDPOINT}) == 1, f"{name}: one column of the row"


def test_agents_import_nothing_of_ours() -> None:
    for page, block in BLOCKS:
        if block.file != "sorting.py":
            assert not re.search(r"^\s*(?:from|import) rllm", block.text, re.M), page.name


def test_every_framework_has_a_page_with_its_habits() -> None:
    linked = set(re.findall(r"agents/([\w-]+)\.md", PAGE.section("Frameworks")))
    assert linked == {page.path.stem for page in OF_AGENTS[1:]}
    for page in OF_AGENTS[1:]:
        if page.path.stem not in ("exactness", "containers"):
            assert page.rows("Habits") is not None
            assert "| habit | effect | cure |" in page.section("Habits")


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_the_commands_of_the_page_train(folder: Path, command: str) -> None:
    options = [word for setting in SHORT for word in ("-o", f"training.{setting}")]
    arguments = [*shlex.split(command)[1:], *options, "-o", "optimizer.warmup_steps=0"]
    if "--run-dir" in arguments:
        at = arguments.index("--run-dir")
        del arguments[at : at + 2]
    done = run_in_process([*arguments, "--run-dir", "runs/short"], folder=folder, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "runs/short/metrics.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        assert row["workflow/gateway_calls"] == row["turns_mean"] == 2
        assert row["workflow/gateway_roots"] == 1
        assert row["samples"] == row["trajectories"] == 2
    rollout = group_at(folder / "runs/short", index_of(folder / "runs/short")[-1]).rollouts[0]
    if "result" in rollout.episode.metadata:
        assert len(json.loads(rollout.episode.metadata["result"])) == 2
    else:
        assert all(step.reward is not None for step in rollout.episode.trajectories[0].steps)


def test_every_metric_of_the_gateway_is_on_its_page() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "plugins/rllm-gateway/rllm_gateway").glob("*.py")]
    counted = {name for text in sources for name in re.findall(r'counts\["(\w+)"\]', text)}
    listed = {name.removeprefix("gateway_") for name in Page(ROOT / "docs/agents/exactness.md").rows("Metrics")}
    assert counted
    assert counted <= listed
    assert listed - counted <= {"ignored_FIELD", "ignored_temperature", "refused_4xx", "client_seconds"}
