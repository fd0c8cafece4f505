"""A page for every contract, with every check that `rllm_core.testing` holds it to."""

from __future__ import annotations

import pytest
from hook_pages import CONTRACT_PAGES
from pages import ROOT, Page

from rllm_core import testing
from rllm_core.testing import algorithms, backends, engines, losses, parsers, sandboxes, trackers, workflows

FOLDER = ROOT / "docs" / "contracts"
# Which checks stand on which page. A reward function has none.
CHECKS = {
    "backend": (testing.check_backend, {**backends.BEFORE_TRAINING, **backends.TRAINING}),
    "correction": (testing.check_correction, {"options": None, **algorithms.CORRECTION_CHECKS}),
    "engine": (testing.check_engine, engines.ENGINE_CHECKS),
    "estimator": (testing.check_estimator, {"options": None, **algorithms.ESTIMATOR_CHECKS}),
    "loss": (testing.check_policy_loss, {"options": None, **losses.LOSS_CHECKS}),
    "parser": (testing.check_parser, parsers.CHECKS),
    "sandbox": (testing.check_sandbox, sandboxes.SANDBOX_CHECKS),
    "tracker": (testing.check_tracker, trackers.TRACKER_CHECKS),
    "workflow": (testing.check_workflow, workflows.WORKFLOW_CHECKS),
}


def test_every_contract_has_its_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(CONTRACT_PAGES.values())


def test_every_check_function_is_on_a_page() -> None:
    named = {check.__name__ for check, _ in CHECKS.values()}
    assert named == {name for name in testing.__all__ if name.startswith("check_")}
    for page, (check, _) in CHECKS.items():
        assert f"`{check.__name__}(" in Page(FOLDER / f"{page}.md").text.replace("await ", "")


@pytest.mark.parametrize("page", CHECKS)
def test_every_check_is_on_its_page(page: str) -> None:
    _, checks = CHECKS[page]
    assert list(Page(FOLDER / f"{page}.md").rows("Checks")) == list(checks)


@pytest.mark.parametrize("page", sorted(CONTRACT_PAGES.values()))
def test_every_page_has_rules_and_an_example(page: str) -> None:
    written = Page(FOLDER / f"{page}.md")
    assert written.section("Rules").count("\n1. ") == 1
    [module] = [block.file for block in written.blocks if block.file]
    assert str(module).startswith("rllm_x/")
    assert [block for block in written.blocks if block.language == "python" and not block.file]
