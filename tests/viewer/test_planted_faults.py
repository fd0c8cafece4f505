"""Tests that the page shows what names a planted fault, on the way that its help describes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import demo_runs
import pytest
from conftest import served, show
from playwright.sync_api import Page

from benchmarks import planted_faults

FAULTS: dict[str, tuple[Callable[[Path], Path], dict[str, list[str]]]] = {
    # The answer that equals the expected one has the lowest reward, and the wrong one the highest.
    "swapped rewards": (
        demo_runs.swapped_rewards,
        {
            "#/run/0/group/0": ["expected", "best", "worst", "reward 0", "reward 1", "without the task's answer"],
            "#/run/0/group/0/rollout/0": ["Rewards that contradict the answers"],
        },
    ),
    "broken prefix": (
        demo_runs.broken_prefix,
        {
            "#/run/0/group/0/rollout/0": [
                "Segment break: prefix_mismatch",
                "segment break: prefix_mismatch: the prompt does not begin with the tokens so far",
                "compare the two prompts",
                "its two prompts",
            ],
            "#/run/0/group/0/rollout/0/break/1?trajectory=0": [
                "reason prefix_mismatch: the prompt does not begin with the tokens so far",
                "They first differ at token",
                " became ",
                "The new prompt lacks 25 tokens, which are struck out below",
            ],
        },
    ),
    "stale group": (
        demo_runs.stale_group,
        {
            "#/run/0/group/{last}": [
                "version 1",
                "staleness 7 (training.staleness_threshold = 0)",
                "Started under version 1, complete under version 6, trained under version 8",
                "its rollouts ran during 5 weight syncs, then it waited for training during 2",
            ],
            "#/run/0/step/9": ["staleness_max"],
        },
    ),
    "cut answers": (
        demo_runs.cut_answers,
        {
            "#/run/0?cut=yes": ["1 group"],
            "#/run/0/group/0": [
                "rollouts 0, 1, 2, 3; reward 0",
                "All rewards are 0",
                "truncated (rollout.max_response_tokens = 1024)",
            ],
            "#/run/0/group/0/rollout/0": ["tokens (rollout.max_response_tokens = 1024)"],
        },
    ),
    "hacked reward": (
        demo_runs.hacked_reward,
        {
            "#/run/0/group/0": [
                "please",
                "8",
                "Paris",
                "not solved",
                "best",
                "reward 8 of rollout 1, without the answer",
            ]
        },
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_page_shows_what_names_it(name: str, tmp_path: Path, page: Page) -> None:
    plant, views = FAULTS[name]
    with served(plant(tmp_path / "run")) as server:
        last = server.answers.runs[0].index.rows()[-1].id
        for address, texts in views.items():
            show(page, server, address.format(last=last))
            said = page.inner_text("main").replace("\n", "")
            for text in texts:
                assert text in said, f"{address}: {text}"


TITLES = {
    "swapped rewards": "rewards that contradict the answers",
    "hacked reward": "rewards that contradict the answers",
    "prefix break": "1 rollout with a segment break",
    "stale group": "stale groups",
    "cut answers": "8 rollouts truncated",
}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_run_with_all_of_them_says_what_is_worth_a_look(seed: int, tmp_path: Path, page: Page) -> None:
    key = planted_faults.write_run(tmp_path / "run", seed)
    with served(tmp_path / "run") as server:
        show(page, server, "#/run/0")
        said = {
            entry.locator("xpath=preceding-sibling::dt[1]").inner_text().lower(): entry.inner_text()
            for entry in page.locator(".suspects > dd").all()
        }
        page.set_viewport_size({"width": 1200, "height": 3000})  # the list draws the rows in sight
        page.get_by_role("link", name="all 8").click()
        page.wait_for_selector("text=8 rollouts of 360 groups")
        cut = page.inner_text(".rows")
    for fault in key:
        where = cut if fault["fault"] == "cut answers" else said[TITLES[fault["fault"]]]
        assert f"group {fault['group']}" in where, fault
    groups = {f"group {fault['group']}" for fault in key}
    named = {link for text in said.values() for link in re.findall(r"group \d+", text)}
    assert named <= groups, "nothing else is named in a healthy run"


def test_what_a_template_dropped_is_struck_out(tmp_path: Path, page: Page) -> None:
    with served(demo_runs.broken_prefix(tmp_path / "run")) as server:
        show(page, server, "#/run/0/group/0/rollout/0/break/1?trajectory=0")
        before, after = page.locator(".card").all()
        assert "".join(before.locator("del").all_inner_texts()) == "<think>six sevens</think>"
        assert before.inner_text().replace("\n", "").endswith("</think>42")
        assert after.locator("del, .s3").count() == 0


def test_a_healthy_run_has_nothing_worth_a_look(tmp_path: Path, page: Page) -> None:
    groups = [demo_runs.sorting(at, at, "best") for at in range(1, 9)]
    run = demo_runs.write_run(tmp_path / "run", groups, metrics=[demo_runs.metrics(at, 8) for at in range(1, 9)])
    with served(run) as server:
        show(page, server, "#/run/0")
        assert "worth a look" not in page.inner_text("main").lower()


def test_the_best_answer_of_swapped_rewards_is_not_the_expected_one(tmp_path: Path, page: Page) -> None:
    with served(demo_runs.swapped_rewards(tmp_path / "run")) as server:
        show(page, server, "#/run/0/group/0")
        best, worst = (page.locator(".card", has_text=rank).inner_text().split("\n") for rank in ("best", "worst"))
        expected = best[best.index("expected") + 1]
        assert expected in worst[worst.index("assistant") + 1 :]
        assert expected not in best[best.index("assistant") + 1 :]
