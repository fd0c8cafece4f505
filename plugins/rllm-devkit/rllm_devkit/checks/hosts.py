"""Contract checks for rollout hosts; see `check_rollout_host`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rllm_core.config import RolloutConfig
from rllm_core.types import Episode, Task
from rllm_devkit.checks.host_probe import HostProbe, MakeHost, WatchedEngine, comparable, difference
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked
from rllm_devkit.hosted import Unopenable

MANY = 32
LONGER_THAN_NOTHING_SECONDS = 0.3
COMPUTING_SECONDS = 0.15


async def check_rollout_host(
    make: MakeHost, config: RolloutConfig | None = None, *, seconds: float = 60.0, rollout_seconds: float = 3.0
) -> list[CheckResult]:
    """Checks a rollout host against the contract of `rllm_core.hosts.contract.RolloutHost`.

    In a test: ``assert not [r for r in await check_rollout_host(Mine) if r.outcome == "failed"]``. The host's workers
    must have rllm-devkit installed, and see the temporary files of this machine.

    Args:
        make: Constructs a host from a `HostedWorkflow` and the section ``[rollout]``, such as the class of the host.
        config: The section ``[rollout]``; the checks set some of its keys.
        seconds: Timeout for expected events, such as the start of a worker and its rollouts.
        rollout_seconds: Deadline of rollouts that block.

    Returns:
        One result per check.
    """
    with tempfile.TemporaryDirectory(prefix="rllm-host-") as folder:
        config = (config or RolloutConfig()).model_copy(
            update={"rollout_timeout_seconds": seconds, "max_response_tokens": 40}
        )
        probe = HostProbe(make, config, Path(folder), seconds, rollout_seconds)
        return await checked(probe, ROLLOUT_HOST_CHECKS)


def user(text: str) -> dict[str, Any]:
    """Returns a user message."""
    return {"role": "user", "content": text}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAY, ASK = ["say", "main", user("one")], ["ask", "main"]
FINE: dict[str, list[Any]] = {
    "one call": [SAY, ASK],
    "turns": [one for turn in range(4) for one in (["say", "main", user(f"turn {turn} ünï 🎲")], ASK)],
    "step rewards": [SAY, ASK, SAY, ASK, ["reward", 0, 0.5], ["reward", 1, -2.0]],
    "edited history": [SAY, ASK, SAY, ASK, ["keep", "main", 1], ["quote", "main", 1], ASK],
    "forks": [
        ["fork", "main", "a"], ["fork", "main", "b"], ["fork", "b", "c"], SAY, ["say", "a", user("a")],
        ["say", "b", user("b")], ["say", "c", user("c")], ["ask", "c", "a", "b"], ["quote", "main", 0], ASK,
    ],
    "branches": [
        SAY, ASK, ["say", "main", user("two")], ASK, ["branch", "main", "left", 0, "x"], ["say", "left", user("l")],
        ["branch", "main", "right", 1, None], ["say", "right", user("r")], ["stop", "right", ["e"]],
        ["ask", "left", "right"], ["say", "left", user("on")], ["ask", "left"], ["say", "main", user("on")], ASK,
    ],
    "tools": [["tools", "main", TOOLS], SAY, ASK, SAY, ASK, ["tools", "main", None], SAY, ASK],
    "limits": [["limit", "main", 2], SAY, ASK, ["limit", "main", None], SAY, ASK],
    "given up": [SAY, ["give_up", "main"], ASK],
    "caught": [["say", "main", {"content": "no role"}], ["try", "main"], ["keep", "main", 0], SAY, ASK],
}  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "error": [SAY, ASK, ["fail", "the reward is broken"]],
    "end": [SAY, ASK, ["end", "max_turns_exceeded", "enough"]],
    "timeout": [["time_out"]],
    "engine error": [["engine_error"]],
    "bad message": [["say", "main", {"content": "no role"}], ASK],
    "unknown instruction": [["no_such_instruction"]],
}


def task(name: str, do: Sequence[Any], **data: Any) -> Task:
    """Returns a task with instructions."""
    return Task(task_id=name, data={"do": list(do), "reward": 1.0, **data})


async def _opening(probe: HostProbe) -> str:
    for _ in range(2):
        host = probe.host()
        [episode] = await probe.play([task("one", [SAY, ASK])], host)
        if len(episode.metadata.get("where", {}).get("opened", ())) != 1:
            raise Violation(
                f"the workflow must be opened once before its rollouts; it ended as {comparable(episode)!r:.300}"
            )
        report = host.report()
        if not report.where:
            raise Violation("report() does not say where rollouts run")
    host = probe.host(workflow=Unopenable)
    try:
        async with probe.opened(host):
            raise Violation("open() returns, although open() of the workflow has raised an error")
    except Exception as error:  # any type
        if isinstance(error, Violation):
            raise
        if "the check has no server" not in str(error):
            raise Violation(
                f"the error of open() must say why the workflow cannot be opened, not {error!r:.300}"
            ) from None
    return report.where


async def _episodes(probe: HostProbe) -> str:
    values: list[Any] = [10**30, 0.1, None, "ünï\0🎲", {"": []}]
    tasks = [task(name, do, echo=values) for name, do in FINE.items()]
    return await _equal(probe, tasks)


async def _failures(probe: HostProbe) -> str:
    tasks = [task(name, do) for name, do in WRONG.items()]
    tasks.append(Task(task_id="no reward", data={"do": [SAY, ASK]}))
    return await _equal(probe, tasks)


async def _equal(probe: HostProbe, tasks: Sequence[Task]) -> str:
    inline, here = await probe.inline(tasks), await probe.play(tasks)
    for mine, other in zip(here, inline, strict=True):
        if different := difference(mine, other):
            raise Violation(f"the episode of task {mine.task_id!r} is another: {different}")
    return f"{len(tasks)} as in this process"


async def _cancellation(probe: HostProbe) -> str:
    host = probe.host(workers=1, rollouts_per_worker=1)
    async with probe.opened(host):
        began, ended = probe.folder / "began", probe.folder / "ended"
        engine = WatchedEngine()
        await _cancelled(probe, host, [["mark_end", str(began), str(ended)]], engine, began.exists)
        await probe.until(ended.exists, "a rollout that was cancelled")
        engine = WatchedEngine(needed=2)
        await _cancelled(probe, host, [SAY, ASK], engine, lambda: engine.asked == 1)
        await probe.until(lambda: engine.cancelled == 1, "the call of a rollout that was cancelled")
        engine = WatchedEngine()
        [episode] = await probe.rollouts(probe.runner(host, engine), [task("after", [SAY, ASK])])
        _check_done(episode, "after two that were cancelled")
    return "of a rollout that waits, and of one in a call"


async def _cancelled(probe: HostProbe, host: Any, do: list[Any], engine: WatchedEngine, is_waiting: Any) -> None:
    """Starts a rollout, waits until it is blocked, and cancels it."""

    async def run() -> None:
        async with host.place() as place:
            await place.run(task("cancelled", do), probe.completer(engine))

    running = asyncio.create_task(run())
    await probe.until(lambda: is_waiting() or running.done(), "the start of a rollout")
    running.cancel()
    await asyncio.wait([running], timeout=probe.seconds)
    if not running.done():
        raise Violation(f"run() did not end within {probe.seconds:g} s after its cancellation")
    if not running.cancelled():
        raise Violation(f"run() of a cancelled rollout must raise CancelledError, not {running.exception()!r:.200}")


async def _capacity(probe: HostProbe) -> str:
    host = probe.host(workers=1, rollouts_per_worker=2)
    capacity = host.capacity
    if capacity is None:
        raise NotApplicable("capacity is None: only rollout.max_concurrent_rollouts limits it")
    async with probe.opened(host), AsyncExitStack() as others:
        async with host.place():
            for _ in range(capacity - 1):
                await probe.soon(others.enter_async_context(host.place()), f"one of {capacity} free places")

            async def wait() -> Any:
                place = host.place()
                await place.__aenter__()
                return place

            gives_up, waits = asyncio.create_task(wait()), asyncio.create_task(wait())
            await asyncio.wait([gives_up, waits], timeout=LONGER_THAN_NOTHING_SECONDS)
            if gives_up.done() or waits.done():
                raise Violation(f"capacity is {capacity}, but place() did not wait when {capacity} places were held")
            gives_up.cancel()
            await asyncio.wait([gives_up])
        place = await probe.soon(waits, "place(), when one was free again,")
        await place.__aexit__(None, None, None)
    return f"{capacity} with one worker"


async def _concurrency(probe: HostProbe) -> str:
    host = probe.host()
    number = min(MANY, host.capacity or MANY)
    tasks = [task(f"task-{n}", [["say", "main", user(f"task {n}")], ASK, SAY, ASK], echo=n) for n in range(number)]
    engine = WatchedEngine(needed=number)
    try:
        here = await probe.play(tasks, host, engine=engine)
    except Violation as error:
        raise Violation(f"{number} rollouts must run at once, but {engine.asked} called the model: {error}") from None
    for mine, other in zip(here, await probe.inline(tasks), strict=True):
        if different := difference(mine, other):
            raise Violation(f"the episode of task {mine.task_id!r} is another among {number}: {different}")
    return f"{number} at once"


async def _settled(probe: HostProbe) -> str:
    tasks = [
        task(f"task-{n}", [["say", "main", user(f"task {n % 3}")], ["compute", n * COMPUTING_SECONDS], ASK, ASK])
        for n in range(4)
    ]
    inline, here = WatchedEngine(), WatchedEngine()
    await probe.inline(tasks, engine=inline, lockstep=True)
    await probe.play(tasks, engine=here, lockstep=True)
    batches, expected = [[sorted(batch) for batch in engine.batches] for engine in (here, inline)]
    if batches != expected:
        raise Violation(
            "is_settled must be False while a rollout computes: with a deterministic engine, the sizes of batches are "
            f"{[len(batch) for batch in batches]}, but inline {[len(batch) for batch in expected]}"
        )
    return f"{len(batches)} batches, as in this process"


async def _elsewhere(probe: HostProbe) -> str:
    host = probe.host()
    [episode] = await probe.play([task("one", [SAY, ASK])], host)
    where = episode.metadata.get("where", {})
    is_here = (where.get("host"), where.get("pid")) == (socket.gethostname(), os.getpid())
    if host.runs_elsewhere == is_here:
        found = "in this process" if is_here else f"in {where}"
        raise Violation(f"runs_elsewhere is {host.runs_elsewhere}, but a rollout ran {found}")
    return "in this process" if is_here else "outside of this process"


async def _lost_workers(probe: HostProbe) -> str:
    limits: dict[str, Any] = {"workers": 2, "rollouts_per_worker": 1, "max_attempts": 3}
    host = probe.host(**limits)
    if not host.runs_elsewhere:
        raise NotApplicable("runs_elsewhere is False: rollouts may damage this process")
    fine = [task(f"fine-{n}", [SAY, ASK]) for n in range(3)]
    async with probe.opened(host):
        exits = task("exits", [SAY, ASK, ["exit"]])
        first, *others = await probe.rollouts(probe.runner(host, WatchedEngine()), [exits, *fine])
        if first.termination_reason.value != "worker_lost":
            raise Violation(f"a rollout that ends its process must end as 'worker_lost', not {_how(first)}")
        for episode in [*others, *await probe.rollouts(probe.runner(host, WatchedEngine()), fine)]:
            _check_done(episode, "beside or after one that ends its process")
        if not host.report().lost_rollouts:
            raise Violation("report() has no lost rollouts after one that ended its process")
    host = probe.host(**{**limits, "max_attempts": 1, "rollout_timeout_seconds": probe.rollout_seconds})
    async with probe.opened(host):
        blocks, other = await probe.rollouts(
            probe.runner(host, WatchedEngine()), [task("blocks", [SAY, ASK, ["block"]]), fine[0]]
        )
        if blocks.termination_reason.value not in ("timeout", "worker_lost"):
            raise Violation(f"a rollout that blocks must end as 'timeout' at its deadline, not {_how(blocks)}")
        _check_done(other, "beside one that blocks")
        [after] = await probe.rollouts(probe.runner(host, WatchedEngine()), fine[:1])
        _check_done(after, "after one that blocks")
    return "by exit and by blocking; replaced"


def _check_done(episode: Episode, when: str) -> None:
    if episode.termination_reason.value != "done":
        raise Violation(f"a rollout {when} must end as 'done', not {_how(episode)}")


def _how(episode: Episode) -> str:
    return f"{episode.termination_reason.value!r} ({episode.error!r:.300})"


async def _ending(probe: HostProbe) -> str:
    before = asyncio.all_tasks()
    host = probe.host()
    pids = probe.folder / "children"
    try:
        starts = [["child", str(pids)]] if host.runs_elsewhere else []
        [episode] = await probe.play([task("one", [*starts, SAY, ASK])], host)
        where = episode.metadata.get("where", {})
        left = {task for task in asyncio.all_tasks() - before if not task.done()}
        if left:
            raise Violation(f"after close(), a task still runs: {next(iter(left))!r:.200}")
        if not host.runs_elsewhere or where.get("host") != socket.gethostname():
            return "no task"
        children = [int(pid) for pid in pids.read_text(encoding="utf-8").split()]
        for what, number in (("its process", where["pid"]), ("a process that it started", children[0])):
            await probe.until(lambda number=number: not _is_running(number), f"after close(), {what}")  # type: ignore[misc]
    finally:
        for pid in pids.read_text(encoding="utf-8").split() if pids.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    return "no task and no process"


def _is_running(pid: int) -> bool:
    """Whether a process is running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


ROLLOUT_HOST_CHECKS: dict[str, Check[HostProbe]] = {
    "opening": _opening,
    "episodes": _episodes,
    "failures": _failures,
    "cancellation": _cancellation,
    "capacity": _capacity,
    "concurrency": _concurrency,
    "settled": _settled,
    "elsewhere": _elsewhere,
    "lost workers": _lost_workers,
    "ending": _ending,
}
