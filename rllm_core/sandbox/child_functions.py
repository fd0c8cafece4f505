"""Calls importable functions in child processes that can be killed: reward functions, and others that may hang."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rllm_core.sandbox.processes as processes
from rllm_core.costs import spend
from rllm_core.plugins.blame import Frame
from rllm_core.providers import PATH_PATTERN, RewardFunctionProvider
from rllm_core.sandbox.results import Limits

START_SECONDS = 60.0
CALLS_PER_CHILD = 10_000
GRACE_SECONDS = 5.0

# Function that starts a process, which serves calls as `rllm_core.sandbox.in_child` does.
Start = Callable[[], subprocess.Popen[bytes]]


class ChildError(Exception):
    """A call in a child process has no result.

    Attributes:
        frames: Traceback frames of the child, innermost first (`rllm_core.plugins.blame.Frame`).
    """

    frames: tuple[Frame, ...] = ()


class ChildTimeout(ChildError):
    """The call exceeded its time limit and was killed."""


class ChildOutOfMemory(ChildError):
    """The call exceeded its memory limit."""


class ChildOutputTooLong(ChildError):
    """The result exceeds the output limit."""


class ChildRaised(ChildError):
    """The function raised an exception; the message names it."""


class ChildDied(ChildError):
    """The child process ended during the call."""


class ChildNotStarted(ChildError):
    """The child process has not imported the function, so nothing was called."""


class ChildFunction:
    """Coroutine version of a function in an installed module, run in child processes.

        is_equal = ChildFunction("my_package.grading:is_equal", Limits(wall_seconds=2.0))
        right = await is_equal("1/2", "0.5")

    Arguments and result are JSON. The children import the function once and serve many calls. A child that exceeds its
    time limit is killed and replaced; the others continue. Calls can come from any thread and any event loop.

    Args:
        path: ``"package.module:function"``, importable from installed packages, not from the working directory.
        limits: Limits of a call. The memory limit applies to the child, including its imports.
        children: Maximum number of concurrent calls. The wait of further calls does not count toward their time limit.
        start: For sandboxes: function that starts a child that isolates and survives calls. The child ends a call at
            the time limit, answering ``{"timeout": true}``, or ``{"died": "signal 9"}`` for a call without a result.
        variables: Names of environment variables that the children get in addition to the few that all children get.
        name: What errors call the function, if ``path`` means nothing to the user. Defaults to ``path``.

    Raises:
        ValueError: If ``path`` does not have this form.
    """

    def __init__(
        self,
        path: str,
        limits: Limits | None = None,
        *,
        children: int = RewardFunctionProvider.processes,
        start: Start | None = None,
        variables: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        if not PATH_PATTERN.fullmatch(path):
            raise ValueError(f"{path!r} is not of the form 'package.module:name'")
        self.path = path
        self.name = name or path
        self.limits = limits or Limits()
        self._children = _Children(path, self.name, self.limits, start, variables)
        self._threads = ThreadPoolExecutor(children, thread_name_prefix=f"child-{path}")
        self._ending = weakref.finalize(self, _end, self._threads, self._children)

    async def __call__(self, *arguments: Any) -> Any:
        """Calls the function. A cancelled call continues until its time limit.

        Raises:
            ChildError: If there is no result; the subclass gives the reason.
            TypeError: If the arguments are not JSON.
        """
        if not self._ending.alive:
            raise ChildNotStarted(f"{self.name} was closed")
        call = json.dumps(arguments).encode() + b"\n"
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._children.call, call)
        for kind, amounts in answer.get("costs", {}).items():
            spend(kind, **amounts)
        return result_in(answer, self.name, self.limits)

    def close(self) -> None:
        """Ends all children. Running calls get no result, and further calls are impossible."""
        self._ending()


def _end(threads: ThreadPoolExecutor, children: _Children) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    children.end()


class _Children:
    """Child processes of a function. They die with the thread that started them, which must therefore outlive them."""

    def __init__(self, path: str, name: str, limits: Limits, start: Start | None, variables: Sequence[str]) -> None:
        self._name = name
        self._limits = limits
        self._start = start or (
            lambda: processes.start("function", path, limits, keep_errors=False, variables=variables)
        )
        self._patience_seconds = GRACE_SECONDS if start else 0.0  # a sandbox's child ends late calls itself
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._is_ended = False

    def call(self, call: bytes) -> dict[str, Any]:
        """Returns the answer to a call."""
        child = self._take()
        answer = None
        try:
            answer = child.exchange(call, self._limits.wall_seconds, self._patience_seconds)
        finally:
            self._put(child, is_fit=answer is not None and not answer.get("unfit"))
        return answer

    def end(self) -> None:
        """Kills all children. Threads that wait for a busy child find it dead and clean up."""
        with self._lock:
            self._is_ended = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                processes.kill(child.process)
        for child in idle:
            processes.end(child.process)

    def _take(self) -> _Child:
        """Returns a child that has imported the function."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
            if child is not None:
                self._busy.add(child)
                return child
        child = _Child(self._name, self._start())
        with self._lock:
            self._busy.add(child)
            is_ended = self._is_ended
        is_ready = False
        try:
            if is_ended:
                raise ChildNotStarted(f"{self._name} was closed")
            answer = self._first_answer(child)
            is_ready = "ready" in answer
            if not is_ready:
                error = ChildNotStarted(f"{self._name} cannot be imported: {answer['error']}")
                raise _with_frames(error, answer)
        finally:
            if not is_ready:
                self._put(child, is_fit=False)
        return child

    def _first_answer(self, child: _Child) -> dict[str, Any]:
        try:
            return child.exchange(b"", START_SECONDS)
        except (ChildDied, ChildTimeout) as error:
            raise ChildNotStarted(f"{self._name} was not imported: {error}") from error

    def _put(self, child: _Child, *, is_fit: bool) -> None:
        with self._lock:
            self._busy.discard(child)
            if is_fit and not self._is_ended and child.calls < CALLS_PER_CHILD:
                self._idle.append(child)
                return
        processes.end(child.process)


def result_in(answer: dict[str, Any], name: str, limits: Limits) -> Any:
    """Returns the result in a child's answer.

    Raises:
        ChildError: If there is no result; the subclass gives the reason.
    """
    if "result" in answer:
        return answer["result"]
    if "memory" in answer:
        raise ChildOutOfMemory(f"{name} needed more than {limits.memory_bytes} bytes")
    if "too_long" in answer:
        raise ChildOutputTooLong(
            f"the result of {name} has {answer['too_long']} bytes, more than {limits.output_bytes}"
        )
    if "timeout" in answer:
        raise ChildTimeout(f"{name} took longer than {limits.wall_seconds:g} s")
    if "died" in answer:
        raise ChildDied(f"the process of {name} ended ({answer['died']})")
    raise _with_frames(ChildRaised(f"{name} raised {answer['error']}"), answer)


def _with_frames(error: ChildError, answer: dict[str, Any]) -> ChildError:
    error.frames = tuple(Frame(*frame) for frame in answer["frames"])
    return error


async def call_with_retry(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Calls a function in a child process, and once more if the process dies, which may have an outside cause.

    Raises:
        ChildDied: If the process dies in both calls.
        ChildError: If there is no result for another reason.
    """
    try:
        return await function(*arguments)
    except ChildDied:
        return await function(*arguments)


class _Child:
    """A child process that has imported the function, or is about to."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.name = name
        self.calls = 0

    def exchange(self, line: bytes, seconds: float, patience_seconds: float = 0.0) -> dict[str, Any]:
        """Sends a line and reads the answer, which should arrive within ``seconds``.

        Raises:
            ChildDied: If the process has ended; the message describes how.
            ChildTimeout: If no line arrives in time.
        """
        self.calls += 1
        try:
            with processes.Exchange(self.process, time.monotonic() + seconds + patience_seconds) as exchange:
                exchange.send(line)
                while not exchange.output.endswith(b"\n"):
                    if not exchange.step():
                        code = self.process.wait()
                        how = f"signal {-code}" if code < 0 else f"exit code {code}"
                        raise ChildDied(f"the process of {self.name} ended ({how})")
        except processes.Overrun:
            raise ChildTimeout(f"{self.name} took longer than {seconds:g} s") from None
        answer: dict[str, Any] = json.loads(exchange.output)
        return answer
