"""Nothing stays behind of a worker that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from players import TASKSETS, Policy, opened, play, workflow
from rllm_verifiers.folders import MACHINE

PLAYS_FOREVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from players import Policy, opened, play, workflow

async def main():
    policy = Policy(lambda prompt, seed: "a")
    async def hang(*args, **more):
        print("asked", flush=True)
        await asyncio.Event().wait()
    policy.get_token_output_from_token_input = hang
    played = workflow("last_letter")
    async with opened(played):
        await play(played, played.tasks("train")[0], policy)

asyncio.run(main())
"""


async def test_the_next_worker_removes_what_a_killed_one_left() -> None:
    from verifiers.v1.utils.paths import CACHE_DIR

    code = PLAYS_FOREVER.format(tests=str(TASKSETS.parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"asked\n"
        left = _folders(CACHE_DIR, worker.pid)
        worker.send_signal(signal.SIGKILL)
    assert len(left) == 1
    played = workflow("last_letter")
    async with opened(played):
        assert not _folders(CACHE_DIR, worker.pid)
        await play(played, played.tasks("train")[0], Policy(lambda prompt, seed: "a"))
    assert not _folders(CACHE_DIR, os.getpid())


def _folders(cache: Path, pid: int) -> list[Path]:
    return list((cache / "runtimes" / "subprocess").glob(f"{MACHINE}-{pid}-*"))
