"""The worker under test, and the messages for the reference workflow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rllm_core.hosts import wire
from rllm_devkit.checks.results import Violation
from rllm_devkit.checks.worker_pipes import Pipes, started


@dataclass
class WorkerProbe:
    """The worker under test. Checks share a process until one of them fails.

    Attributes:
        command: Program and arguments that start it.
        open: Message to open the reference workflow.
        seconds: Timeout for each reaction of the worker.
    """

    command: tuple[str, ...]
    open: wire.Open
    seconds: float
    _shared: Any = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Pipes]:
        """Yields the shared worker, with its workflow open, for checks that leave it in the same state."""
        if self._shared is None:
            starting = started(self.command, self.seconds)
            self._shared = starting, await starting.__aenter__()
            await self._shared[1].opened(self.open)
        pipes: Pipes = self._shared[1]
        try:
            yield pipes
            if left := [message for number in [None, *pipes.rollouts] for message in pipes.rest(number)]:
                raise Violation(f"it says what nobody waits for: {left!r:.200}")
        except BaseException:
            await self.end()
            raise

    @asynccontextmanager
    async def own(self, open: wire.Open | None = None) -> AsyncIterator[Pipes]:
        """Yields a separate worker for one check."""
        async with started(self.command, self.seconds) as pipes:
            if open is not None:
                await pipes.opened(open)
            yield pipes

    async def end(self) -> None:
        """Ends the shared worker."""
        if self._shared is not None:
            (starting, _), self._shared = self._shared, None
            await starting.__aexit__(None, None, None)


def user(text: str) -> dict[str, Any]:
    """Returns a user message."""
    return {"role": "user", "content": text}


def yes(text: str = "yes") -> dict[str, Any]:
    """Returns a model's answer."""
    return {"role": "assistant", "content": text}


def tool(name: str) -> dict[str, Any]:
    """Returns an offered tool."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


SAY, ASK = ["say", "main", user("one")], ["ask", "main"]
