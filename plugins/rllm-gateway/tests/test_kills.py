"""Tests what is left when an agent, its worker or the run is killed: nothing running, no folder, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rllm_viewer.verify import verify

AGENT = """\
import json, os, pathlib, subprocess, sys, time, urllib.request
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
with open(folder / "pids", "a") as pids:
    pids.write(f"{os.getppid()} {os.getpid()} {child.pid}\\n")
while not (folder / "go").exists():
    time.sleep(0.05)
if len((folder / "pids").read_text().splitlines()) % 5 == 0:
    os.kill(os.getpid(), 9)
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 8}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
RUN_FILE = """\
workflow = "agent"
backend = "local"

[agent]
command = [{python!r}, {agent!r}, {folder!r}, "{{question}}"]
reward = "./score.py:score"
train_file = "rows.jsonl"

[training]
steps = 2
groups_per_step = 2
rollouts_per_group = 4
checkpoint_every_steps = 1
validation_rollouts = 0

[rollout]
host = "processes"
workers = 2
max_concurrent_rollouts = 4
max_response_tokens = 8
max_attempts = 5
"""


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds; the test's own limit is that of the suite."""
    while not condition():
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run file, an agent, rows and a reward function."""
    rows = [{"id": f"row{number}", "question": f"say yes {number}"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text("def score(task, text):\n    return len(set(text)) / 10\n")
    (tmp_path / "agent.py").write_text(AGENT)
    names = {"python": sys.executable, "agent": str(tmp_path / "agent.py"), "folder": str(tmp_path)}
    (tmp_path / "run.toml").write_text(RUN_FILE.format(**names))
    yield tmp_path
    assert not any(is_running(pid) for line in agents(tmp_path) for pid in line)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("rllm-core")), "train", *arguments, "--run-dir", "run"]
    (folder / "temporary").mkdir(exist_ok=True)
    env = os.environ | {"TMPDIR": str(folder / "temporary")}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def agents(folder: Path) -> list[list[int]]:
    """Worker, agent and the agent's child, of every agent so far."""
    file = folder / "pids"
    return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()] if file.exists() else []


def test_kills_leave_nothing_running_and_lose_nothing(folder: Path) -> None:
    """Agents also kill themselves now and then."""
    run = start(folder, "run.toml")
    try:
        eventually(lambda: run.poll() is not None or len(agents(folder)) >= 4)
        assert run.poll() is None, (folder / "log").read_text()
        first = agents(folder)
        worker = first[0][0]
        os.kill(worker, signal.SIGKILL)
        of_worker = [pid for line in first if line[0] == worker for pid in line]
        eventually(lambda: not any(map(is_running, of_worker)))
        eventually(lambda: run.poll() is not None or len(agents(folder)) > len(first))
        assert run.poll() is None, (folder / "log").read_text()
    finally:
        run.kill()
        run.wait()
    eventually(lambda: not any(is_running(pid) for line in agents(folder) for pid in line))
    eventually(lambda: not list((folder / "temporary").glob("rllm-agent-*")))
    (folder / "go").touch()
    assert start(folder, "--resume").wait() == 0, (folder / "log").read_text()
    assert verify(folder / "run").problems == []
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    errors = [str(event.get("error")) for event in events]
    assert any("killed by signal 9" in error for error in errors)
    assert len(agents(folder)) > 16
