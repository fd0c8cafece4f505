"""Host ``processes``: rollouts run in other processes of this machine, which are freshly started, never forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm_core.config import RolloutConfig
from rllm_core.hosts import wire
from rllm_core.hosts.contract import HostedWorkflow
from rllm_core.hosts.elsewhere import no_interpreter
from rllm_core.hosts.worker import ASK_FOR_STACK
from rllm_core.hosts.worker_handle import Link, Worker
from rllm_core.hosts.worker_pool import WorkerPool
from rllm_core.sandbox import ProcessKeeper

STACK_SECONDS = 1.0
LAST_OUTPUT_SECONDS = 0.5  # to read a worker's last output: a process outside its session may keep the pipe open
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # there is a process per core already


class Processes(WorkerPool):
    """Runs rollouts in processes of this machine.

    The processes end with the run, however it ends: a keeper process waits for the run to end, then kills the remaining
    processes and everything that they have started.
    """

    name = "processes"

    def __init__(self, hosted: HostedWorkflow, config: RolloutConfig, section: Any = None) -> None:
        super().__init__(hosted, config, section)
        self.keeper: ProcessKeeper | None = None

    def what(self, number: int) -> str:
        return "processes" if number != 1 else "process"

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        self.keeper = ProcessKeeper()
        await super().open(note=note, settled=settled, folder=folder)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self.keeper is not None:
                self.keeper.close()

    async def start_worker(self, worker: Worker) -> None:
        mine, other = socket.socketpair()
        with other:
            try:
                process = subprocess.Popen(
                    [_python(self.config.python), "-m", "rllm_core.hosts.worker"],
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    stderr=subprocess.PIPE,
                    env=dict.fromkeys(ONE_THREAD, "1") | dict(os.environ),
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                mine.close()
                raise no_interpreter(self.config.python, error) from error
        if self.keeper is not None:
            self.keeper.started(process.pid)
        link = _ProcessLink(worker, process, self)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: link, sock=mine)
        assert process.stderr is not None
        link.output, _ = await loop.connect_read_pipe(lambda: _Output(link), process.stderr)


def _python(configured: str | None) -> str:
    if configured is None:
        return sys.executable
    return shutil.which(configured) or configured


class _ProcessLink(Link, asyncio.Protocol):
    """The connection to a worker process.

    Attributes:
        output: Reader of the worker's output; None until reading has started.
        output_ended: Set when the worker and everything that it has started have closed the output.
    """

    def __init__(self, worker: Worker, process: subprocess.Popen[bytes], host: Processes) -> None:
        super().__init__(worker)
        self._process = process
        self._host = host
        self._frames = wire.Frames()
        self._transport: Any = None
        self._is_lost = False
        self.output: asyncio.BaseTransport | None = None
        self.output_ended = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for content in self._frames.feed(data):
                self.worker.received(content)
        except ValueError as error:
            self.worker.lose(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._host.do(self._ended())

    def send(self, content: bytes) -> None:
        if not self._is_lost:
            self._transport.write(wire.frame(content))

    async def _ended(self) -> None:
        """Reports how the process ended, once this is known."""
        code = await self._exit_code()
        how = "its connection broke" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by signal {-code} ({signal.Signals(-code).name})"
            if -code == signal.SIGKILL:
                how += "; the system does that if memory is short"
        self.worker.gone(how)

    async def _exit_code(self) -> int | None:
        for _ in range(int(STACK_SECONDS / 0.02)):
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(0.02)
        return None

    async def kill(self, *, asking: bool) -> None:
        if asking and self._process.poll() is None:
            os.kill(self._process.pid, ASK_FOR_STACK)
            await asyncio.sleep(STACK_SECONDS)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the worker, and the processes that it has started
        except ProcessLookupError:
            pass
        while self._process.poll() is None:
            await asyncio.sleep(0.005)
        if self._host.keeper is not None:
            self._host.keeper.ended(self._process.pid)
        if self.output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.output_ended.wait(), LAST_OUTPUT_SECONDS)
            self.output.close()
        if self._transport is not None:
            self._transport.abort()


class _Output(asyncio.Protocol):
    """Reads the output of a worker."""

    def __init__(self, link: _ProcessLink) -> None:
        self._link = link

    def data_received(self, data: bytes) -> None:
        self._link.worker.printed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.output_ended.set()
