"""Tests links between views, following a run, damage, copying, and the page as one file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import demo_runs
from conftest import group_id, served, show, wait_for_view
from playwright.sync_api import Page, expect

from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode
from rllm_viewer.view import one_file
from rllm_viewer.view.server import ViewServer


def test_everything_links_on(server: ViewServer, page: Page) -> None:
    show(page, server, "#/")
    page.get_by_role("link", name="demo").click()
    page.locator(".rows a", has_text="group 1").first.click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 1)}")
    page.get_by_role("link", name="step 1", exact=True).first.click()
    wait_for_view(page, "#/run/0/step/1")
    page.get_by_role("link", name="times of its rollouts").click()
    wait_for_view(page, "#/run/0/timing/1")
    page.get_by_role("link", name="group 1, rollout 0").click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 1)}/rollout/0")
    page.get_by_role("link", name="tokens (t)").click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 1)}/rollout/0/tokens")
    page.get_by_role("link", name="group (g)").click()
    page.get_by_role("link", name="compare their texts").click()
    wait_for_view(page, "#/compare?left=")
    assert page.locator("del").count() > 0
    page.get_by_role("link", name="Left: rollout").click()
    wait_for_view(page, "#/run/0/group/")


def test_a_group_says_what_the_best_rollout_did(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 1)}")
    assert "Rollout 3 (best) and rollout 0 (worst) first differ at token 0 of call 1" in page.inner_text("main")
    assert page.locator(".card").count() == 4
    assert page.locator(".card", has_text="best").count() == 1
    page.get_by_role("link", name="step 6, group 6").click()
    wait_for_view(page, f"#/run/0/group/{group_id(server, 6)}")


def test_images_of_a_conversation_are_shown(server: ViewServer, page: Page) -> None:
    show(page, server, f"#/run/0/group/{group_id(server, 102)}/rollout/0")
    expect(page.get_by_alt_text("image of the conversation")).to_be_visible()
    assert page.locator("h2", has_text="Role judge").count() == 1
    page.get_by_text("as JSON").click()
    assert '"answer": [' in page.inner_text("main")


def test_a_running_run_is_followed(tmp_path: Path, page: Page) -> None:
    run = demo_runs.demo(tmp_path / "run", steps=2)
    with served(run) as server:
        show(page, server, "#/run/0?outcome=trained")
        before = page.locator(".rows .row").count()
        page.get_by_text("Run file").click()
        one = demo_runs.sorting(77, 3, "best")
        line = one.to_json().encode()
        with (run / "groups.jsonl").open("ab") as file:
            offset = file.tell()
            file.write(line + b"\n")
        with (run / "groups_index.jsonl").open("a") as file:
            file.write(json.dumps(IndexedGroup.of(one, offset, len(line)).to_json()) + "\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(demo_runs.metrics(3, 3)) + "\n")
        expect(page.locator(".rows .row")).to_have_count(before + 1)
        expect(page.get_by_role("link", name="group 77")).to_be_visible()
        expect(page.get_by_text("training.steps", exact=True)).to_be_visible()  # what was opened stays open
        page.locator(".rows a", has_text="group 77").click()
        wait_for_view(page, f"#/run/0/group/{offset}")


def test_the_list_of_runs_is_followed(tmp_path: Path, page: Page) -> None:
    run, other = (demo_runs.demo(tmp_path / name, steps=2) for name in ("run", "other"))
    with served(run, other) as server:
        show(page, server, "#/")
        row = page.locator(".rows .row", has_text="run").first
        expect(row).to_contain_text("completed")
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"status": "interrupted"}))
        expect(row).to_contain_text("interrupted")


def test_the_times_of_a_step_that_was_still_running_are_read_again(tmp_path: Path, page: Page) -> None:
    run = demo_runs.demo(tmp_path / "run", steps=2)
    written = (run / "timings.jsonl").read_text()
    (run / "timings.jsonl").write_text(written.splitlines(keepends=True)[0])
    with served(run) as server:
        show(page, server, "#/run/0/timing/2")
        expect(page.get_by_text("The run has no timings of this step.")).to_be_visible()
        (run / "timings.jsonl").write_text(written)
        for address in ("#/run/0/step/2", "#/run/0/timing/2"):
            page.evaluate(f"location.hash = '{address}'")
            wait_for_view(page, address)
        expect(page.get_by_text("waiting for groups")).to_be_visible()


def test_a_run_that_was_resumed_meanwhile_is_shown_without_the_lost_launch(tmp_path: Path, page: Page) -> None:
    run = demo_runs.demo(tmp_path / "run", steps=3)
    longer = demo_runs.demo(tmp_path / "longer", steps=9)
    with served(run) as server:
        show(page, server, "#/run/0/step/2")
        before = json.loads(copied(page, "JSON"))
        for file in longer.iterdir():  # as after the page was hidden: the files were cut, and are longer again
            file.replace(run / file.name)
        (run / "plugins.json").write_text("[{}, {}]")
        page.evaluate("location.hash = '#/run/0'")
        expect(page.get_by_role("link", name="group 9", exact=True)).to_be_visible()
        page.evaluate("location.hash = '#/run/0/step/2'")
        wait_for_view(page, "#/run/0/step/2")
        after = json.loads(copied(page, "JSON"))
    assert before["metrics"] == demo_runs.metrics(2, 3)
    assert after["metrics"] == demo_runs.metrics(2, 9)


def copied(page: Page, name: str) -> str:
    page.keyboard.press("c")
    page.locator("#copies").get_by_role("button", name=name).click()
    expect(page.get_by_text(f"copied as {name}")).to_be_visible()
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_a_killed_run_and_broken_lines_are_named(tmp_path: Path, page: Page) -> None:
    run = demo_runs.demo(tmp_path / "run", steps=2)
    (run / "summary.json").unlink()
    with (run / "timings.jsonl").open("a") as file:
        file.write("{broken\n")
    content = (run / "groups.jsonl").read_bytes()
    (run / "groups.jsonl").write_bytes(b"#" * 10 + content[10:] + b'{"step": 9, "gro')
    with served(run) as server:
        show(page, server, "#/run/0")
        said = page.inner_text("main")
        assert "The run was killed" in said
        assert "1 group cannot be read: the file is damaged at byte 0" in said
        assert "1 line of timings.jsonl cannot be read" in said
        assert "Worth a look" in said
        assert "rollouts read" not in said, "half a line is not waited for"
        assert "cannot be read" in page.locator(".rows .row").first.inner_text()


def test_a_broken_line_of_the_metrics_is_named_once(tmp_path: Path, page: Page) -> None:
    run = demo_runs.demo(tmp_path / "run", steps=2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    with served(run) as server:
        show(page, server, "#/run/0")
        [problem] = page.locator(".problem").all_inner_texts()
        assert (
            "A file of the run is damaged; the others are shown: metrics.jsonl has a line that is not JSON" in problem
        )


def test_a_server_that_has_ended_says_what_to_do(server: ViewServer, new_page: Callable[..., Page]) -> None:
    page = new_page(expected="net::ERR_")
    show(page, server, "#/run/0")
    page.route("**/api/**", lambda route: route.abort())
    page.evaluate(f"location.hash = '#/run/0/group/{group_id(server, 1)}'")
    expect(page.get_by_text("Start it again in the terminal with rllm-core view")).to_be_visible()


def test_a_run_without_groups_says_why(tmp_path: Path, page: Page) -> None:
    run = demo_runs.write_run(tmp_path / "run", training={"groups_kept_per_step": 0})
    with served(run) as server:
        show(page, server, "#/run/0")
        assert "groups_kept_per_step = 0" in page.inner_text("main")


def test_what_is_shown_can_be_copied(server: ViewServer, folder: Path, page: Page) -> None:
    first = group_id(server, 1)
    show(page, server, f"#/run/0/group/{first}/rollout/2")
    assert copied(page, "link") == f"{server.address}#/run/0/group/{first}/rollout/2"
    episode = Episode.model_validate(json.loads(copied(page, "JSON")))
    assert episode.rollout_index == 2
    script = copied(page, "Python") + "print(episode.rollout_index)\n"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "2\n"
    assert copied(page, "command") == f"rllm-core show {folder} --group 1 --rollout 2"


def test_the_file_opens_from_disk_with_its_views(server: ViewServer, tmp_path: Path, page: Page) -> None:
    run = server.answers.runs[0]
    rows = [row for row in run.index.rows() if row.step <= 5]
    one_file.write(run, rows, tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("body[data-opened]")
    assert page.locator(".rows .row").count() == len(rows)
    page.locator(".rows a", has_text="group 1").first.click()
    page.get_by_role("link", name="tokens of rollout 0").click()
    page.wait_for_selector(".tok.control")
    page.keyboard.press("i")
    page.wait_for_selector("h1:has-text('Times of step 1')")
    page.keyboard.press("r")
    page.fill("#query", "result 2")
    expect(page.get_by_text("found in 1 rollouts")).to_be_visible()
    for query, count in (("assistant", 0), ('{"answer": [1', 1), ("user", 0)):  # texts, not how a file writes them
        page.fill("#query", query)
        expect(page.get_by_text(f"found in {count} rollouts")).to_be_visible()
