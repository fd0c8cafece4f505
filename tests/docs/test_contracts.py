"""Tests that every contract has a page with every check of `rllm_devkit.checks`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hook_pages import CONTRACT_PAGES, RECORDS
from pages import ROOT, Page, write_files

from rllm_devkit import checks as devkit
from rllm_devkit.checks import (
    algorithms,
    backends,
    engines,
    group_scorers,
    hosts,
    losses,
    parsers,
    rewards,
    sandboxes,
    task_samplers,
    trackers,
    workflows,
)
from rllm_devkit.checks.provided import checks_of

FOLDER = ROOT / "docs" / "contracts"
# Page of each set of checks.
CHECKS = {
    "backend": (devkit.check_backend, {**backends.BEFORE_TRAINING, **backends.TRAINING}),
    "correction": (devkit.check_correction, {"options": None, **algorithms.CORRECTION_CHECKS}),
    "engine": (devkit.check_engine, engines.ENGINE_CHECKS),
    "estimator": (devkit.check_estimator, {"options": None, **algorithms.ESTIMATOR_CHECKS}),
    "group-scorer": (devkit.check_group_scorer, group_scorers.GROUP_SCORER_CHECKS),
    "loss": (devkit.check_policy_loss, {"options": None, **losses.LOSS_CHECKS}),
    "parser": (devkit.check_parser, parsers.CHECKS),
    "reward-function": (devkit.check_reward_function, rewards.REWARD_CHECKS),
    "rollout-host": (devkit.check_rollout_host, hosts.ROLLOUT_HOST_CHECKS),
    "sandbox": (devkit.check_sandbox, sandboxes.SANDBOX_CHECKS),
    "task-sampler": (devkit.check_task_sampler, task_samplers.TASK_SAMPLER_CHECKS),
    "tracker": (devkit.check_tracker, trackers.TRACKER_CHECKS),
    "workflow": (devkit.check_workflow, workflows.WORKFLOW_CHECKS),
}


def test_every_contract_has_its_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(CONTRACT_PAGES.values())


def test_every_check_function_is_on_a_page() -> None:
    named = {check.__name__ for check, _ in CHECKS.values()}
    of_workers = "check_worker"  # on the page of the protocol
    assert named == {name for name in devkit.__all__ if name.startswith("check_")} - {of_workers}
    for page, (check, _) in CHECKS.items():
        assert f"`{check.__name__}(" in Page(FOLDER / f"{page}.md").text.replace("await ", "")


@pytest.mark.parametrize("page", CHECKS)
def test_every_check_is_on_its_page(page: str) -> None:
    _, checks = CHECKS[page]
    assert list(Page(FOLDER / f"{page}.md").rows("Checks")) == list(checks)


@pytest.mark.parametrize("hook", [hook for hook, page in CONTRACT_PAGES.items() if page in CHECKS])
def test_every_test_of_a_contract_class_is_on_its_page(hook: str) -> None:
    text = Page(FOLDER / f"{CONTRACT_PAGES[hook]}.md").text
    own = [name for name in checks_of(RECORDS[hook]) if not name.startswith("engine: ")]  # on the engine's page
    assert [name for name in own if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", sorted(CONTRACT_PAGES.values()))
def test_every_page_has_rules_and_an_example(page: str) -> None:
    written = Page(FOLDER / f"{page}.md")
    assert written.section("Rules").count("\n1. ") == 1
    [module] = [block.file for block in written.blocks if str(block.file).startswith("rllm_x/")]
    assert module
    assert [block for block in written.blocks if block.language == "python" and not block.file]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package formed by the pages of hooks and contracts, with its entry point and its tests."""
    folder = tmp_path_factory.mktemp("site")
    hooks = [Page(ROOT / "docs" / "hooks" / f"{hook}.md") for hook in CONTRACT_PAGES]
    for page in [*hooks, *(Page(path) for path in FOLDER.glob("*.md"))]:
        write_files(page, folder)
    blocks = [b.text for page in hooks for b in page.blocks if b.file == "rllm_x/__init__.py"]
    (folder / "rllm_x" / "__init__.py").write_text("\n\n".join(blocks), encoding="utf-8")
    metadata = folder / "rllm_x-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rllm-x\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[rllm_core]\nx = rllm_x\n", encoding="utf-8")
    return folder


def python(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder / "tests", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_package_of_all_examples_is_a_plugin(installed: Path) -> None:
    [plugin] = json.loads(python(installed, "-m", "rllm_core", "plugins", "show", "x", "--json"))
    assert plugin["status"] == "loaded"
    assert plugin["warnings"] == []
    assert len(plugin["provides"]) == len(CONTRACT_PAGES)


@pytest.mark.slow
def test_its_tests_pass(installed: Path) -> None:
    printed = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(installed), ".")
    counts = re.findall(r"(\d+) (?:passed|skipped)", printed)
    assert sum(map(int, counts)) == sum(
        len(checks_of(RECORDS[hook])) for hook, page in CONTRACT_PAGES.items() if page in CHECKS
    )
