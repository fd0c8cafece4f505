"""Fault injection at every boundary between the core and its plugins.

    faults = Faults()
    faults.inject("engine.get_token_outputs_from_token_input", raises(EngineBusy("429")), when=share(0.2))
    faults.inject("backend.update_policy", raises(OSError("device lost"), after=True), when=at(3))
    plugins.register(faults.plugin(), "faults")
    parts = assemble(load_run_config(...), plugins)
    with faults.installed(parts, run_dir):
        asyncio.run(launch.train(parts, run_dir, resume=False, progress=Progress()))
    assert verify(run_dir).holds

A fault-injection point has the name of its method: ``workflow.run``, ``completer.complete``,
``backend.save_checkpoint``; see `SEAMS`. Call numbers and the seed decide which calls fail, so failures are
reproducible.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rllm_core import hookspecs, providers
from rllm_core.assembly.parts import Parts
from rllm_core.config import RunConfig
from rllm_core.engine import Completer, derive_seed
from rllm_core.hookspecs import hookimpl
from rllm_core.tracker import Status, Tracker
from rllm_core.types import Task
from rllm_core.workflow import Workflow
from rllm_devkit.disk import OPERATIONS, InterceptedDisk, Operation

_WORKFLOW = ("workflow.run", "workflow.episode", "completer.complete")
_ENGINE = ("engine.get_token_outputs_from_token_input", "engine.get_model_response")
_BACKEND = tuple(
    f"backend.{method}"
    for method in (
        "init_rollout_engine", "transform_to_backend_batch", "process_backend_batch", "update_policy",
        "on_policy_updated", "save_checkpoint", "load_checkpoint", "compute_logprobs", "enter_generation",
        "enter_training", "state_dict", "load_state_dict", "shutdown",
    )
)  # fmt: skip
_HOOKS = tuple(f"hook.{name}" for name in vars(hookspecs) if name.startswith("on_"))
_TRACKER = ("tracker.start", "tracker.log", "tracker.finish")
_DISK = tuple(f"disk.{operation}" for operation in OPERATIONS)
SEAMS = (*_WORKFLOW, *_ENGINE, *_BACKEND, *_HOOKS, *_TRACKER, *_DISK)
_SYNCHRONOUS = {"workflow.episode", "backend.transform_to_backend_batch", "backend.state_dict",
                "backend.load_state_dict"}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call at a fault-injection point.

    Attributes:
        seam: Name of the fault-injection point.
        number: Number of the call at this point, from 1.
        arguments: Positional arguments; for the disk, the path.
        task_id: Task of the rollout, for workflow and completer.
        turn: Turn of the conversation, from 1, for ``completer.complete``.
    """

    seam: str
    number: int
    arguments: tuple[Any, ...] = ()
    task_id: str = ""
    turn: int = 0


Proceed = Callable[[], Awaitable[Any]]
Action = Callable[[Call, Proceed], Awaitable[Any]]
When = Callable[[Call], bool]


def at(*numbers: int) -> When:
    """Selects the calls with these numbers, from 1."""
    return lambda call: call.number in numbers


def since(number: int) -> When:
    """Selects this call and all later ones."""
    return lambda call: call.number >= number


def share(probability: float, seed: int = 0) -> When:
    """Selects each call with this probability; equal seeds select equal calls."""
    return lambda call: random.Random(derive_seed(seed, call.seam, call.number)).random() < probability


def raises(error: BaseException, *, after: bool = False) -> Action:
    """Raises ``error`` instead of the call, or ``after`` it."""

    async def action(call: Call, proceed: Proceed) -> Any:
        if after:
            await proceed()
        raise error.with_traceback(None)  # otherwise it accumulates the frames of earlier raises

    return action


def hangs(seconds: float = 3600.0) -> Action:
    """Waits on the event loop before the call, by default longer than any timeout."""

    async def action(call: Call, proceed: Proceed) -> Any:
        await asyncio.sleep(seconds)
        return await proceed()

    return action


def blocks(seconds: float) -> Action:
    """Blocks the thread before the call."""

    async def action(call: Call, proceed: Proceed) -> Any:
        time.sleep(seconds)
        return await proceed()

    return action


def cancels() -> Action:
    """Raises CancelledError in the calling task."""

    async def action(call: Call, proceed: Proceed) -> Any:
        raise asyncio.CancelledError(f"{call.seam} was cancelled")

    return action


def returns(value: Any) -> Action:
    """Returns ``value`` instead of the call."""

    async def action(call: Call, proceed: Proceed) -> Any:
        return value

    return action


def changes(change: Callable[[Any], Any]) -> Action:
    """Applies ``change`` to the call's result."""

    async def action(call: Call, proceed: Proceed) -> Any:
        return change(await proceed())

    return action


class Faults:
    """Planned and injected faults.

    Attributes:
        calls: Number of calls per fault-injection point.
        injected: Calls with an injected fault, in order.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.injected: list[Call] = []
        self._planned: dict[str, list[tuple[When, Action]]] = {}

    def inject(self, seam: str, action: Action, *, when: When | None = None) -> None:
        """Plans ``action`` for the calls of ``seam`` selected by ``when``, by default the first.

        Raises:
            ValueError: If the fault-injection point is unknown.
        """
        if seam not in SEAMS:
            raise ValueError(f"unknown fault-injection point {seam!r}; available: {', '.join(SEAMS)}")
        self._planned.setdefault(seam, []).append((when or at(1), action))

    def plugin(self, *, threaded: bool = False) -> object:
        """Returns a plugin that observes every event and provides the tracker ``faults``.

        Args:
            threaded: Whether its observers are plain functions, which run in a worker thread, instead of coroutines.
        """
        hooks = {}
        for seam in _HOOKS:
            observe = functools.partial(self._observe_in_thread if threaded else self._observe, seam)
            hooks[seam.removeprefix("hook.")] = hookimpl(_without_arguments(observe, threaded))
        return _Plugin(**hooks, trackers=_trackers)

    @contextlib.contextmanager
    def installed(self, assembly: Parts, run_dir: Path) -> Iterator[None]:
        """Installs the faults in a run; disk faults end with the context."""
        self._install(assembly)
        token = _installed.set(self)
        try:
            with InterceptedDisk(run_dir, self._disk):
                yield
        finally:
            _installed.reset(token)

    # ----------------------------------------------------------------------------------------------------------------
    # Fault-injection points

    def _install(self, assembly: Parts) -> None:
        backend, workflow = assembly.backend, assembly.workflow
        for seam in _BACKEND:
            self._wrap(backend, seam)
        allocate = backend.init_rollout_engine

        async def init_rollout_engine(*arguments: Any) -> Any:
            engine = await allocate(*arguments)
            for seam in _ENGINE:
                self._wrap(engine, seam)
            return engine

        backend.init_rollout_engine = init_rollout_engine  # type: ignore[method-assign, assignment]
        self._wrap(workflow, "workflow.episode")
        self._wrap_run(workflow)

    def _wrap(self, target: Any, seam: str) -> None:
        name = seam.partition(".")[2]
        original = getattr(target, name)

        async def crossing(*arguments: Any, **options: Any) -> Any:
            return await self.cross(seam, lambda: original(*arguments, **options), arguments)

        def crossing_now(*arguments: Any, **options: Any) -> Any:
            return self.cross_now(seam, lambda: original(*arguments, **options), arguments)

        setattr(target, name, crossing_now if seam in _SYNCHRONOUS else crossing)

    def _wrap_run(self, workflow: Workflow) -> None:
        original = workflow.run

        async def run(task: Task, completer: Completer) -> Any:
            wrapped: list[Completer] = []
            self._wrap_completer(completer, task.task_id, wrapped)
            try:
                return await self.cross(
                    "workflow.run", lambda: original(task, completer), (task,), task_id=task.task_id
                )
            finally:
                for conversation in wrapped:  # break the reference cycle of each wrapper
                    del conversation.complete, conversation.fork

        workflow.run = run  # type: ignore[method-assign]

    def _wrap_completer(self, completer: Completer, task_id: str, wrapped: list[Completer]) -> None:
        original, fork, turns = completer.complete, completer.fork, 0

        async def complete(*arguments: Any, **options: Any) -> Any:
            nonlocal turns
            turns += 1
            proceed = functools.partial(original, *arguments, **options)
            return await self.cross("completer.complete", proceed, arguments, task_id=task_id, turn=turns)

        def forked(*arguments: Any, **options: Any) -> Completer:
            other = fork(*arguments, **options)
            for copied in ("complete", "fork"):  # the copied methods would call the completer that was forked
                other.__dict__.pop(copied, None)
            self._wrap_completer(other, task_id, wrapped)
            return other

        completer.complete = complete  # type: ignore[method-assign]
        completer.fork = forked  # type: ignore[method-assign]
        wrapped.append(completer)

    async def cross(self, seam: str, proceed: Proceed, arguments: tuple[Any, ...] = (), **where: Any) -> Any:
        """Passes a call on, or applies the planned action."""
        self.calls[seam] += 1
        call = Call(seam, self.calls[seam], arguments, **where)
        for when, action in self._planned.get(seam, ()):
            if when(call):
                self.injected.append(call)
                return await action(call, proceed)
        return await proceed()

    def cross_now(self, seam: str, proceed: Callable[[], Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Does the same as `cross` for synchronous calls.

        Raises:
            RuntimeError: If the planned action waits.
        """

        async def proceeding() -> Any:
            return proceed()

        return _now(self.cross(seam, proceeding, arguments), seam)

    async def _observe(self, seam: str) -> Any:
        return await self.cross(seam, _nothing)

    def _observe_in_thread(self, seam: str) -> Any:
        return _now(self.cross(seam, _nothing), seam)

    def _disk(self, operation: Operation, path: Path) -> None:
        self.cross_now(f"disk.{operation}", lambda: None, (path,))


class _Plugin:
    """An object with hook implementations."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        self.__dict__.update(hooks)


class FaultyTracker(Tracker):
    """The tracker ``faults``; it sends nothing."""

    name: ClassVar[str] = "faults"

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        self._faults = _installed.get()
        self._faults.cross_now("tracker.start", lambda: None, (config, run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._faults.cross_now("tracker.log", lambda: None, (step, metrics))

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        self._faults.cross_now("tracker.finish", lambda: None, (status,))


_installed: ContextVar[Faults] = ContextVar("installed faults")


@hookimpl
def _trackers() -> list[providers.TrackerProvider]:
    return [providers.TrackerProvider(name="faults", load=f"{__name__}:FaultyTracker", summary="Injects faults.")]


async def _nothing() -> None:
    return None


def _without_arguments(observe: Callable[[], Any], threaded: bool) -> Callable[[], Any]:
    """Wraps a partial in a function, because pluggy reads signatures, which a partial hides."""

    def plain() -> Any:
        return observe()

    async def awaited() -> Any:
        return await observe()

    return plain if threaded else awaited


def _now(coroutine: Coroutine[Any, Any, Any], seam: str) -> Any:
    """Runs a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise RuntimeError(f"{seam!r} is synchronous, so its action must not wait")
