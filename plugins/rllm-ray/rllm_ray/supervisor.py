"""Ray actor next to each worker: starts the worker's process on its node, and relays bytes between it and the run.

The worker is a separate process, not the actor. It may run in another environment without Ray. A rollout that blocks it
does not block the actor, which can still kill it and has its output. When the node's Ray ends, the actor's keeper ends
the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import ray

from rllm_ray import keeper

STACK_SECONDS = 1.0
# Stop reading a worker's output beyond this limit until the run has taken it.
MAX_OUTPUT_BYTES = 256 << 10
# Processes that the worker started may keep its standard error open after it ends.
LAST_OUTPUT_SECONDS = 1.0
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # Ray reserves a CPU for each worker


class Spec(msgspec.Struct):
    """The start parameters of a worker.

    Attributes:
        python: Interpreter of the worker, or None for that of the actor.
        folder: Working folder of the worker, if the node has it.
        environment: Additional environment variables.
    """

    python: str | None
    folder: str
    environment: dict[str, str]


class Started(msgspec.Struct):
    """The result of a start.

    Attributes:
        machine: Address of the node.
        node: Id of the node in the cluster.
        error: Why the interpreter could not be started, or "".
    """

    machine: str
    node: str
    error: str = ""


class News(msgspec.Struct):
    """The news of a worker since the last call.

    Attributes:
        sent: Bytes that the worker sent to the run.
        printed: Output that the worker printed.
        exit_code: Exit code of the worker, once it has ended and nothing else will follow.
    """

    sent: bytes
    printed: bytes
    exit_code: int | None = None


class Supervisor:
    """Starts and watches one worker.

    Args:
        spec: A `Spec`. Only bytes are exchanged, so that Ray pickles no objects.
    """

    def __init__(self, spec: bytes) -> None:
        self._spec = msgspec.msgpack.decode(spec, type=Spec)
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: Any = None
        self._keeper: Any = None
        self._sent = bytearray()
        self._printed = bytearray()
        self._output: Any = None
        self._open_streams = 2
        self._streams_ended = asyncio.Event()
        self._exit_code: int | None = None
        self._news = asyncio.Event()
        self._frames: dict[int, bytes] = {}
        self._next_frame = 1
        self._waiting: set[asyncio.Task[None]] = set()

    async def start(self) -> bytes:
        """Starts the worker. Returns a `Started`."""
        started = Started(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())
        spec = self._spec
        keeping = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._keeper = keeping.stdin
        await asyncio.to_thread(keeping.wait)
        python = sys.executable if spec.python is None else shutil.which(spec.python) or spec.python
        try:
            process = self._process = subprocess.Popen(
                [python, "-m", "rllm_core.hosts.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=spec.folder if Path(spec.folder).is_dir() else None,
                env={**dict.fromkeys(ONE_THREAD, "1"), **os.environ, **spec.environment},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            started.error = error.strerror or type(error).__name__
            return msgspec.msgpack.encode(started)
        self._keeper.write(b"%d\n" % process.pid)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        await loop.connect_read_pipe(lambda: _Stream(self._has_sent, self._stream_ended), process.stdout)
        self._output, _ = await loop.connect_read_pipe(
            lambda: _Stream(self._has_printed, self._stream_ended), process.stderr
        )
        waiting = loop.create_task(self._wait())
        self._waiting.add(waiting)
        return msgspec.msgpack.encode(started)

    @ray.method(num_returns=0)
    async def send(self, number: int, content: bytes) -> None:
        """Sends bytes to the worker.

        Args:
            number: 1 for the first call, 2 for the next, and so on, because Ray may run calls in another order.
            content: The bytes.
        """
        self._frames[number] = content
        while (content := self._frames.pop(self._next_frame, b"")) != b"":
            self._next_frame += 1
            self._transport.write(content)

    async def news(self) -> bytes:
        """Waits for news of the worker. Returns a `News`."""
        while not (self._sent or self._printed or self._exit_code is not None):
            self._news.clear()
            await self._news.wait()
        news = News(bytes(self._sent), bytes(self._printed), self._exit_code)
        self._sent.clear()
        self._printed.clear()
        if self._exit_code is None:
            self._output.resume_reading()
        return msgspec.msgpack.encode(news)

    async def kill(self, ask: int) -> None:
        """Ends the worker and all of its processes. The last news then have its exit code.

        Args:
            ask: Signal to send first, on which the worker prints its stack; or 0.
        """
        process = self._process
        if process is None:
            return
        if ask and process.poll() is None:
            os.kill(process.pid, ask)
            await asyncio.sleep(STACK_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kills its session, including the processes it started

    def _has_sent(self, data: bytes) -> None:
        self._sent += data
        self._news.set()

    def _has_printed(self, data: bytes) -> None:
        self._printed += data
        if len(self._printed) > MAX_OUTPUT_BYTES:
            self._output.pause_reading()
        self._news.set()

    def _stream_ended(self) -> None:
        self._open_streams -= 1
        if not self._open_streams:
            self._streams_ended.set()

    async def _wait(self) -> None:
        assert self._process is not None
        exit_code = await asyncio.to_thread(self._process.wait)
        self._keeper.close()  # ends the processes that the worker started
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._streams_ended.wait(), LAST_OUTPUT_SECONDS)
        self._exit_code = exit_code
        self._news.set()


class _Stream(asyncio.Protocol):
    """Forwards data as it is read."""

    def __init__(self, read: Any, ended: Any) -> None:
        self._read = read
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._read(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()
