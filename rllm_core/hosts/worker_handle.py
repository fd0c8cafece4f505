"""A worker, as the run sees it: its rollouts, its output, and its loss."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from rllm_core.engine import Completer
from rllm_core.errors import PluginError
from rllm_core.hosts import wire
from rllm_core.hosts.contract import Place
from rllm_core.hosts.pacing import Paced
from rllm_core.hosts.run_side_rollout import PlayedRollout
from rllm_core.limits.timeouts import GRACE_SECONDS
from rllm_core.plugins.blame import place_in
from rllm_core.text import printable
from rllm_core.types import Task

# If a cancelled rollout does not end within this time, its worker is given up.
CANCEL_SECONDS = GRACE_SECONDS * 0.6
MAX_OUTPUT_BYTES = 16 << 20
KEPT_OUTPUT_BYTES = 64 << 10
SHOWN_OUTPUT_LINES = 3
CRASH = "Fatal Python error: "
STACK = re.compile(rf"^({CRASH}|Stack \(most recent call first\)|Current thread 0x)", re.M)  # of `faulthandler`


class _Pool(Protocol):
    """What a worker needs of `rllm_core.hosts.worker_pool.WorkerPool`."""

    incoming: Paced[tuple[Worker, Any]]

    def note(self, line: str, /) -> None: ...
    def rollout_lost(self) -> None: ...
    def rollout_ended(self) -> None: ...
    def maybe_settled(self) -> None: ...
    def place_free(self, worker: Worker, /) -> None: ...
    def start_ending(self, worker: Worker, /, *, asking: bool) -> None: ...
    def worker_ended(self, worker: Worker, why: str, /, *, lost: int) -> None: ...


class Link:
    """A connection to a worker; hosts implement it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        worker.link = self

    @abstractmethod
    def send(self, content: bytes) -> None:
        """Sends the content of a frame; never blocks."""

    @abstractmethod
    async def kill(self, *, asking: bool) -> None:
        """Ends the worker and all of its processes, and waits until they have ended.

        Args:
            asking: Whether to ask for the worker's stack first, because it does not react.
        """


class Worker:
    """A worker, as the run sees it.

    Attributes:
        machine: Machine that the worker runs on; set by hosts that may use other machines.
        rollouts: Running rollouts by number.
        output: Last part of the worker's output.
    """

    link: Link

    def __init__(self, number: int, pool: _Pool) -> None:
        self.number = number
        self.pool = pool
        self.pid = 0
        self.machine = ""
        self.rollouts: dict[int, PlayedRollout] = {}
        self.reserved = 0
        self.played = 0
        self.output: deque[bytes] = deque()
        self.is_open = False
        self.is_closing = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.is_settled = False
        self.outside = 0  # calls to tools and reward functions
        self._output_bytes = self._output_since_rollout = 0
        self._outgoing: list[Any] = []
        self._frames_sent = 0
        self._why_lost: str | None = None
        self._is_lost = False

    @property
    def label(self) -> str:
        """Name of the worker, for messages."""
        where = " on ".join(each for each in (f"pid {self.pid}" if self.pid else "", self.machine) if each)
        return f"worker {self.number}" + (f" ({where})" if where else "")

    def send(self, message: Any) -> None:
        """Sends a message at the end of this tick."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)
        self.is_settled = False

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not self._is_lost:
            self._frames_sent += 1
            self.link.send(wire.encoded(outgoing))

    def received(self, content: bytes) -> None:
        """Handles the content of a frame."""
        try:
            messages = wire.decode_from_worker(content)
        except (msgspec.DecodeError, ValueError) as error:
            self.lose(f"it sent a message that is not one of the protocol: {error}")
            return
        self.pool.incoming.add((self, message) for message in messages)

    def receive(self, message: Any) -> None:
        """Handles a message."""
        if isinstance(message, wire.OfRollout):
            rollout = self.rollouts.get(message.rollout)
            if rollout is None:
                return  # the rollout has ended, for example after its timeout
            rollout.receive(message)
            if isinstance(message, wire.Ended | wire.Failed):
                del self.rollouts[message.rollout]
                self._output_since_rollout = 0
                self.pool.rollout_ended()
        elif isinstance(message, wire.Settled):
            asyncio.get_running_loop().call_soon(self._settle, message)  # after the calls received before it begin
        elif isinstance(message, wire.Ready):
            self.pid = message.pid
            if message.version != wire.VERSION:
                self.lose(
                    f"{message.program} speaks version {message.version} of the worker protocol, this run version "
                    f"{wire.VERSION}; install the same rllm-core in both environments"
                )
        elif isinstance(message, wire.Opened):
            self.is_open = True
            self.opened.set_result(None)
            self.pool.maybe_settled()
        elif isinstance(message, wire.Broken):
            if not self.opened.done():
                self.opened.set_exception(PluginError(printable(message.message)))
            self.lose(f"its workflow cannot be opened: {printable(message.message)}")
        elif isinstance(message, wire.Fatal):
            self.lose(printable(message.message))
        elif isinstance(message, wire.Closed):
            if message.message:
                self.pool.note(f"close() of the workflow in {self.label} failed: {printable(message.message)}")
            self.closed.set()

    def _settle(self, message: wire.Settled) -> None:
        # A worker that has not read every message yet may be about to compute.
        self.is_settled = message.frames == self._frames_sent and not self._outgoing
        self.outside = message.outside
        self.pool.maybe_settled()

    def printed(self, data: bytes) -> None:
        """Keeps the last part of the worker's output."""
        self.output.append(data)
        self._output_bytes += len(data)
        self._output_since_rollout += len(data)
        while len(self.output) > 1 and self._output_bytes - len(self.output[0]) >= KEPT_OUTPUT_BYTES:
            self._output_bytes -= len(self.output.popleft())
        if self._output_since_rollout > MAX_OUTPUT_BYTES:
            self.lose(f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB between the ends of two rollouts")

    def lose(self, why: str, *, asking: bool = False) -> None:
        """Gives the worker up: kills it, and ends its rollouts as lost. Only the first reason counts."""
        if self._why_lost is None:
            self._why_lost = why
            self.is_open = False
            self.pool.start_ending(self, asking=asking)

    def gone(self, how: str) -> None:
        """Handles the end of the worker's process, or of the connection to it."""
        if self.is_closing:
            self.closed.set()
        else:
            self.lose(how)

    async def end(self, *, asking: bool) -> None:
        """Kills the worker, and ends its rollouts as lost."""
        await self.link.kill(asking=asking)
        self._is_lost = True
        self.closed.set()
        said, place = self.last_lines(), place_in(self._text()) if CRASH in self._text() else None
        why = f"{self.label} was lost: {self._why_lost}" + (f" at {place.in_function}" if place is not None else "")
        why += f"; its last output: {said}" if said else ""
        if not self.opened.done():
            self.opened.set_exception(PluginError(why))
        self.opened.exception()  # retrieved here, since asyncio would report it if nothing awaits `opened`
        rollouts, self.rollouts = self.rollouts, {}
        for rollout in rollouts.values():
            rollout.lose(why)
        self.pool.worker_ended(self, why, lost=len(rollouts))

    def last_lines(self) -> str:
        """Returns the last lines of the worker's output as one line, without a stack."""
        said = STACK.split(self._text())[0]
        lines = [printable(line) for line in said.splitlines() if line.strip()]
        return " | ".join(lines[-SHOWN_OUTPUT_LINES:])

    def _text(self) -> str:
        return b"".join(self.output).decode(errors="replace")

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Place]:
        """Holds a slot in the worker."""
        try:
            yield self
        finally:
            self.reserved -= 1
            self.pool.place_free(self)

    async def run(self, task: Task, completer: Completer) -> object:
        """Runs a rollout in the worker; see `rllm_core.hosts.contract.Place`."""
        self.played += 1
        rollout = PlayedRollout(self.played, task, completer, self.send)
        self.rollouts[rollout.number] = rollout
        if self._is_lost or self._why_lost is not None:
            del self.rollouts[rollout.number]
            self.pool.rollout_lost()
            rollout.lose(f"{self.label} was lost: {self._why_lost}")
        else:
            rollout.start()
        try:
            return rollout.result(await asyncio.shield(rollout.over))  # shielded: `_cancel` waits for it, too
        except asyncio.CancelledError:
            if not rollout.over.done():
                await self._cancel(rollout, completer)
            raise

    async def _cancel(self, rollout: PlayedRollout, completer: Completer) -> None:
        """Cancels a rollout, and gives up the worker if the rollout does not end."""
        self.send(wire.Cancel(rollout.number))
        await asyncio.wait([rollout.over], timeout=CANCEL_SECONDS)
        if rollout.over.done():
            completer.scope.waits_at = rollout.waits_at
            return
        is_blocked = rollout.waits_at is None
        why = "blocked its worker" if is_blocked else "ignored its cancellation"
        self.lose(f"rollout {rollout.name} {why}", asking=is_blocked)
        await asyncio.wait([rollout.over], timeout=CANCEL_SECONDS)
        place = place_in(self._text()) if is_blocked else None
        where = place.in_function if place is not None else rollout.waits_at
        completer.scope.waits_at = f"{where or 'an unknown line'}; it {why}, so its worker was killed"
