"""Tests that the page of the worker protocol says what the code does."""

from __future__ import annotations

import ast
import json
import re
import signal

from pages import ROOT, Page
from protocol import FROM_RUN, FROM_WORKER, PAGE, PARTS, page, tag

from rllm_core.hosts import wire, worker, worker_handle, worker_pool, worker_side_rollout
from rllm_core.seeds import derive_seed
from rllm_core.types import Episode, Step, TerminationReason, Trajectory
from rllm_devkit import reference
from rllm_devkit.checks.workers import REFERENCE, WORKER_CHECKS

PROTOCOL = Page(PAGE)


def test_the_tables_are_generated() -> None:
    assert page(PROTOCOL.text) == PROTOCOL.text, "run make docs-reference"


def test_every_message_has_its_place_in_the_order() -> None:
    said = PROTOCOL.section("The order of messages") + PROTOCOL.section("Cancellation")
    said += PROTOCOL.section("Idle workers") + PROTOCOL.section("Errors that end a worker")
    assert [tag(message) for message in (*FROM_RUN, *FROM_WORKER) if f"`{tag(message)}`" not in said] == []
    assert {tag(part) for part in PARTS} <= PROTOCOL.anchors


def test_the_seeds_are_those_of_the_core() -> None:
    rows = re.findall(r"^\| `(\[.*\])` \| `(\d+)` \|$", PROTOCOL.section("Seeds"), re.M)
    assert len(rows) == 4
    for parts, seed in rows:
        assert derive_seed(*ast.literal_eval(parts)) == int(seed)


def test_the_numbers_are_those_of_the_core() -> None:
    text = PROTOCOL.text
    assert f"**version {wire.VERSION}**" in text
    assert f"at most {wire.MAX_FRAME_BYTES:,} bytes" in text
    assert f"has not ended {worker_handle.CANCEL_SECONDS:g} s after `cancel`" in text
    assert f"`closed` {worker_pool.CLOSE_SECONDS:g} s after `close`" in text
    assert f"more than {worker_handle.MAX_OUTPUT_BYTES >> 20} MiB" in text
    assert f"(on Linux, {int(worker.ASK_FOR_STACK)})" in text
    assert signal.SIGRTMAX - worker.ASK_FOR_STACK == 2


def test_the_fields_of_records_are_complete() -> None:
    section = PROTOCOL.section("The end of a rollout")
    table = section.partition("| what | fields | |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|")[:2] for line in table.splitlines()[2:]]
    found: dict[str, set[str]] = {}
    record = ""
    for what, fields in rows:
        record = what.strip() or record
        found.setdefault(record, set()).update(re.findall(r"`(\w+)`", fields))
    assert found["episode"] == Episode.model_fields.keys() - worker_side_rollout._SET_BY_RUN
    assert found["trajectory"] == Trajectory.model_fields.keys() - {"steps"}
    assert found["step"] == {"reward", "token_rewards", "advantages", "metadata"} < Step.model_fields.keys()
    table = section.partition("| reason | when |")[2]
    reasons = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert reasons == {reason.value for reason in TerminationReason} - {"done", "worker_lost"}


def test_every_check_and_instruction_is_on_the_page() -> None:
    assert list(PROTOCOL.rows("Check a worker")) == list(WORKER_CHECKS)
    assert f"`{REFERENCE}`" in PROTOCOL.text
    named = [json.loads(row.replace("...", '"').split(",")[0] + "]" * ("," in row))[0] for row in instructions()]
    assert set(named) == {name.removeprefix("_do_") for name in vars(reference.Playing) if name.startswith("_do_")}


def instructions() -> list[str]:
    """The instructions in the table."""
    return re.findall(r'^\| `(\["\w+".*?\])` \|', PROTOCOL.section("The reference workflow"), re.M)


def test_the_page_is_in_the_navigation() -> None:
    assert "worker-protocol.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
