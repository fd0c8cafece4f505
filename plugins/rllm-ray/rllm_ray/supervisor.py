"""Ray actor beside each worker: starts the worker's process on its node, and carries bytes between it and the run.

The worker is a process of its own, not the actor: it may belong to another environment, which has no Ray; a rollout
that blocks it does not block the actor, which can still kill it and has what it printed; and when the node's Ray ends,
the actor's keeper ends the worker.
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
# What a worker prints is not read further than this before the run has taken it.
MAX_OUTPUT_BYTES = 256 << 10
# Processes that the worker has started may keep its standard error open after its end.
LAST_OUTPUT_SECONDS = 1.0
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # Ray reserves a CPU for each worker


class Spec(msgspec.Struct):
    """What a worker is started with.

    Attributes:
        python: Its interpreter, or None for that of the actor.
        folder: Its working folder, if the node has it.
        environment: Additional environment variables.
    """

    python: str | None
    folder: str
    environment: dict[str, str]


class Started(msgspec.Struct):
    """How a start went.

    Attributes:
        machine: Address of the node.
        node: Its id in the cluster.
        error: Why the interpreter cannot be started, or "".
    """

    machine: str
    node: str
    error: str = ""


class News(msgspec.Struct):
    """What has come from a worker since the last call.

    Attributes:
        sent: What it sent to the run.
        printed: What it printed.
        exit_code: Its exit code, once it has ended and nothing else will come.
    """

    sent: bytes
    printed: bytes
    exit_code: int | None = None


class Supervisor:
    """Starts one worker.

    Args:
        spec: A `Spec`. What crosses is bytes, so that Ray pickles no objects.
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
            number: 1 for the first call, and so on; Ray may run calls in another order.
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
        """Ends the worker and all of its processes. The last news have its exit code.

        Args:
            ask: Signal after which it prints its stack, to send first; or 0.
        """
        process = self._process
        if process is None:
            return
        if ask and process.poll() is None:
            os.kill(process.pid, ask)
            await asyncio.sleep(STACK_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: what it has started ends, too

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
        self._keeper.close()  # ends what the worker has started
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._streams_ended.wait(), LAST_OUTPUT_SECONDS)
        self._exit_code = exit_code
        self._news.set()


class _Stream(asyncio.Protocol):
    """Hands on what is read."""

    def __init__(self, read: Any, ended: Any) -> None:
        self._read = read
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._read(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()
