"""Tests that the page shows what names a planted fault, on the way that its help describes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import demo_runs
import pytest
from conftest import served, show
from playwright.sync_api import Page

FAULTS: dict[str, tuple[Callable[[Path], Path], dict[str, list[str]]]] = {
    # The answer that equals the expected one has the lowest reward, and the wrong one the highest.
    "swapped rewards": (
        demo_runs.swapped_rewards,
        {"#/run/0/group/0": ["expected", "best", "worst", "reward 0", "reward 1"]},
    ),
    "broken prefix": (
        demo_runs.broken_prefix,
        {
            "#/run/0/group/0/rollout/0": ["segment break: prefix_mismatch", "compare the two prompts"],
            "#/run/0/group/0/rollout/0/break/1?trajectory=0": ["They first differ at token", " became "],
        },
    ),
    "stale group": (
        demo_runs.stale_group,
        {"#/run/0/group/{last}": ["version 1", "staleness 7"], "#/run/0/step/9": ["staleness_max"]},
    ),
    "cut answers": (
        demo_runs.cut_answers,
        {"#/run/0?cut=yes": ["1 group"], "#/run/0/group/0": ["cut off", "All rewards are 0"]},
    ),
    "hacked reward": (demo_runs.hacked_reward, {"#/run/0/group/0": ["please", "8", "Paris", "not solved", "best"]}),
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


def test_the_best_answer_of_swapped_rewards_is_not_the_expected_one(tmp_path: Path, page: Page) -> None:
    with served(demo_runs.swapped_rewards(tmp_path / "run")) as server:
        show(page, server, "#/run/0/group/0")
        best, worst = (page.locator(".card", has_text=rank).inner_text().split("\n") for rank in ("best", "worst"))
        expected = best[best.index("expected") + 1]
        assert expected in worst[worst.index("assistant") + 1 :]
        assert expected not in best[best.index("assistant") + 1 :]
