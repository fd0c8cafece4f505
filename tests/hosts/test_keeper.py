"""Tests that processes end with the one that has started them, also if it is killed before it has told so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTER = """
import os, subprocess, sys
from rllm_core.sandbox import ProcessKeeper
folder, named, leaves = sys.argv[1], sys.argv[2] == "named", sys.argv[3]
keeper = ProcessKeeper(folder)
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
if leaves == "another session":
    sleeps = ["sh", "-c", f"setsid {sys.executable} -S -c 'import time; print(1, flush=True); time.sleep(1000)'; :"]
process = subprocess.Popen(sleeps, env=os.environ | keeper.environment, start_new_session=True, stdout=subprocess.PIPE)
if named:
    keeper.started(process.pid)
if leaves == "another session":
    process.stdout.readline()
print(process.pid, flush=True)
sys.stdin.read()
"""


def marked(environ: bytes) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if environ in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by name only, without /proc")
@pytest.mark.parametrize("named", ["named", "unnamed"])
@pytest.mark.parametrize("leaves", ["its session", "another session"])
def test_what_a_killed_process_has_started_ends(tmp_path: Path, named: str, leaves: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    arguments = [sys.executable, "-c", STARTER, str(folder), named, leaves]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        mark = next(one for one in variables if one.startswith(b"RLLM_KEEPER="))
        assert pid in marked(mark)
        os.kill(starter.pid, signal.SIGKILL)
    while marked(mark) or folder.exists():
        time.sleep(0.02)
