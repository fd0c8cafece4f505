"""Runs whose workers are killed: nothing stays behind, and no failure becomes a reward."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
from pathlib import Path

import pytest

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_devkit.scripted import Script, ScriptedBackend

GROUP = 8
GROUPS_PER_STEP = 20
AT_ONCE = 16
KILLED_SHARE = 0.05
MARKER = "RLLM_TEST_KILLED_WORKERS"


LAKE, SUM = "gymnasium/FrozenLake-v1", "reasoning_gym/chain_sum"
ANSWERS = {LAKE: ("down", "right"), SUM: ("12", "-3")}
OPTIONS = {LAKE: ["gymnasium.options={is_slippery = false}"], SUM: []}
FAILURES = ("worker_lost", "error", "timeout")


class Killer:
    """Kills a worker after every so many answers of the engine, and lets none of them fail."""

    def __init__(self, every_answers: int) -> None:
        self.every_answers = every_answers
        self.killed = 0
        self._rng = random.Random(0)

    def __call__(self, answer: int) -> None:
        """Called before each answer, with its number."""
        workers = [] if answer % self.every_answers else running("rllm_core.hosts.worker")
        if workers:
            os.kill(self._rng.choice(workers), signal.SIGKILL)
            self.killed += 1


def running(command: str = "") -> list[int]:
    """Returns the processes that the run has started, of any depth, whoever their parent is now."""
    mark = f"{MARKER}={os.environ[MARKER]}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                is_one = mark in environment and command in (folder / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended
                continue
            if is_one:
                found.append(int(folder.name))
    return sorted(found)


def train(folder: Path, environment: str, rollouts: int, *settings: str) -> list[dict]:
    """Trains with the scripted backend; returns the events."""
    plugins = PluginManager.from_environment()
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    ecosystem, _, name = environment.partition("/")
    chosen = (
        f"{ecosystem}.environment={name}", f"training.steps={rollouts // (GROUP * GROUPS_PER_STEP)}",
        f"training.groups_per_step={GROUPS_PER_STEP}", f"training.rollouts_per_group={GROUP}",
        "training.validation_rollouts=0", "rollout.max_response_tokens=64", *OPTIONS[environment], *settings,
    )  # fmt: skip
    parts = assemble(load_run_config(ecosystem, plugins, overrides=chosen, backend="scripted"), plugins)
    asyncio.run(launch.train(parts, folder, resume=False, progress=Progress()))
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def rewards_of(events: list[dict]) -> dict[str, list]:
    """Returns the rewards of each rollout that ended well, by its id, which ends with the number of the attempt."""
    return {
        event["rollout"]: [trajectory["reward"] for trajectory in event["trajectories"]]
        for event in events
        if event["event"] == "finish" and event["reason"] not in FAILURES
    }


@pytest.mark.parametrize(
    ("environment", "rollouts", "every_answers"),
    [
        (LAKE, 320, 200),
        pytest.param(LAKE, 10_080, 500, marks=pytest.mark.slow),
        pytest.param(SUM, 640, 100, marks=pytest.mark.slow),
    ],
)
def test_killed_workers_cost_only_attempts(environment, rollouts, every_answers, tmp_path, monkeypatch):
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(MARKER, f"{os.getpid()}-{tmp_path.name}")
    killer = Killer(every_answers)
    monkeypatch.setattr(ScriptedBackend, "speed", 0.0)  # training must not depend on what was lost
    good, bad = ANSWERS[environment]
    monkeypatch.setattr(ScriptedBackend, "script", Script(good=good, bad=bad, failure=killer))
    folder = tmp_path / "run"
    events = train(
        folder, environment, rollouts, "rollout.host=processes", "rollout.workers=2",
        f"rollout.rollouts_per_worker={AT_ONCE}",
    )  # fmt: skip
    assert not running(), "a process is left"
    assert not list(places.rglob("*")), "a folder is left"

    summary = json.loads((folder / "summary.json").read_text())
    lost = summary["rollout_host"]["lost_rollouts"]
    assert killer.killed
    assert lost >= KILLED_SHARE * rollouts
    ended = [event for event in events if event["event"] == "finish"]
    failed = [event for event in ended if event["reason"] in FAILURES]
    assert len(failed) == lost
    assert {event["reason"] for event in failed} == {"worker_lost"}
    assert not [event for event in failed if event["trajectories"] or event["is_correct"] is not None]
    assert summary["books"]["dispatched"] == rollouts
    assert sum(count for name, count in summary["books"].items() if name != "dispatched") == rollouts

    monkeypatch.setattr(ScriptedBackend, "script", Script(good=good, bad=bad))
    undisturbed = train(tmp_path / "undisturbed", environment, rollouts, "rollout.host=inline")
    rewards, expected = rewards_of(events), rewards_of(undisturbed)
    firsts = [rollout for rollout in rewards if rollout.endswith("-0")]  # a later attempt samples anew
    assert len({rollout.rpartition("-")[0] for rollout in rewards}) == len(rewards) == len(expected) == rollouts
    assert [rewards[rollout] for rollout in firsts] == [expected[rollout] for rollout in firsts]
    assert rollouts > len(firsts) >= rollouts - lost
