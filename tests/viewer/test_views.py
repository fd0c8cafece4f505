"""Tests every view in both themes, on a desktop and on a phone: shown, accessible, without errors, not too wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SIZES, group_id, show
from playwright.sync_api import Page

from rllm_viewer.view.server import ViewServer

AXE = Axe().axe_script
VIEWS: dict[str, Callable[[ViewServer], tuple[str, str]]] = {
    "runs": lambda server: ("#/", "2 runs"),
    "run": lambda server: ("#/run/0", "demo"),
    "filtered": lambda server: ("#/run/0?outcome=failed&by=rollouts", "demo"),
    "empty list": lambda server: ("#/run/0?reward=99..", "demo"),
    "step": lambda server: ("#/run/0/step/3", "Step 3"),
    "group": lambda server: (f"#/run/0/group/{group_id(server, 1)}", "Group 1: word-1"),
    "failed group": lambda server: (f"#/run/0/group/{group_id(server, 101)}", "Group 101: t"),
    "rollout": lambda server: (f"#/run/0/group/{group_id(server, 100)}/rollout/0", "Rollout 0 of group 100"),
    "roles": lambda server: (f"#/run/0/group/{group_id(server, 102)}/rollout/0", "Rollout 0 of group 102"),
    "tokens": lambda server: (f"#/run/0/group/{group_id(server, 1)}/rollout/0/tokens", "Tokens of rollout 0, group 1"),
    "token table": lambda server: (
        f"#/run/0/group/{group_id(server, 1)}/rollout/0/tokens?form=table&measure=logprob",
        "Tokens of rollout 0, group 1",
    ),
    "times": lambda server: ("#/run/0/timing/1", "Times of step 1"),
    "compare runs": lambda server: ("#/compare?runs=0,1", "Compare runs"),
    "compare rollouts": lambda server: (
        f"#/compare?left=0.{group_id(server, 1)}.0&right=0.{group_id(server, 1)}.1",
        "Compare two rollouts",
    ),
    "break": lambda server: (
        f"#/run/0/group/{group_id(server, 100)}/rollout/0/break/1?trajectory=0",
        "Break before call 2 of rollout 0",
    ),
    "missing": lambda server: ("#/run/0/group/7", "This cannot be shown"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view(name: str, server: ViewServer, new_page: Callable[..., Page]) -> None:
    address, heading = VIEWS[name](server)
    page = new_page(bypasses=True, expected="404" if name == "missing" else "nothing")
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        show(page, server, address)
        assert page.locator("h1").all_inner_texts() == [heading]
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            check(page, [] if scheme == "light" else ["color-contrast"])
        shown = page.evaluate("document.documentElement.scrollWidth")
        assert shown <= width, f"scrolls sideways on a {size}"


def check(page: Page, only: Sequence[str] = ()) -> None:
    """Checks all rules of axe, or only some."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    options = {"resultTypes": ["violations"], **({"runOnly": only} if only else {})}
    violations = page.evaluate("(options) => axe.run(options).then((found) => found.violations)", options)
    assert [(one["id"], one["help"], [node["html"] for node in one["nodes"]]) for one in violations] == []


def test_the_dialog_of_the_help_is_accessible(server: ViewServer, new_page: Callable[..., Page]) -> None:
    for scheme in ("light", "dark"):
        page = new_page(scheme=scheme, bypasses=True)
        show(page, server, "#/run/0")
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]")
        check(page)
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")  # its removal follows the event that closes it


def test_what_is_worth_a_look_is_accessible(server: ViewServer, new_page: Callable[..., Page]) -> None:
    page = new_page(bypasses=True)
    page.set_viewport_size({"width": 400, "height": 800})
    show(page, server, "#/run/0")
    page.get_by_text("Worth a look").click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        check(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_squares_are_side_by_side_and_the_page_has_no_frame(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0?outcome=failed")
    margins = "[...document.querySelectorAll('.squares .square')].map((one) => getComputedStyle(one).margin)"
    assert set(page.evaluate(margins)) == {"0px"}
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Group')")
    page.keyboard.press("t")
    page.wait_for_selector("h1:has-text('Tokens')")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "none"


def test_the_theme_can_be_changed(server: ViewServer, page: Page) -> None:
    show(page, server)
    back = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(back)
    page.keyboard.press("l")
    assert page.evaluate(back) != before
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(back) == before
