"""Tests that text of models, tasks and tools stays text: in every view, in attributes, in the address and in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from conftest import served, show
from playwright.sync_api import Page
from recorded_runs import add_tokens, group, rollout, step, write_run

from rllm_core.types import Task
from rllm_viewer.view import one_file
from rllm_viewer.view.server import ViewServer

VIEWS = (
    "#/run/{run}", "#/run/{run}?by=rollouts", "#/run/{run}/step/4", "#/run/{run}/group/{id}",
    "#/run/{run}/group/{id}/rollout/0", "#/run/{run}/group/{id}/rollout/0/tokens",
    "#/run/{run}/group/{id}/rollout/0/tokens?form=table", "#/run/{run}/timing/4",
    "#/compare?left={run}.{id}.0&right={run}.{id}.1", "#/run/{run}/group/{id}/rollout/0/break/1",
)  # fmt: skip
FOREIGN = "main :is(script, iframe, object, embed, base, link, meta, style, form:not(.filters), video, math, template)"


def hostile_run(path: Path, texts: list[str]) -> Path:
    """Writes a run that has the texts wherever a text can be; each in a group of its own."""
    groups = []
    for text in texts:
        name = text[:300] or "x"
        asked = [
            {"role": name, "content": text, "name": text},
            {"role": "user", "content": [{"type": "image", "image": text}]},
        ]
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": text}}
        answer = {"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": text}
        first = step(asked, "ab", prompt_ids=[1], response=answer)
        later = [*asked, answer, {"role": "tool", "tool_call_id": "1", "content": text}]
        second = step(later, "ab", prompt_ids=[2, 3], response={"content": text}, segment=1, break_reason=name)
        metadata = {"reward_parts": {name: text}, name: text}
        one = rollout(0, [first, second], 1.0, 0.5, metadata=metadata, error=text, metrics={name: 1.0})
        other = rollout(1, [step(asked, "ba", prompt_ids=[1], response={})], 0.0, -0.5)
        task = Task(task_id=name, data={name: text})
        groups.append(group([one, other], task=task, kept=name, reason=name, outcome="filtered"))
    return write_run(path, groups, metrics=[{"step": 4, "reward_mean": 0.5}])


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    folder = tmp_path_factory.mktemp("hostile")
    small = [text for text in hostile.ALL if len(text) < 2_000]
    run = hostile_run(folder / "<img src=x onerror=window.pwned=1>\u202e", small)
    large = hostile_run(folder / "large", [text for text in hostile.ALL if len(text) >= 2_000])
    for path in (run, large):
        add_tokens(
            path, {97: "<img src=x onerror=window.pwned=1>", 98: "\u202e\x1b[31m", 1: "</script>", 2: "", 3: "\n"}
        )
        lines = [{"rollout": "r0", "seconds": 1.0, "calls": [{"kind": "<b>", "name": "<i>", "start": 0, "seconds": 1}]}]
        (path / "group_timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").write_text(json.dumps({"status": "<b>failed", "error": hostile.MARKUP[0]}))
    with served(run, large) as server:
        yield server


def check(page: Page, *, hides: bool = True) -> None:
    assert page.evaluate("window.pwned") is None
    assert page.locator(FOREIGN).count() == 0
    assert page.locator("main [onerror], main [onload], main [onclick], main [style*=url], #hostile").count() == 0
    links = page.eval_on_selector_all("main a", "links => links.map((link) => link.getAttribute('href'))")
    assert all(link.startswith("#/") for link in links), links
    sources = page.eval_on_selector_all("main img", "images => images.map((image) => image.getAttribute('src'))")
    assert all(source.startswith("data:image/") for source in sources)
    if hides:
        found = page.evaluate(
            "[...document.body.innerText + document.title].filter((one) => "
            "/[\\u0000-\\u0008\\u001b\\u0080-\\u009f\\u200b"
            "\\u202a-\\u202e\\u2066-\\u2069\\ufeff\\u2028\\u2029]/u.test(one)).map((one) => one.codePointAt(0))"
        )
        assert found == []


def test_there_are_enough_texts() -> None:
    assert len(set(hostile.ALL)) >= 60


@pytest.mark.parametrize("run", [0, 1], ids=["small", "large"])
def test_texts_stay_texts_in_every_view(run: int, hostile_server: ViewServer, page: Page) -> None:
    rows = hostile_server.answers.runs[run].index.rows()
    show(page, hostile_server, "#/run/0")
    for number, row in enumerate(rows):
        # Each text is in all views of its group; the views take turns, except for the conversation.
        for at, view in enumerate(VIEWS):
            if at not in (4, number % len(VIEWS)):
                continue
            address = view.format(run=run, id=row.id)
            address += f"{'&' if '?' in address else '?'}number={number}"
            page.evaluate("(address) => { delete document.body.dataset.opened; location.hash = address; }", address)
            page.wait_for_selector("body[data-opened]")
            check(page)
            assert page.locator("h1").count() == 1
            assert "This cannot be shown" not in page.inner_text("h1")


def test_a_text_is_shown_as_it_is(hostile_server: ViewServer, page: Page) -> None:
    rows = hostile_server.answers.runs[0].index.rows()
    for text in (hostile.MARKUP[0], hostile.MARKUP[12], hostile.ENTITIES[0], hostile.ADDRESSES[0]):
        [row] = [row for row in rows if row.task == text]
        show(page, hostile_server, f"#/run/0/group/{row.id}/rollout/0")
        assert text in page.inner_text(".role-assistant .text")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("null\x00byte", "null\\x00byte"),
        ("\U000e0041tag", "\\u{e0041}tag"),
    ],
)
def test_what_cannot_be_seen_is_an_escape(text: str, shown: str, hostile_server: ViewServer, page: Page) -> None:
    [row] = [row for row in hostile_server.answers.runs[0].index.rows() if row.task == text]
    show(page, hostile_server, f"#/run/0/group/{row.id}/rollout/0")
    assert page.locator(".role-assistant .text").first.inner_text() == shown
    assert page.locator(".role-assistant .esc").count() > 0


@pytest.mark.parametrize(
    "address",
    [
        "#/run/<img src=x onerror=window.pwned=1>", "#/run/0?task=<img src=x onerror=window.pwned=1>",
        "#/%3Cscript%3E", "#/run/0?q=%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E", "#javascript:window.pwned=1",
        "#/run/0?sort=__proto__",
        "#/run/0?steps=%E2%80%AE&by=constructor", "#/compare?left=<b>&right=0.0.0", "#/run/0/step/%ED%A0%80",
    ],
)  # fmt: skip
def test_addresses_are_hostile_too(address: str, hostile_server: ViewServer, new_page: Callable[..., Page]) -> None:
    page = new_page(expected="404")
    page.goto(hostile_server.address)
    page.wait_for_selector("body[data-opened]")
    page.evaluate("(address) => { delete document.body.dataset.opened; location.hash = address; }", address)
    page.wait_for_selector("body[data-opened]")
    check(page)


def test_an_answer_of_10_megabytes_opens(tmp_path: Path, page: Page) -> None:
    answer = "<b>word</b> " * 900_000
    asked = [{"role": "user", "content": "long"}]
    one = rollout(0, [step(asked, "ab", response={"content": answer})], 1.0)
    with served(write_run(tmp_path / "run", [group([one])])) as server:
        show(page, server, "#/run/0/group/0/rollout/0")
        assert page.locator(".role-assistant .text").inner_text().startswith("<b>word</b> <b>word</b>")
        page.get_by_role("button", name="more characters").click()
        check(page, hides=False)
        assert len(page.locator(".role-assistant .text").inner_text()) < len(answer) / 10


def test_texts_stay_texts_in_a_file(hostile_server: ViewServer, tmp_path: Path, page: Page) -> None:
    run = hostile_server.answers.runs[0]
    rows = run.index.rows()
    one_file.write(run, rows, tmp_path / "page.html")
    for row in rows[:: len(rows) // 6]:
        page.goto("about:blank")
        page.goto(f"{(tmp_path / 'page.html').as_uri()}#/run/0/group/{row.id}/rollout/0")
        page.wait_for_selector("body[data-opened]")
        check(page)


def test_half_of_a_surrogate_pair_is_an_escape(hostile_server: ViewServer, page: Page) -> None:
    show(page, hostile_server)
    found: Any = page.evaluate(
        "async () => { const { parts, plain } = await import('/text.js');"
        "return [plain('a\\ud800b'), plain('\\udc00'), parts('\\ud83d\\ude00'), plain('x\\ny\\tz')]; }"
    )
    assert found == ["a\\ud800b", "\\udc00", [["😀", False]], "x\ny\tz"]
