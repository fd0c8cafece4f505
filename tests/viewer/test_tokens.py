"""Tests the view of tokens: every id with its text and its numbers, and the first difference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import group_id, served, show
from playwright.sync_api import Page
from recorded_runs import add_tokens, failed, group, rollout, step, write_run

from rllm_core.run_folder.recorded import group_at, index_of
from rllm_viewer.view.server import ViewServer

COUNTS = """
window.drawn = 0;
new MutationObserver((changes) => {
    for (const { addedNodes } of changes)
        for (const node of addedNodes) window.drawn += node.classList?.contains("tok") ? 1 : 0;
}).observe(document, { childList: true, subtree: true });
"""
CELLS = "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"


def test_the_table_has_every_token_as_it_was_trained(server: ViewServer, folder: Path, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 1)}/rollout/1/tokens?form=table")
    rows = page.eval_on_selector_all(".rows .row", CELLS)
    recorded = group_at(folder, next(entry for entry in index_of(folder) if entry.group == 1)).rollouts[1]
    [call] = recorded.episode.trajectories[0].steps
    ids = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
    assert [int(row[1]) for row in rows] == ids[: len(rows)]
    heads = page.locator(".row.head span").all_inner_texts()
    sampled = rows[len(call.prompt_ids)]
    shown = dict(zip(heads, sampled, strict=True))
    assert shown["mask"] == "trained"
    assert float(shown["log-probability"].replace("\u2212", "-")) == pytest.approx(float(call.logprobs[0]), abs=1e-3)
    assert float(shown["advantage"].replace("\u2212", "-")) == pytest.approx(
        float(recorded.advantages[0][0][0]), abs=1e-3
    )
    assert float(shown["correction"]) == pytest.approx(0.5, abs=1e-3)
    trainer = float(recorded.trainer_logprobs[0][0][0])
    said = float(shown["trainer's log-probability"].replace("\u2212", "-"))
    assert said == pytest.approx(trainer, abs=1e-3)
    assert float(shown["ratio"]) == pytest.approx(np.exp(trainer - call.logprobs[0]), abs=1e-3)
    assert "entropy" not in heads, "not recorded in this group"
    prompt = dict(zip(heads, rows[0], strict=True))
    assert (prompt["text"], prompt["mask"], prompt["log-probability"]) == ("<|im_start|>", "prompt", "\u2013")


def test_control_tokens_differ_from_text_that_spells_them(tmp_path: Path, page: Page) -> None:
    asked = [{"role": "user", "content": "x"}]
    one = rollout(0, [step(asked, "ab", prompt_ids=[5, 6, 7, 8])], 1.0)
    run = write_run(tmp_path / "run", [group([one])])
    add_tokens(run, {5: "<|im_end|>", 6: "<|im_", 7: "end|>", 8: "\u200b"})
    with served(run) as server:
        show(page, server, "#/run/0/group/0/rollout/0/tokens")
        assert page.locator(".tok.control").all_inner_texts() == ["<|im_end|>"]
        assert page.locator(".tok").nth(3).inner_text() == "\\u200b"
        assert page.locator(".tok").nth(4).inner_text() == "⟨97⟩", "an id without a text is shown as its number"


def test_the_first_difference_of_best_and_worst_is_marked(server: ViewServer, page: Page) -> None:
    number = group_id(server, 1)
    for position in (0, 3):
        show(page, server, f"#/run/0/group/{number}/rollout/{position}/tokens")
        assert page.locator(".tok.differs").count() == 1
        page.keyboard.press("d")
        assert "differs" in str(page.locator(".tok.current").get_attribute("class"))
        assert "token 0 of call 1" in page.inner_text(".detail") or "token" in page.inner_text(".detail")


@pytest.mark.parametrize(
    ("key", "measure", "colored"),
    [
        ("1", "advantage", 5), ("2", "logprob", 5), ("3", "trainer", 5), ("4", "ratio", 5), ("5", "correction", 5),
        ("6", "mask", 5), ("7", "entropy", 5), ("8", "version", 5),
    ],
)  # fmt: skip
def test_a_measure_colors_the_tokens(key: str, measure: str, colored: int, server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 2)}/rollout/1/tokens")
    page.keyboard.press(key)
    assert page.input_value("#measure") == measure
    assert f"measure={measure}" in page.evaluate("location.hash")
    classes = page.eval_on_selector_all(".tok", "tokens => tokens.map((token) => token.className)")
    sampled = [name for name in classes[-colored:] if " none" not in name]
    assert len(sampled) == colored
    assert all(" none" in name for name in classes[:-colored])


def test_what_was_not_recorded_cannot_be_chosen(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 1)}/rollout/1/tokens")
    disabled = page.eval_on_selector_all("#measure option:disabled", "options => options.map((one) => one.textContent)")
    assert disabled == ["7 entropy (not recorded)", "9 token reward (not recorded)"]
    page.keyboard.press("7")
    assert page.input_value("#measure") == "advantage"


def test_a_token_is_described_with_the_arrow_keys_and_the_pointer(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 1)}/rollout/1/tokens")
    page.locator(".flow").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "id 115, position 2, not sampled" in page.inner_text(".detail")
    page.locator(".flow .tok").last.click()
    said = page.inner_text(".detail")
    assert "<|im_end|> id 256" in said
    assert "control token" in said
    assert "probability 0.082" in said


def test_ids_can_be_shown_in_the_text(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 1)}/rollout/1/tokens")
    page.get_by_label("ids").check()
    shown = "getComputedStyle(document.querySelector('.tok'), '::after').content"
    assert "257" in page.evaluate(shown)


def test_a_sequence_of_32000_tokens_is_drawn_as_it_comes_into_sight(tmp_path: Path, page: Page) -> None:
    ids = np.arange(32_000) % 90 + 32
    asked = [{"role": "user", "content": "x"}]
    call = step(asked, "", prompt_ids=[1], completion_ids=ids, logprobs=-np.ones(len(ids)), response={"content": "x"})
    run = write_run(tmp_path / "run", [group([rollout(0, [call], 1.0, 0.5)])])
    add_tokens(run, {number: chr(number) for number in range(32, 127)})
    page.add_init_script(COUNTS)
    with served(run) as server:
        show(page, server, "#/run/0/group/0/rollout/0/tokens")
        assert page.evaluate("window.drawn") <= 8_000, "only what is near is ever drawn"
        assert 400 <= page.locator(".tok").count() <= 16_000
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_selector(".chunk:last-child .tok")
        assert page.locator(".chunk:last-child .tok").last.get_attribute("data-id") == str(ids[-1])
        page.wait_for_timeout(300)
        assert page.locator(".tok").count() <= 16_000
        page.keyboard.press("v")
        page.wait_for_selector(".rows .row")
        assert page.locator(".list").get_attribute("aria-rowcount") == "32002"
        assert page.locator(".rows .row").count() < 200


def test_the_prompts_around_a_break_are_compared(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 100)}/rollout/0")
    page.get_by_role("link", name="compare the two prompts").click()
    page.wait_for_selector("h1:has-text('Break before call 2')")
    assert "prefix_mismatch" in page.inner_text("main")
    assert page.locator(".tok.differs").count() >= 1


def test_a_rollout_without_token_ids_says_so(tmp_path: Path, page: Page) -> None:
    asked = [{"role": "user", "content": "x"}]
    call = step(asked, "y", prompt_ids=[], completion_ids=[], logprobs=None, weight_version=None)
    one = group([rollout(0, [call], 1.0)], group=None, outcome="imported", reason="imported", kept="imported")
    with served(write_run(tmp_path / "run", [one])) as server:
        show(page, server, "#/run/0/group/0")
        assert page.inner_text("h1").startswith("Imported task")
        show(page, server, "#/run/0/group/0/rollout/0/tokens")
        assert "imported" in page.inner_text(".flow")


def test_a_failed_rollout_is_not_called_imported(tmp_path: Path, page: Page) -> None:
    with served(write_run(tmp_path / "run", [failed()])) as server:
        show(page, server, "#/run/0/group/0/rollout/0/tokens")
        assert "no token ids" in page.inner_text(".flow")
        assert "imported" not in page.inner_text(".flow")


def test_bytes_of_a_character_are_shown(tmp_path: Path, page: Page) -> None:
    call = step([], "", prompt_ids=[1], completion_ids=[2, 3], logprobs=None)
    run = write_run(tmp_path / "run", [group([rollout(0, [call], 1.0)])])
    lines = [{"id": 2, "text": "\ufffd", "bytes": "e296"}, {"id": 3, "text": "\ufffd", "bytes": "88"}]
    (run / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(run) as server:
        show(page, server, "#/run/0/group/0/rollout/0/tokens")
        assert page.locator(".tok").all_inner_texts()[1:] == ["\\xe2\\x96", "\\x88"]
