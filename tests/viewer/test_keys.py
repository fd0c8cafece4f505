"""Tests the keys: each does what the help says, and none works while something is typed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import group_id, show, wait_for_view
from playwright.sync_api import Page, expect

from rllm_viewer.view.server import ViewServer

NAME_OF_FOCUSED = """(() => {
    const element = document.activeElement;
    return element.id || element.getAttribute("aria-label") || element.innerText;
})()"""


def rollout_of(server: ViewServer, number: int, position: int = 0) -> str:
    return f"#/run/0/group/{group_id(server, number)}/rollout/{position}"


Addresses = Callable[[ViewServer], str]
MOVES: dict[str, tuple[Addresses, str, Addresses]] = {
    "j in a group": (lambda s: f"#/run/0/group/{group_id(s, 1)}", "j", lambda s: f"#/run/0/group/{group_id(s, 2)}"),
    "k in a group": (lambda s: f"#/run/0/group/{group_id(s, 2)}", "k", lambda s: f"#/run/0/group/{group_id(s, 1)}"),
    "j in a rollout": (lambda s: rollout_of(s, 1), "j", lambda s: f"#/run/0/group/{group_id(s, 2)}"),
    "j in times": (lambda s: "#/run/0/timing/3", "j", lambda s: "#/run/0/timing/4"),
    "n": (lambda s: rollout_of(s, 1), "n", lambda s: rollout_of(s, 1, 1)),
    "p": (lambda s: rollout_of(s, 1, 2), "p", lambda s: rollout_of(s, 1, 1)),
    "n in tokens": (lambda s: f"{rollout_of(s, 1)}/tokens", "n", lambda s: f"{rollout_of(s, 1, 1)}/tokens"),
    "r": (lambda s: rollout_of(s, 1), "r", lambda s: "#/run/0"),
    "s": (lambda s: rollout_of(s, 1), "s", lambda s: "#/run/0/step/1"),
    "g": (lambda s: rollout_of(s, 1), "g", lambda s: f"#/run/0/group/{group_id(s, 1)}"),
    "e": (lambda s: f"#/run/0/group/{group_id(s, 1)}", "e", lambda s: rollout_of(s, 1)),
    "t": (lambda s: rollout_of(s, 1, 2), "t", lambda s: f"{rollout_of(s, 1, 2)}/tokens"),
    "i": (lambda s: rollout_of(s, 1), "i", lambda s: "#/run/0/timing/1"),
    "x": (lambda s: "#/run/0", "x", lambda s: "#/compare?runs=0%2C1"),
    "u from tokens": (lambda s: f"{rollout_of(s, 1)}/tokens", "u", lambda s: rollout_of(s, 1)),
    "u from a rollout": (lambda s: rollout_of(s, 1), "u", lambda s: f"#/run/0/group/{group_id(s, 1)}"),
    "u from a group": (lambda s: f"#/run/0/group/{group_id(s, 1)}", "u", lambda s: "#/run/0/step/1"),
    "u from a step": (lambda s: "#/run/0/step/1", "u", lambda s: "#/run/0"),
    "u from a run": (lambda s: "#/run/0", "u", lambda s: "#/"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_key_opens_another_view(move: str, server: ViewServer, page: Page) -> None:
    start, key, end = MOVES[move]
    show(page, server, start(server))
    page.keyboard.press(key)
    wait_for_view(page, end(server))
    assert page.evaluate("location.hash") == end(server)


def test_rows_are_chosen_and_opened(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator(".row.current").get_attribute("aria-rowindex") == "3"
    assert page.evaluate("document.activeElement.closest('.row').getAttribute('aria-rowindex')") == "3"
    page.keyboard.press("k")
    assert page.locator(".row.current").get_attribute("aria-rowindex") == "2"
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    wait_for_view(page, f"#/run/0/group/{group_id(server, 1)}")


def test_search_filters_copy_and_help(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type("j")
    assert page.input_value("#query") == "j", "keys are typed into a field"
    page.keyboard.press("Backspace")
    page.wait_for_timeout(1000)  # the page waits for the end of typing
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "query"
    page.keyboard.press("f")
    expect(page.locator("#filter-outcome")).to_be_visible()
    page.keyboard.press("c")
    assert page.locator("#copies").is_visible()
    page.keyboard.press("c")
    assert not page.locator("#copies").is_visible()
    page.keyboard.press("?")
    rows = page.locator("dialog table.keys tr")
    assert rows.count() > 20
    page.keyboard.press("j")
    assert page.locator(".row.current").count() == 0, "keys of the page are off while the help is open"


def test_the_keys_can_be_switched_off(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0/step/1")
    page.keyboard.press("?")
    page.get_by_label("these keys are on").uncheck()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("r")
    page.wait_for_timeout(200)
    assert page.evaluate("location.hash") == "#/run/0/step/1"


def test_everything_can_be_reached_with_the_tab_key(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.locator("body").evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(NAME_OF_FOCUSED))
    assert reached[0] == "Skip to the content"
    for name in ("Search texts (/)", "Help: where to look, words and keys (?)", "query", "by", "mean"):
        assert name in reached, name
    assert any("reward over steps" in name for name in reached)
    assert "group 1" in reached


def test_a_curve_leads_to_a_step_with_the_keyboard_and_the_pointer(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    curve = page.get_by_role("slider", name="reward over steps")
    curve.focus()
    page.keyboard.press("Home")
    assert curve.get_attribute("aria-valuetext") == "step 0: validation 0.200"
    page.keyboard.press("ArrowRight")
    assert str(curve.get_attribute("aria-valuetext")).startswith("step 1: reward_mean")
    page.keyboard.press("Enter")
    wait_for_view(page, "#/run/0/step/1")
    show(page, server, "#/run/0")
    curve.click(position={"x": 150, "y": 30})
    wait_for_view(page, "#/run/0/step/")
