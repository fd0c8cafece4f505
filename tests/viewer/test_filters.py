"""Tests filters, search and sorting: in the controls, in the address, and against the filters of the command."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import group_id, show, wait_for_view
from playwright.sync_api import Page, expect

from rllm_viewer.view.filters import fitting, range_of
from rllm_viewer.view.server import ViewServer

WRITTEN = (
    "steps=3", "steps=2..4", "steps=10..", "outcome=failed", "outcome=validation", "outcome=filtered",
    "reason=uniform_reward", "reason=timeout", "solved=yes", "solved=no", "solved=unknown", "reward=1", "reward=..0.4",
    "reward=0.5..0.9", "tokens=6..", "tokens=..5", "version=3", "version=..2", "role=judge", "tool=add", "tool=any",
    "break=any", "break=none", "break=prefix_mismatch", "cut=yes", "cut=no", "kept=best", "task=WORD-1",
    "solved=yes&steps=5..&kept=divided", "reward=nonsense", "steps=",
)  # fmt: skip


def test_the_page_filters_as_the_command_does(server: ViewServer, page: Page) -> None:
    show(page, server, "#/compare")
    rows = server.answers.runs[0].index.rows()
    for written in WRITTEN:
        wanted = dict(pair.split("=") for pair in written.split("&"))
        found: Any = page.evaluate(
            "async (filter) => { const { select, filterOf } = await import('/filters.js');"
            "const answer = await (await fetch('/api/run/0/groups?epoch=0&since=0')).json();"
            "return select(answer.rows, filterOf(filter)).map(({ row, positions }) => [row.id, positions]); }",
            wanted,
        )
        # The page leaves a range out that it cannot read, and marks its field; the command rejects it.
        kept = {name: value for name, value in wanted.items() if value and (value != "nonsense" or range_of(value))}
        assert sorted(found) == [[row.id, at] for row in rows if (at := fitting(row, kept))], written


def listed(page: Page) -> list[str]:
    return [text.split("\n")[0] for text in page.locator(".rows .row").all_inner_texts()]


def test_controls_change_the_address_and_the_list(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.get_by_text("Filters", exact=True).click()
    page.select_option("#filter-outcome", "failed")
    assert page.evaluate("location.hash") == "#/run/0?outcome=failed"
    assert listed(page) == ["group 101"]
    page.get_by_role("button", name="remove the filter outcome failed").click()
    assert page.evaluate("location.hash") == "#/run/0"
    page.get_by_text("Filters", exact=True).click()
    page.fill("#filter-steps", "1..2")
    page.keyboard.press("Enter")
    assert listed(page) == ["group 1", "group 2"]
    page.fill("#filter-reward", "high")
    page.keyboard.press("Enter")
    assert page.get_attribute("#filter-reward", "aria-invalid") == "true"
    page.get_by_role("button", name="remove all").click()
    assert len(listed(page)) > 10


def test_a_link_shows_the_same_list_and_groups_follow_each_other_in_it(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0?kept=divided&sort=-step")
    assert listed(page)[:2] == ["group 11", "group 7"]
    page.locator(".rows a").first.click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 11)}")
    assert "kept=divided" in page.evaluate("location.hash")
    page.keyboard.press("j")
    wait_for_view(page, f"#/run/0/group/{group_id(server, 7)}")
    page.go_back()
    page.go_back()
    wait_for_view(page, "#/run/0?kept=divided")
    assert listed(page)[:2] == ["group 11", "group 7"]


@pytest.mark.parametrize("name", ["group", "step", "task", "outcome", "solved", "mean", "spread", "tokens"])
def test_the_list_is_sorted_by_a_column(name: str, server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.click(f"[data-sort='{name}']")
    high = listed(page)
    assert page.locator("[aria-sort=descending]").count() == 1
    page.click(f"[data-sort='{name}']")
    assert page.locator("[aria-sort=ascending]").count() == 1
    assert listed(page) != high or name == "solved"  # which is the same in all groups
    assert page.evaluate("location.hash") == f"#/run/0?sort={name}"


def test_rollouts_can_be_listed(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0?by=rollouts&solved=yes&steps=1")
    assert listed(page) == ["group 1, rollout 3"]
    page.locator(".rows a").click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 1)}/rollout/3")


def test_texts_are_searched(server: ViewServer, page: Page) -> None:
    show(page, server, "#/run/0")
    page.fill("#query", "Result 2")
    expect(page.get_by_text("found in 1 rollouts")).to_be_visible()
    assert listed(page) == ["group 100"]
    assert page.evaluate("document.activeElement.id") == "query", "one can go on typing"
    page.get_by_label("match case").check()
    expect(page.get_by_text("found in 0 rollouts")).to_be_visible()
    expect(page.get_by_text("No recorded group fits the filter.")).to_be_visible()
    page.get_by_role("button", name="remove the filter", exact=True).click()
    expect(page.locator(".rows .row").first).to_be_visible()
    show(page, server, "#/run/0?q=result+[23]$&regex=1")
    expect(page.get_by_text("found in 1 rollouts")).to_be_visible()


def test_a_wrong_expression_is_named(server: ViewServer, new_page: Any) -> None:
    page = new_page(expected="400")
    show(page, server, "#/run/0?q=(&regex=1")
    expect(page.get_by_text("'(' is not a regular expression")).to_be_visible()
