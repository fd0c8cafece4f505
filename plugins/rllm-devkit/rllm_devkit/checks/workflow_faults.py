"""Checks of `check_workflow` with bad answers, failing engines and cancellations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from rllm_core.engine import EngineError, Terminated
from rllm_core.types import Episode, Task, TerminationReason
from rllm_devkit.checks.answers import hostile, nonsensical_calls
from rllm_devkit.checks.results import Check, NotApplicable, Violation
from rllm_devkit.checks.watch import check_released, held
from rllm_devkit.checks.workflow_probe import (
    LATEST_GIVING_UP_SECONDS,
    ProbedRollout,
    ProbedTurn,
    Said,
    WorkflowProbe,
    described,
    together,
)

AT_A_TIME = 8
REPEATED = 3
# Cancel a running rollout after this many turns of the event loop.
CANCELLED_AFTER = (1, 4, 16)


async def _cut_off(probe: WorkflowProbe) -> str:
    _needs_a_model(probe)
    reasons: Counter[str] = Counter()

    async def cut(turn: ProbedTurn) -> Said:
        return Said((await probe.fitting(turn)).text, is_cut_off=True)

    async def cut_to_nothing(turn: ProbedTurn) -> Said:
        return Said("", is_cut_off=True)

    for task in probe.tasks():
        for policy in (cut, cut_to_nothing):
            episode = _answered(await probe.play(task, policy), "a truncated answer")
            if episode is None:
                continue
            if episode.termination_reason is TerminationReason.DONE:
                raise Violation(
                    f"task {task.task_id!r}: every answer was truncated (finish_reason is 'length'), but "
                    "termination_reason is 'done' instead of 'max_response_tokens_exceeded'"
                )
            reasons[episode.termination_reason.value] += 1
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


async def _hostile(probe: WorkflowProbe) -> str:
    _needs_a_model(probe)
    count = await _said(probe, list(hostile()))
    return f"{count} rollouts; the event loop was blocked for max {probe.watch.since():.2g} s"


async def _tools(probe: WorkflowProbe) -> str:
    offered = next((rollout.tools for rollout, _ in probe.played if rollout.tools), None)
    if offered is None:
        raise NotApplicable("it offers no tools")
    for tool in offered:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function["name"], str):
            raise Violation(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, got {tool!r:.100}')
    for rollout, _ in probe.played:
        _check_replies(rollout)
    count = await _said(probe, list(nonsensical_calls(offered)))
    return f"{len(offered)} tools, {count} rollouts with invalid calls"


def _check_replies(rollout: ProbedRollout) -> None:
    """Checks that each tool call has a reply with its id before the next model call, as chat templates require."""
    for prompt in rollout.prompts:
        open_calls: set[str] = set()
        for message in prompt:
            if message["role"] == "tool":
                if message.get("tool_call_id") not in open_calls:
                    raise Violation(
                        f"a tool message matches no call: tool_call_id is {message.get('tool_call_id')!r:.80}"
                    )
                open_calls.discard(message["tool_call_id"])
            elif open_calls:
                break
            open_calls |= {call["id"] for call in message.get("tool_calls") or ()}
        if open_calls:
            raise Violation(f"the model is called again, but its tool call {min(open_calls)!r} has no tool message")


async def _said(probe: WorkflowProbe, texts: list[str]) -> int:
    """Answers with each text, first and after a plausible answer; returns the number of rollouts."""
    tasks = probe.tasks()
    probe.watch.since()

    async def one(number: int, text: str, first: int) -> None:
        async def policy(turn: ProbedTurn) -> Said:
            return await probe.fitting(turn) if turn.number < first else Said(text)

        rollout = await probe.play(tasks[number % len(tasks)], policy, seed=number)
        shown = f"{text[:60]!r}" + (f"... ({len(text)} characters)" if len(text) > 60 else "")
        episode = _answered(rollout, f"the answer {shown}")
        if episode is not None:
            probe.check_rewards(episode)

    waiting = [(number, text, first) for number, text in enumerate(texts) for first in (0, 1)]
    for begin in range(0, len(waiting), AT_A_TIME):
        await together(one(*which) for which in waiting[begin : begin + AT_A_TIME])
    return len(waiting)


def _answered(rollout: ProbedRollout, what: str) -> Episode | None:
    """Returns the episode of a rollout with a bad answer; None if it ended early without a failure."""
    error = rollout.error
    if isinstance(error, Terminated) and not error.reason.is_failure:
        return None
    if error is not None:
        raise Violation(f"{what} made run() raise {described(error)}") from error
    try:
        return rollout.episode()
    except Violation as problem:
        raise Violation(f"{what}: {problem}") from problem


def _needs_a_model(probe: WorkflowProbe) -> None:
    if not probe.played:
        raise NotApplicable("no rollout could be run")
    if not probe.workflow.samples:
        raise NotApplicable("samples is False")


# --------------------------------------------------------------------------------------------------------------------
# Failing engines and cancellations


async def _engine_errors(probe: WorkflowProbe) -> str:
    _needs_a_model(probe)
    passed = 0
    for task in probe.tasks():
        for first in (0, 1, 2):
            passed += await _passed_on(probe, task, first, lambda: EngineError("no completion available"))
            passed += await _passed_on(probe, task, first, lambda: RuntimeError("a bug in the engine"))
            passed += await _passed_on(
                probe, task, first, lambda: Terminated(TerminationReason.MAX_PROMPT_TOKENS, "the prompt is too long")
            )
    return f"{passed} passed on"


async def _passed_on(probe: WorkflowProbe, task: Task, first: int, make: Callable[[], Exception]) -> bool:
    raised: list[Exception] = []

    async def policy(turn: ProbedTurn) -> Said:
        if turn.number < first:
            return await probe.fitting(turn)
        raised.append(make())
        raise raised[-1]

    rollout = await probe.play(task, policy)
    if not raised:
        return False  # the rollout ended earlier
    [expected, *_] = raised
    what = f"task {task.task_id!r}: the completer raised {type(expected).__name__}"
    if rollout.error is not None:
        if type(rollout.error) is not type(expected):
            raise Violation(f"{what}, but run() raised {described(rollout.error)} instead") from rollout.error
        return True
    found = rollout.returned
    reason = found.termination_reason if isinstance(found, Episode) else None
    if reason is None or not (reason.is_failure or (isinstance(expected, Terminated) and reason is expected.reason)):
        ended = f"an episode that ended as {reason.value!r}" if reason is not None else f"{found!r:.80}"
        raise Violation(f"{what}, but run() returned {ended}: let errors propagate, they are not rewards")
    return True


async def _cancellation(probe: WorkflowProbe) -> str:
    _needs_a_model(probe)
    cancelled = 0
    for task in probe.tasks():
        for hung in (0, 1, 2):
            cancelled += await _cancelled(probe, task, hung=hung)
        for turns in CANCELLED_AFTER:
            cancelled += await _cancelled(probe, task, turns=turns)
    return f"{cancelled} rollouts"


async def _cancelled(probe: WorkflowProbe, task: Task, *, hung: int | None = None, turns: int | None = None) -> bool:
    """Cancels a rollout during its model call number ``hung``, or after some turns of the event loop.

    Returns:
        Whether the rollout was still running.
    """
    waiting = asyncio.Event()

    async def policy(turn: ProbedTurn) -> Said:
        if turn.number == hung:
            waiting.set()
            await asyncio.Event().wait()
        return await probe.fitting(turn)

    running = probe.start(task, policy)
    try:
        if turns is None:
            reached = asyncio.create_task(waiting.wait())
            await asyncio.wait(
                {running, reached}, timeout=probe.rollout_timeout_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            reached.cancel()
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if running.done():
            return False
        running.cancel()
        await asyncio.wait({running}, timeout=LATEST_GIVING_UP_SECONDS)
        if not running.done():
            raise Violation(f"a cancelled rollout still runs after {LATEST_GIVING_UP_SECONDS:g} s")
    finally:
        running.cancel()
    if running.cancelled():
        return True
    rollout = running.result()
    if rollout.error is not None:
        raise Violation(
            f"a cancelled rollout raised {described(rollout.error)} instead of CancelledError"
        ) from rollout.error
    if waiting.is_set():  # otherwise it may have ended just before
        raise Violation(f"a cancelled rollout returned {rollout.returned!r:.80}: let CancelledError propagate")
    return True


async def _leftovers(probe: WorkflowProbe) -> str:
    if not probe.played:
        raise NotApplicable("no rollout could be run")
    await _leaves_nothing(lambda task: probe.play(task), probe, "a rollout")
    if probe.workflow.samples:
        await _leaves_nothing(lambda task: _cancelled(probe, task, hung=0), probe, "a cancelled rollout")
        await _leaves_nothing(lambda task: _cancelled(probe, task, turns=4), probe, "a cancelled rollout")
    kept = ", ".join(f"{count} {what}" for what, count in held().items())
    return f"counts stay at {kept}"


async def _leaves_nothing(play: Callable[[Task], Awaitable[object]], probe: WorkflowProbe, what: str) -> None:
    tasks = probe.tasks()
    for task in tasks:  # the first rollouts may open shared resources
        await play(task)
    before = held()
    for _ in range(REPEATED):
        for task in tasks:
            await play(task)
    await check_released(before, what)


async def _closing(probe: WorkflowProbe) -> str:
    await probe.make().close()  # as after a failed open()
    if not probe.held:
        raise NotApplicable("it could not be opened")
    before = probe.held
    await probe.close()
    await check_released(before, "a closed workflow")
    return "releases everything it opened"


FAULT_CHECKS: dict[str, Check[WorkflowProbe]] = {
    "cut-off answers": _cut_off,
    "hostile answers": _hostile,
    "tools": _tools,
    "engine errors": _engine_errors,
    "cancellation": _cancellation,
    "leftovers": _leftovers,
    "closing": _closing,
}
"""Checks by name; they run after those that fill `WorkflowProbe.played`."""
