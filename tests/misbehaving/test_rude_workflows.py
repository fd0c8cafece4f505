"""Tests misbehaving workflows with the real command line on `local`: each ends as documented and reports why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm_viewer.verify import verify

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# Far more than any of them takes, even on a machine with twenty times the load; this limit only keeps a hang from
# blocking the tests.
LIMIT_SECONDS = 300.0
SMALL = (
    "training.steps=2", "training.groups_per_step=2", "training.rollouts_per_group=2", "training.validation_rollouts=2",
    "rollout.max_response_tokens=6", "rollout.max_consecutive_failures=4", "rollout.quarantine_after_groups=1000",
)  # fmt: skip
IMPATIENT = ("rollout.rollout_timeout_seconds=1", "rollout.max_attempts=1", "training.validation_rollouts=0")


@dataclass
class Ended:
    """Result of a command that has ended."""

    code: int | None
    out: str
    err: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any] | None:
        path = self.run_dir / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


Train = Callable[..., Ended]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    site = tmp_path_factory.mktemp("site")
    metadata = site / "rllm_rude-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rllm-rude\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rllm_core]\nrude = rude\n")
    (site / "rude.py").write_bytes((HERE / "rude.py").read_bytes())
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "commands.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environ,
    )  # fmt: skip
    yield process
    process.communicate(timeout=600)
    assert process.returncode == 0


@pytest.fixture
def train(commands: subprocess.Popen[str], tmp_path: Path) -> Train:
    """Trains on a misbehaving workflow; returns its output, exit code and run folder."""

    def run(
        way: str, *overrides: str, resume: bool = False, environ: dict[str, str] | None = None, stops: bool = False
    ) -> Ended:
        run_dir = tmp_path / "run"
        options = [option for override in (*SMALL, f"rude.way={way}", *overrides) for option in ("-o", override)]
        request = {
            "arguments": ["train", "rude", "--backend", "local", "--run-dir", str(run_dir), *options],
            "folder": str(tmp_path), "stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err"),
            "limit_seconds": LIMIT_SECONDS, "environ": environ or {}, "mark": str(tmp_path / "mark"), "stops": stops,
        }  # fmt: skip
        if resume:
            request["arguments"].append("--resume")
        assert commands.stdin is not None
        assert commands.stdout is not None
        commands.stdin.write(json.dumps(request) + "\n")
        commands.stdin.flush()
        answer = json.loads(commands.stdout.readline())
        out, err = ((tmp_path / name).read_text(errors="replace") for name in ("out", "err"))
        ended = Ended(answer["code"], out, err, run_dir)
        assert ended.code is not None, f"still running after {LIMIT_SECONDS} s: {err}"
        assert "Traceback" not in err
        assert verify(run_dir).holds
        return ended

    return run


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("reward_nan", "Trajectory.reward: expected a finite number, got nan"),
        ("reward_text", "Trajectory.reward: expected a finite number or a bool, got str '1.0'"),
        ("reward_vector", "Trajectory.reward: expected a finite number or a bool, got ndarray"),
        ("reward_huge", "a reward of 1e+35 cannot be trained on"),
        ("reward_missing", "the trajectory of role 'agent' has no reward; pass reward=..."),
        ("returns_nothing", "run() returned NoneType, not an Episode; a return is missing"),
        ("returns_steps", "run() returned list, not an Episode"),
        ("returns_another_task", "run() returned an episode of task 'another'"),
        ("returns_a_step_twice", "a step appears twice in the episode"),
        ("changes_tokens", "the completion_ids of a step were changed"),
        ("returns_a_huge_metric", "a metric of 1.79769e+308 cannot be averaged: metrics['distance'] exceeds 1e+300"),
        ("returns_many_metrics", "metrics has 100,000 entries, but the limit is 1,000"),
        ("returns_what_is_no_trajectory", "trajectories contains a str"),
    ],
)
def test_an_episode_that_is_none_is_refused_once_with_its_place(train: Train, way: str, message: str) -> None:
    ended = train(way, "training.validation_rollouts=0")
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "rude.py:" in last
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert ended.summary["retries"] == 0  # a retry would fail in the same way
    assert ended.summary["books"]["trained"] == 0


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("raises", "KeyError: 'a tool has no such key'"),
        ("raises_a_group", "ExceptionGroup: two tools failed: ValueError: the first (and 1 more)"),
        ("raises_a_long_text", "ValueError: line line"),
        ("exits", "SystemExit: 2"),
        ("exits_in_a_task", "SystemExit: 3"),
        ("interrupts_itself", "KeyboardInterrupt"),
        ("raises_what_nobody_catches", "Fatal: not an Exception"),
        ("recurses", "RecursionError: maximum recursion depth exceeded"),
        ("asks_from_a_thread", "a completer belongs to the event loop of its run"),
    ],
)
def test_what_a_rollout_raises_is_its_error_and_names_its_line(train: Train, way: str, message: str) -> None:
    ended = train(way)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "plugin 'rude' (rllm-rude 1.0), rude.py:" in last
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert ended.summary["validation"][0]["retries"] == 4  # two rollouts, three attempts each


@pytest.mark.parametrize("way", ["exits", "raises_what_nobody_catches", "reward_nan", "cancels_itself"])
def test_now_and_then_it_costs_no_more_than_its_rollouts(train: Train, way: str) -> None:
    ended = train(way, "rude.every=5", "training.validation_rollouts=0", "rollout.max_consecutive_failures=50")
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    assert ended.summary["books"]["trained"] == 8
    assert len(ended.events("error")) > 0


@pytest.mark.parametrize(
    "way",
    [
        "reward_bool", "reward_decimal", "reward_array", "changes_the_reward_later", "forgets_the_loser",
        "asks_after_the_end", "asks_from_a_thread_properly", "forks_and_forgets_to_exit", "leaves_a_thread",
        "leaves_work_in_the_pool", "leaves_a_stubborn_task",
    ],
)  # fmt: skip
def test_what_harms_nobody_else_is_trained(train: Train, way: str) -> None:
    ended = train(way)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == f"run: {ended.run_dir}"
    assert ended.summary is not None
    assert ended.summary["status"] == "completed"
    assert ended.summary["books"]["trained"] == ended.summary["books"]["dispatched"] == 8
    assert [event["event"] for event in ended.events("begin")] == ["begin"]
    if way == "changes_the_reward_later":
        assert ended.summary["validation"][0]["reward_mean"] == 0.25
    if way in ("leaves_work_in_the_pool", "leaves_a_stubborn_task"):
        assert "left running, because it did not stop: " in ended.err
        assert "rude.py:" in ended.err
    if way == "leaves_a_thread":
        assert "poller" in ended.err


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("swallows_everything", "ignored its cancellation and is still running"),
        ("swallows_one_cancellation", "the rollout took longer than 1 s; it waited at rude.py:"),
        ("asks_again_when_it_is_cancelled", "the rollout took longer than 1 s; it waited at rude.py:"),
    ],
)
def test_a_rollout_that_does_not_end_is_a_timeout(train: Train, way: str, message: str) -> None:
    ended = train(way, *IMPATIENT)
    assert ended.code == 1
    assert message in ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert {event["reason"] for event in ended.events("finish")} == {"timeout"}


def test_a_run_that_stalls_says_where_and_ends(train: Train) -> None:
    ended = train("swallows_everything", "training.stall_timeout_seconds=2", "training.validation_rollouts=0")
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert "nothing happened for 2 s" in last
    assert "rude.py:" in last
    assert "left running, because it did not stop: rollout train-" in ended.err


def test_tasks_of_the_run_that_are_cancelled_from_within(train: Train) -> None:
    ended = train("cancels_everything", *IMPATIENT)
    assert ended.code == 1
    assert "cancelled from within" in ended.err.splitlines()[-1]


@pytest.mark.parametrize(
    "way",
    [
        "sleeps_on_the_loop", "computes_for_ever", "waits_in_c",
        *(pytest.param(way, marks=pytest.mark.by_hand) for way in ("sleeps_in_c", "matches_for_ever", "computes_in_c")),
    ],
)  # fmt: skip
def test_a_blocked_event_loop_is_ended_from_outside_and_resumed(train: Train, way: str) -> None:
    """The run stops, reports where it was blocked and loses nothing, in Python or C, with or without the GIL.

    The timeout is longer than a busy machine keeps a run waiting, which would be reported without the line.
    """
    settings = ("training.stall_timeout_seconds=5", "rude.every=9", "training.checkpoint_every_steps=1")
    ended = train(way, *settings)
    assert ended.code in (1, -9)
    assert "blocks the event loop at rude.py:" in ended.err or "by a call in C that holds the interpreter" in ended.err
    assert "rude.py" in ended.err
    assert f"rllm-core train --resume --run-dir {ended.run_dir}" in ended.err
    assert ended.summary is None
    assert verify(ended.run_dir).status == "interrupted"
    assert len(ended.events("start")) > len(ended.events("finish")) > 0
    again = train(way, *settings, resume=True, environ={"RUDE_IS_CURED": "1"})
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["status"] == "completed"
    assert again.summary["optimizer_steps"] == 2


@pytest.mark.parametrize("way", ["swallows_everything", "sleeps_on_the_loop", "waits_in_c"])
def test_one_sigterm_is_enough(train: Train, way: str) -> None:
    """The default deadlines are far longer than this test may take."""
    ended = train(way, "training.validation_rollouts=0", stops=True)
    assert ended.code in (143, 1, -9)
    assert "rude.py" in ended.err
    if way == "swallows_everything":
        assert ended.code == 143
        assert ended.summary is not None
        assert ended.summary["status"] == "interrupted"
