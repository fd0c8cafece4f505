"""Runs the program of an agent: its output is read to the end, and nothing that it has started outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rllm_core.text import printable

MAX_OUTPUT_BYTES = 64 << 20
KEPT_ERROR_BYTES = 4096


class AgentFailed(RuntimeError):
    """The program ended with an error."""


async def run_program(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Returns what a program writes to its standard output.

    Raises:
        AgentFailed: If it cannot be started, ends with an error, or writes too much.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise AgentFailed(f"the agent cannot be started: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        printed, errors = await asyncio.gather(_limited(process.stdout), _tail(process.stderr))
        code = await process.wait()
    finally:
        # Also what the program has left behind: it would go on to call a rollout that is over.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            await process.wait()
    if code != 0:
        *_, last = errors.decode(errors="replace").strip().splitlines() or ["it wrote nothing to its standard error"]
        ending = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
        raise AgentFailed(f"the agent {ending}: {printable(last.strip())[:500]}")
    return printed.decode(errors="replace")


async def _limited(stream: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while chunk := await stream.read(1 << 16):
        found += chunk
        if len(found) > MAX_OUTPUT_BYTES:
            raise AgentFailed(f"the agent wrote more than {MAX_OUTPUT_BYTES >> 20} MiB to its standard output")
    return bytes(found)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    found = b""
    while chunk := await stream.read(1 << 16):
        found = (found + chunk)[-KEPT_ERROR_BYTES:]
    return found
