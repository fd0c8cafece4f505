"""Tests the page as one file, without a browser: what it has, and which groups are chosen."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import called, failed, group, rollout, sorting, step, with_tools, write_run

from rllm_core.errors import ConfigError
from rllm_viewer.commands.view import view
from rllm_viewer.view import assets, one_file
from rllm_viewer.view.filters import FILTERS, parsed, range_of

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recorded = [
        sorting(step=1, group=1),
        with_tools(step=2, group=2),
        failed(step=2, group=3),
        sorting(step=3, group=4),
    ]
    return write_run(tmp_path / "run", recorded, metrics=[{"step": step, "reward_mean": 0.5} for step in (1, 2, 3)])


def content(file: Path) -> dict[str, Any]:
    [packed] = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', file.read_text())
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def written(run: Path, *options: object) -> dict[str, Any]:
    file = run.parent / "page.html"
    result = called(view, run, "--html", file, *options, columns=500)
    assert result.exit_code == 0, result.exception
    return content(file)


def chosen(run: Path, *options: object) -> list[int]:
    return [row["group"] for row in written(run, *options)["/api/run/0/groups"]["rows"]]


def test_it_has_everything_that_the_page_asks(run: Path) -> None:
    found = written(run)
    rows = found["/api/run/0/groups"]["rows"]
    assert len(rows) == 4
    for row in rows:
        assert found[f"/api/run/0/group/{row['id']}"]["step"] == row["step"]
        for position in range(len(row["rollouts"])):
            assert "sequences" in found[f"/api/run/0/tokens/{row['id']}/{position}"]
    assert [row["step"] for row in found["/api/run/0/steps"]["metrics"]["rows"]] == [1, 2, 3]
    assert {"/api/runs", "/api/run/0", "/api/run/0/timing/2"} <= set(found)


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (["--step", 2], [2, 3]),
        (["--group", 4], [4]),
        (["--filter", "outcome=failed"], [3]),
        (["--filter", "tool=add", "--filter", "steps=..2"], [2]),
        (["--filter", "solved=no"], [1, 4]),
        (["--filter", "reward=0.3.."], [1, 2, 4]),
        (["--filter", "reward=0.25"], [1, 4]),
        (["--filter", "break=any"], [2]),
        (["--filter", "break=none", "--filter", "cut=no"], [1, 3, 4]),
        (["--filter", "cut=yes"], [2]),
        (["--filter", "version=4.."], [2]),
        (["--filter", "reason=timeout"], [3]),
        (["--filter", "role=agent", "--filter", "kept=divided", "--filter", "task=T"], [1, 2, 4]),
        (["--filter", "tokens=5.."], [2]),
    ],
)
def test_groups_are_chosen(run: Path, options: list[object], groups: list[int]) -> None:
    assert chosen(run, *options) == groups


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "x.html", "--group", 9], "has 4 recorded groups, but none that matches"),
        (["--html", "x.html", "--filter", "colour=red"], "must be NAME=VALUE, where NAME is one of steps, outcome"),
        (["--html", "x.html", "--filter", "steps=many"], "steps takes a number or a range such as 3..9"),
        (["--html", "x.html", "--filter", "solved=perhaps"], "solved must be one of yes, no, unknown"),
        (["--step", 1], "need --html"),
    ],
)
def test_wrong_options_are_one_line(run: Path, options: list[object], said: str) -> None:
    error = called(view, run, *options).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert "\n" not in str(error)


def test_only_one_run_is_written(run: Path) -> None:
    write_run(run.parent / "other")
    error = called(view, run.parent, "--html", "x.html").exception
    assert "--html writes one run, but there are 2" in str(error)


def test_an_existing_file_is_kept(run: Path) -> None:
    file = run.parent / "page.html"
    file.write_text("mine", encoding="utf-8")
    error = called(view, run, "--html", file).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"{file} exists; choose another name"
    assert file.read_text(encoding="utf-8") == "mine"


def test_a_file_that_is_too_large_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_file, "MAX_BYTES", 1000)
    error = called(view, run, "--html", run / "page.html").exception
    assert "choose fewer with --step, --group or --filter" in str(error)
    assert not (run / "page.html").exists()


def test_a_full_disk_leaves_no_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = run.parent / "pages"
    folder.mkdir()
    monkeypatch.setattr(os, "fsync", full)
    error = called(view, run, "--html", folder / "page.html").exception
    assert "page.html cannot be written: No space left on device" in str(error)
    assert list(folder.iterdir()) == []


def test_hostile_text_stays_data(tmp_path: Path) -> None:
    asked = [{"role": HOSTILE, "content": HOSTILE}]
    run = write_run(tmp_path / HOSTILE.replace("/", "-"), [group([rollout(0, [step(asked, "x")], 1.0)])])
    file = tmp_path / "page.html"
    assert called(view, run, "--html", file, columns=500).exit_code == 0
    text = file.read_text()
    assert text.count("</script>") == 2
    assert "alert(1)" not in re.sub(r"<title>.*?</title>", "", text)
    assert "<script>alert" not in text


def test_the_policy_allows_only_the_own_script(run: Path) -> None:
    written(run)
    text = (run.parent / "page.html").read_text()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert f"script-src '{one_file._hash(script)}'" in policy
    assert f"style-src '{one_file._hash(style)}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"^\s*(import|export) ", script, re.MULTILINE)


def test_the_script_has_every_module_once() -> None:
    script = one_file.bundle()
    names = [path.strip("/").removesuffix(".js") for path in assets.FILES if path.endswith(".js")]
    assert {name: script.count(f"const from_{name} = (") for name in names} == dict.fromkeys(names, 1)


def test_the_source_of_the_page_makes_no_markup_from_text() -> None:
    for path, file in assets.FILES.items():
        text = file.content.decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|http", text
        ) or (re.findall(r"https?://\S+", text) == ['http://www.w3.org/2000/svg";']), path


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("3..9", (3, 9)),
        ("5", (5, 5)),
        ("-1.5..", (-1.5, float("inf"))),
        ("..0", (float("-inf"), 0)),
        ("0.5", (0.5, 0.5)),
    ],
)
def test_ranges(text: str, bounds: tuple[float, float]) -> None:
    assert range_of(text) == bounds


@pytest.mark.parametrize("text", ["", "..", "a", "1..b", "1.2.3", "٣"])
def test_what_is_no_range(text: str) -> None:
    assert range_of(text) is None


def test_the_page_has_the_same_filters() -> None:
    source = assets.FILES["/filters.js"].content.decode()
    [fields] = re.findall(r"export const FIELDS = \{\n(.*?)\n\};", source, re.DOTALL)
    assert re.findall(r"^  (\w+): ", fields, re.MULTILINE) == list(FILTERS)
    assert parsed(["steps=1..2"]) == {"steps": "1..2"}
