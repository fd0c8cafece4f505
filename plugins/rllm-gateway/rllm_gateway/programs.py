"""Runs an agent's program, reads its output to the end, and kills every process that it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from rllm_core.engine import Terminated
from rllm_core.sandbox import ProcessKeeper, kill_marked
from rllm_core.text import printable
from rllm_core.types import TerminationReason

MAX_OUTPUT_BYTES = 64 << 20
KEPT_ERROR_BYTES = 4096
POLL_SECONDS = 0.5
LAST_OUTPUT_SECONDS = 0.5  # for a process that has left the session but keeps the pipes open


class AgentFailed(Terminated):
    """The agent's program ended with an error of its own, not of this package."""

    def __init__(self, message: str) -> None:
        super().__init__(TerminationReason.ERROR, message)


async def run_program(command: Sequence[str], env: Mapping[str, str], keeper: ProcessKeeper, *, mark: str) -> str:
    """Runs a program and returns its standard output.

    Args:
        command: Program and arguments.
        env: Environment variables.
        keeper: Kills the program if this process dies.
        mark: Value in ``env`` that no other program has; processes that have left the program's session have it, too.

    Raises:
        AgentFailed: If the program cannot be started, ends with an error, or writes too much.
    """
    async with _reader() as (stdout, output), _reader() as (stderr, errors):
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**env, **keeper.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentFailed(f"the agent cannot be started: {error}") from error
        finally:
            os.close(stdout)
            os.close(stderr)
        keeper.started(process.pid)
        printed, last = bytearray(), bytearray()
        reading = [
            asyncio.ensure_future(_read_all(output, printed)),
            asyncio.ensure_future(_read_tail(errors, last)),
        ]
        try:
            # Processes that the program leaves behind may keep its pipes open. So do not wait for the pipes after it
            # has ended.
            ongoing = set(reading)
            while process.returncode is None and ongoing:
                ended, ongoing = await asyncio.wait(ongoing, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    one.result()  # raises if the output is too long
            await process.wait()
        finally:
            # Processes left behind would keep calling the model for a rollout that is over.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_marked(mark.encode())
            code = await process.wait()
            keeper.ended(process.pid)
            await asyncio.wait(reading, timeout=LAST_OUTPUT_SECONDS)
            for one in reading:
                one.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    if code != 0:
        lines = last.decode(errors="replace").strip().splitlines()
        ending = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
        said = lines[-1].strip() if lines else "it wrote nothing to its standard error"
        raise AgentFailed(f"the agent {ending}: {printable(said)[:500]}")
    return printed.decode(errors="replace")


@asynccontextmanager
async def _reader() -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Opens a pipe: a descriptor to write to, which the caller closes, and a stream to read from."""
    read, write = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
    )
    try:
        yield write, stream
    finally:
        transport.close()


async def _read_all(stream: asyncio.StreamReader, found: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        found += chunk
        if len(found) > MAX_OUTPUT_BYTES:
            raise AgentFailed(f"the agent wrote more than {MAX_OUTPUT_BYTES >> 20} MiB to its standard output")


async def _read_tail(stream: asyncio.StreamReader, found: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        found += chunk
        del found[:-KEPT_ERROR_BYTES]
