"""``rllm-core show --tokens``: the tokens of rollouts as they were sampled and trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import add_tokens, group, rollout, shown, sorting, step, write_run
from rich.text import Text

from rllm_core.run_folder.groups import RecordedGroup
from rllm_viewer import token_view


def of(tmp_path: Path, *groups: RecordedGroup) -> Path:
    return write_run(tmp_path / "run", groups)


def test_tokens_of_the_best_and_the_worst_rollout_with_their_first_difference(tmp_path: Path) -> None:
    run = of(tmp_path, sorting())
    add_tokens(run, {**{ord(one): one for one in "abcd"}, ord(" "): " "})
    text = shown(run, "--tokens")
    right, wrong = text.split("rollout 1: reward")
    rows = [line.split() for line in wrong.splitlines()]
    assert ["0", "97", '"a"', "-0.100", "-0.500"] in rows
    assert '32 " "' in right, "white space is visible"
    assert f"{ord('t')} -" in right, "an unknown text is absent"
    for part, other in ((right, 1), (wrong, 0)):
        lines = part.splitlines()
        at = next(at for at, line in enumerate(lines) if f"first difference from rollout {other}" in line)
        assert lines[at - 1].split()[0] == "2"


def test_tokens_of_one_rollout(tmp_path: Path) -> None:
    text = shown(of(tmp_path, sorting()), "--tokens", "--rollout", 1)
    assert "rollout 0: reward" not in text
    assert "first difference from rollout 0" in text


def test_unknown_logprobs_and_advantages_are_absent_and_corrections_shown(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "x"}]
    one = rollout(0, [step(asked, "ab", logprobs=None)], 1.0)
    two = replace(rollout(1, [step(asked, "ab")], 0.0, 0.5), corrections=[[np.array([0.5, 2], np.float32)]])
    text = shown(of(tmp_path, group([one, two])), "--tokens")
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "97", "-", "-", "-"] in rows
    assert ["1", "98", "-", "-2", "0.500", "2"] in rows
    assert "correction weight 0.500 to 2" in text
    assert "first difference" not in text, "both sampled the same"


def test_a_prompt_that_continues_is_shown_once(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "x"}]
    steps = [
        step(asked, "ab", prompt_ids=[1, 2], completion_ids=[3], logprobs=None),
        step(asked, "c", prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=None),
    ]
    text = shown(of(tmp_path, group([rollout(0, steps, 1.0)])), "--tokens")
    assert "prompt of call 1: 2 tokens" in text
    assert "new in the prompt of call 2: 1 token" in text


def test_the_difference_may_be_a_prompt_or_an_end(tmp_path: Path) -> None:
    def ids(prompt: list[int], sampled: list[int]) -> Any:
        return step([], "", prompt_ids=prompt, completion_ids=sampled, logprobs=None)

    prompts = group([rollout(0, [ids([1], [5])], 1.0), rollout(1, [ids([2], [5])], 0.0)], group=1)
    ends = group([rollout(0, [ids([1], [5])], 1.0), rollout(1, [ids([1], [5, 6])], 0.0)], group=2)
    run = of(tmp_path, prompts, ends)
    assert "prompt of call 1: 1 token  <- first difference from rollout 1" in shown(run, "--group", 1, "--tokens")
    assert "the end: first difference from rollout 1" in shown(run, "--group", 2, "--tokens")


@pytest.mark.parametrize(("index", "color", "other"), [(0, "green", "red"), (1, "red", "green")])
def test_colors_follow_the_sign_of_the_advantage(index: int, color: str, other: str) -> None:
    shown_tokens = list(token_view.tokens(sorting().rollouts[index], {}, None, None))
    styles = [str(block.style) for block in shown_tokens if isinstance(block, Text)]
    assert styles.count(color) == 4
    assert other not in styles
