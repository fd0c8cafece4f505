"""Tests the pure functions of the page without a browser: they run in the JavaScript engine that playwright brings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import playwright
import pytest

from rllm_viewer.terminal import share
from rllm_viewer.view.filters import range_of

PAGE = Path(__file__).parents[2] / "plugins" / "rllm-viewer" / "rllm_viewer" / "view" / "page"
NODE = Path(playwright.__file__).parent / "driver" / "node"


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, as modules for an engine that looks for a package."""
    folder = tmp_path_factory.mktemp("page")
    for file in PAGE.glob("*.js"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def results(folder: Path, module: str, calls: str) -> Any:
    """Evaluates expressions with the names of a module."""
    script = f"import * as m from './{module}.js'; console.log(JSON.stringify({calls}));"
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", script], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([7, 8, 1, 2], [1, 2, 3], 2),  # the rest begins the other
        ([1, 1, 2], [1, 2, 9], 1),
        ([1, 2, 1, 2, 1, 3], [1, 2, 1, 3], 2),
        ([1, 2, 1], [1, 2], 2),
        ([5, 1, 2, 3], [1, 2], 4),  # the other ends before the rest
        ([1, 2], [1, 2, 3], 0),
        ([4, 5], [6], 2),
        ([4, 5], [], 2),
        ([], [6], 0),
    ],
)
def test_the_fewest_dropped_tokens_are_found(
    page_folder: Path, before: list[int], after: list[int], expected: int
) -> None:
    assert results(page_folder, "differences", f"m.dropped({before}, {after})") == expected


def test_what_cannot_be_seen_becomes_an_escape(page_folder: Path) -> None:
    texts = ["a\ud800b", "\udc00", "😀", "x\ny\tz", "\u202egnp", "\x1b[31m", "\U000e0041", "👩\u200d👧", "a\u200db"]
    found = results(page_folder, "text", f"{json.dumps(texts)}.map((text) => m.plain(text))")
    assert found == [
        "a\\ud800b", "\\udc00", "😀", "x\ny\tz", "\\u202egnp", "\\x1b[31m", "\\u{e0041}", "👩\u200d👧", "a\\u200db",
    ]  # fmt: skip


def test_shares_are_those_of_the_command(page_folder: Path) -> None:
    values = [0.0, 0.004, 0.125, 0.145, 0.5, 0.996, 1.0]
    shown = results(page_folder, "text", f"{values}.map((value) => m.share(value))")
    assert shown == list(map(share, values))
    assert (shown[0], shown[2], shown[-1]) == ("0%", "13%", "100%")
    assert len(set(shown)) == len(values), "nearly all is not all, and almost nothing is not nothing"


def test_ranges_are_those_of_the_command(page_folder: Path) -> None:
    written = ["5", "3..9", "3..", "..9", "-1..1", "0.5", "..", "", "x", "1..2..3", " 4 ", "1e3", "--1"]
    found = results(page_folder, "filters", f"{json.dumps(written)}.map((text) => m.range(text)?.map(String) ?? null)")
    names = {"Infinity": float("inf"), "-Infinity": float("-inf")}
    read = [None if one is None else tuple(names.get(bound) or float(bound) for bound in one) for one in found]
    assert read == [range_of(text) for text in written]


def test_an_address_is_read_as_it_was_written(page_folder: Path) -> None:
    places = [
        {"view": "runs"}, {"view": "run", "run": 0}, {"view": "step", "run": 1, "step": 7},
        {"view": "timing", "run": 0, "step": 3}, {"view": "group", "run": 0, "group": 5},
        {"view": "episode", "run": 0, "group": 5, "rollout": 2}, {"view": "tokens", "run": 0, "group": 5, "rollout": 2},
        {"view": "break", "run": 0, "group": 5, "rollout": 2, "call": 1}, {"view": "compare"},
    ]  # fmt: skip
    params = {"task": "<a> & b=c?#", "solved": "yes"}
    calls = f"{json.dumps(places)}.map((place) => m.parse(m.link(place, {json.dumps(params)})))"
    assert results(page_folder, "route", calls) == [{**place, "params": params} for place in places]


def test_differences_are_those_of_the_words(page_folder: Path) -> None:
    calls = "[m.differences('the red fox', 'the brown fox!'), m.differences('', 'a'), m.differences('same', 'same')]"
    assert results(page_folder, "differences", calls) == [
        [["same", "the "], ["removed", "red"], ["added", "brown"], ["same", " fox"], ["added", "!"]],
        [["added", "a"]],
        [["same", "same"]],
    ]


def test_colors_go_from_orange_to_blue(page_folder: Path) -> None:
    calls = (
        "[m.between(0, 0, 1), m.between(1, 0, 1), m.between(null, 0, 1), m.around(-9, 0, 1), m.around(0, 0, 1),"
        " m.around(9, 0, 1), m.upTo(0, 1), m.upTo(1, 1)]"
    )
    assert results(page_folder, "scales", calls) == ["s0", "s15", "none", "s0", "zero", "s15", "zero", "s0"]


def test_tokens_have_their_numbers(page_folder: Path) -> None:
    span = {
        "call": 0, "start": 2, "stop": 4, "version": 3, "logprob": [-1, -2], "trainer": [-1, -1], "advantage": 0.5,
        "correction": None, "entropy": [0.1, 0.2], "reward": None,
    }  # fmt: skip
    answer = {
        "sequences": [{"ids": [1, 2, 3, 4, 5], "spans": [span]}], "control": [3], "texts": {"3": "<|e|>"}, "bytes": {},
    }  # fmt: skip
    names = ["mask", "ratio", "trainer", "entropy", "advantage", "version", "correction"]
    calls = (
        f"(() => {{ const answer = {json.dumps(answer)}; const one = new m.Sequence(answer, 0);"
        f"return [m.recorded(answer), {json.dumps(names)}.map((name) => [1, 3, 4].map((at) => one.value(name, at))),"
        " one.isControl(2), one.shown(2), one.shown(3)]; })()"
    )
    recorded, values, is_control, shown, unknown = results(page_folder, "tokens", calls)
    assert recorded == ["advantage", "logprob", "trainer", "ratio", "mask", "entropy", "version"]
    assert values[0] == [0, 2, 0]
    assert values[1] == [None, pytest.approx(2.71828, abs=1e-4), None]
    assert values[2:] == [
        [None, -1, None], [None, 0.2, None], [None, 0.5, None], [None, 3, None], [None, None, None],
    ]  # fmt: skip
    assert (is_control, shown, unknown) == (True, "<|e|>", "⟨4⟩")


def test_no_character_is_cut_in_two(page_folder: Path) -> None:
    picture = "\U0001f600"
    text = json.dumps(f"a{picture}b{picture}{picture}")
    cuts = results(page_folder, "text", f"[0, 1, 2, 3, 4, 5, 6, 7, 8].map((at) => m.outOfCharacter({text}, at))")
    assert cuts == [0, 1, 1, 3, 4, 4, 6, 6, 8]
    one, other = json.dumps(f"same {picture}"), json.dumps("same \U0001f601")
    assert results(page_folder, "blocks", f"m.common({one}, {other})") == len("same ")
