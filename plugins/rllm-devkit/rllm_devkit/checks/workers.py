"""Conformance checks for workers in any language; see `check_worker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rllm_core.hosts import wire
from rllm_core.seeds import derive_seed
from rllm_devkit.checks.results import Check, CheckResult, Violation, checked
from rllm_devkit.checks.worker_pipes import Pipes, Played
from rllm_devkit.checks.worker_probe import ASK, SAY, WorkerProbe, tool, user, yes

REFERENCE = "rllm_devkit.reference:Reference"
NO_WORKFLOW = "rllm_no_such_package.module:Workflow"
BIG = 10**30
LONG_BYTES = 3 << 20
COMPUTING_SECONDS = 0.3


async def check_worker(
    command: Sequence[str], *, workflow: str = REFERENCE, seconds: float = 20.0
) -> list[CheckResult]:
    """Checks a worker against the worker protocol, by playing the run's side over its standard input and output.

    In a test: ``assert not [r for r in await check_worker(command) if r.outcome == "failed"]``.

    Args:
        command: Program and arguments that start the worker.
        workflow: Name under which the worker provides the reference workflow, which docs/worker-protocol.md defines.
        seconds: Timeout for each reaction of the worker.

    Returns:
        One result per check.
    """
    probe = WorkerProbe(tuple(command), wire.Open(wire.VERSION, workflow, {}, says_settled=True), seconds)
    try:
        return await checked(probe, WORKER_CHECKS)
    finally:
        await probe.end()


async def _ready(probe: WorkerProbe) -> str:
    async with probe.own() as pipes:
        ready = await pipes.next(wire.Ready)
    if ready.version != wire.VERSION:
        raise Violation(f"it speaks version {ready.version}; this kit checks version {wire.VERSION}")
    if not ready.program or ready.pid < 1:
        raise Violation(f"program and pid must say what runs, but are {ready.program!r} and {ready.pid}")
    return ready.program


async def _opening(probe: WorkerProbe) -> str:
    async with probe.own(probe.open) as pipes:
        return f"opened in process {pipes.process.pid}"


async def _refusals(probe: WorkerProbe) -> str:
    said = []
    for open in (replace(probe.open, workflow=NO_WORKFLOW), replace(probe.open, version=wire.VERSION + 1)):
        async with probe.own() as pipes:
            await pipes.next(wire.Ready)
            await pipes.send(open)
            broken = await pipes.next(wire.Broken)
        if not broken.message:
            raise Violation("Broken has no message")
        said.append(broken.message)
    return said[0]


async def _one_call(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ASK, reward=0.5)
        await rollout.turn([user("one")])
        seen = await rollout.ended()
        if seen.get("is_validation") or seen.get("seeds") != {"main": 7 * rollout.number}:
            raise Violation(f"the workflow saw {seen!r:.200}")
        rollout = await pipes.start(SAY, ASK, ["reward", 0, 2.5], fields={"is_validation": True})
        await rollout.turn([user("one")])
        seen = await rollout.ended({0: {"reward": 2.5}})
        if seen.get("is_validation") is not True:
            raise Violation("a rollout for validation does not know it")
    return "call, answer, episode"


async def _turns(probe: WorkerProbe) -> str:
    number = 5
    async with probe.opened() as pipes:
        instructions: list[Any] = []
        for turn in range(number):
            instructions += [["say", "main", user(f"turn {turn} ünï 🎲")], ASK]
        rollout = await pipes.start(*instructions, ["limit", "main", 5], ASK, reward=1.0)
        messages: list[Any] = []
        for turn in range(number):
            messages.append(user(f"turn {turn} ünï 🎲"))
            await rollout.turn(messages, f"answer {turn}")
            messages.append(yes(f"answer {turn}"))
        await rollout.turn(messages, "last", limit=5)
        await rollout.ended()
    return f"{number} turns, each sends what is new"


async def _edits(probe: WorkerProbe) -> str:
    first, other = user("one"), user("other")
    async with probe.opened() as pipes:
        rollout = await pipes.start(
            SAY, ASK, ["say", "main", other], ASK, ["keep", "main", 1], ["quote", "main", 1], ASK,
            ["keep", "main", 0], ["say", "main", other], ["quote", "main", 0], ASK, reward=1.0,
        )  # fmt: skip
        await rollout.turn([first], "a")
        await rollout.turn([first, yes("a"), other], "b")
        await rollout.answer(await rollout.call([first, yes("b")]), "c", kept=2)
        await rollout.turn([other, yes("a")], "d")
        await rollout.ended()
    return "kept messages and tokens of an edited history"


async def _forks(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(
            ["fork", "main", "a"], ["fork", "main", "b"], ["fork", "b", "c"], SAY,
            *(["say", name, user(name)] for name in "abc"), ["ask", "c", "a"], ["quote", "main", 0], ASK, ["ask", "b"],
            reward=1.0,
        )  # fmt: skip
        deep = await rollout.call([user("c")], path=[2, 1])
        first = await rollout.call([user("a")], path=[1])
        answers = [rollout.step(first, "A"), rollout.step(deep, "C")]
        await pipes.send(*answers)
        rollout.steps.reverse()
        rollout.tokens.reverse()
        await rollout.turn([user("one"), yes("C")], "M")
        await rollout.turn([user("b")], "B", path=[2])
        seen = await rollout.ended()
        main = 7 * rollout.number
        second = derive_seed(main, "fork", 2)
        seeds = {"main": main, "a": derive_seed(main, "fork", 1), "b": second, "c": derive_seed(second, "fork", 1)}
        if seen.get("seeds") != seeds:
            raise Violation(f"the seeds of the forks are {seen.get('seeds')}, but should be {seeds}")
    return "3 forks, two calls at once, answers out of order"


async def _branches(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(
            SAY, ASK, ["say", "main", user("two")], ASK, ["branch", "main", "left", 0, "x"], ["say", "left", user("l")],
            ["branch", "main", "right", 1, None], ["say", "right", user("r")], ["stop", "right", ["."]],
            ["ask", "left"], ["ask", "right"], ["branch", "left", "again", 0, "x"], ["branch", "left", "twice", 0, "x"],
            ["say", "twice", user("t")], ["ask", "twice"], ["say", "left", user("on")], ["ask", "left"], reward=1.0,
        )  # fmt: skip
        await rollout.turn([user("one")], "a")
        await rollout.turn([user("one"), yes("a"), user("two")], "b")
        first, second = rollout.steps
        left, right = wire.Fork("x", first), wire.Fork(1, second)
        await rollout.turn([user("one"), yes("a"), user("l")], "L", path=[left])
        both = [user("one"), yes("a"), user("two"), yes("b"), user("r")]
        await rollout.turn(both, "R", path=[right], stop_texts=["."])
        await rollout.turn([user("one"), yes("a"), user("t")], "T", path=[left, wire.Fork("x", first, 1)])
        await rollout.turn([user("one"), yes("a"), user("l"), yes("L"), user("on")], "on", path=[left])
        seeds = (await rollout.ended()).get("seeds", {})
        main = 7 * rollout.number
        named = derive_seed(main, "fork", "x")
        again = derive_seed(named, "fork", "x")
        expected = {"main": main, "left": named, "right": derive_seed(main, "fork", 1), "again": again, "twice": again}
        if seeds != expected:
            raise Violation(f"the seeds of the forks are {seeds}, but should be {expected}")
    return "forks after steps, with names and without; stop texts"


async def _tools(probe: WorkerProbe) -> str:
    add, give = [tool("add")], [tool("give"), tool("add")]
    async with probe.opened() as pipes:
        instructions = [["tools", "main", tools] for tools in (add, add, give, None, add)]
        rollout = await pipes.start(SAY, *(one for tools in instructions for one in (tools, ASK)), reward=1.0)
        messages = [user("one")]
        for tools in (add, add, give, None, add):
            await rollout.turn(messages, tools=tools)
            messages.append(yes())
        await rollout.ended()
    return "sent when they change"


async def _failed_calls(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        kinds = ("engine_error", "refused_conversation", "configuration", "rollout_ended", "value", "type", "other")
        for kind in kinds:
            rollout = await pipes.start(SAY, ASK)
            call = await rollout.call([user("one")])
            await pipes.send(wire.CallFailed(rollout.number, call.call, kind, f"no {kind}"))
            await _fails_by_call(pipes, rollout, call)
        for kind, reason in (("terminated", "max_prompt_tokens_exceeded"), ("segment_break", "prefix_mismatch")):
            rollout = await pipes.start(SAY, ASK)
            call = await rollout.call([user("one")])
            await pipes.send(wire.CallFailed(rollout.number, call.call, kind, "too long", reason))
            await _fails_by_call(pipes, rollout, call)
        add = [tool("add")]
        rollout = await pipes.start(
            SAY, ["tools", "main", add], ASK, ["say", "main", user("two")], ["tools", "main", None], ["try", "main"],
            ["try", "main"], ["tools", "main", add], ASK, reward=1.0,
        )  # fmt: skip
        await rollout.turn([user("one")], tools=add)
        messages = [user("one"), yes(), user("two")]
        for _ in range(2):
            call = await rollout.call(messages)
            await pipes.send(wire.CallFailed(rollout.number, call.call, "engine_error", "503 overloaded"))
        await rollout.turn(messages, tools=add)
        seen = await rollout.ended()
        if not any("503 overloaded" in str(one) for one in seen.get("caught", [])):
            raise Violation(f"the workflow caught {seen.get('caught')!r:.200}, not '503 overloaded'")
    return f"{len(kinds) + 2} kinds, raised in the workflow, which can catch them"


async def _fails_by_call(pipes: Pipes, rollout: Played, call: wire.ModelCall) -> None:
    failed = await pipes.next(wire.Failed, rollout.number)
    if failed.call != call.call:
        raise Violation(f"the rollout failed by call {call.call}, but Failed has call {failed.call}")


async def _failures(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ASK, ["fail", "the reward is broken"])
        await rollout.turn([user("one")])
        await rollout.failed("error", "the reward is broken")
        rollout = await pipes.start(["end", "max_turns_exceeded", "enough"])
        await rollout.failed("max_turns_exceeded", "enough")
    return "errors and termination reasons"


async def _given_up(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ["give_up", "main"], ["say", "main", user("two")], ASK, reward=1.0)
        given_up = await rollout.call([user("one")])
        said = await pipes.next(wire.GiveUp, rollout.number)
        if said.call != given_up.call:
            raise Violation(f"call {given_up.call} was given up, but GiveUp has call {said.call}")
        call = await rollout.call([user("one"), user("two")])
        late = wire.SampledStep("late", yes("late"), 0, b"", b"", None, "stop", 0)
        await pipes.send(wire.CallAnswered(rollout.number, given_up.call, late), rollout.step(call, "yes"))
        await rollout.ended()
    return "a late answer is ignored"


async def _cancellation(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        for waits in (["wait"], ASK):
            other = await pipes.start(SAY, ASK, reward=1.0)
            rollout = await pipes.start(SAY, ASK, waits)
            await rollout.turn([user("one")])
            if waits is ASK:
                await rollout.call([user("one"), yes()])
            await pipes.send(wire.Cancel(rollout.number))
            said: list[Any] = []
            while not any(isinstance(message, wire.Failed | wire.Ended) for message in said):
                said.append(await pipes.next(object, rollout.number))
            kinds = [type(message) for message in said if not isinstance(message, wire.GiveUp)]
            if kinds != [wire.Cancelling, wire.Failed] or said[-1].reason != "cancelled":
                raise Violation(
                    f"a cancelled rollout must say Cancelling, then Failed as 'cancelled'; it said {said!r:.300}"
                )
            await other.turn([user("one")])
            await other.ended()
            await pipes.send(wire.Cancel(rollout.number))
        rollout = await pipes.start(SAY, ASK, reward=1.0)
        await rollout.turn([user("one")])
        await rollout.ended()
    return "of one that waits, of a call, and of one that has ended; others continue"


async def _two_at_once(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        both = [await pipes.start(SAY, ASK, ["say", "main", user(name)], ASK, reward=1.0) for name in "ab"]
        calls = [await rollout.call([user("one")]) for rollout in both]
        await pipes.send(both[1].step(calls[1], "B"), both[0].step(calls[0], "A"))
        await both[1].turn([user("one"), yes("B"), user("b")])
        await both[1].ended()
        await both[0].turn([user("one"), yes("A"), user("a")])
        await both[0].ended()
    return "two rollouts, each with its own answers"


async def _settled(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(
            ["compute", COMPUTING_SECONDS], SAY, ASK, ["compute", COMPUTING_SECONDS], reward=1.0
        )
        before = len(pipes.log)
        call = await rollout.call([user("one")])
        _check_order(pipes, before, wire.ModelCall)
        await pipes.settled()
        before = len(pipes.log)
        await rollout.answer(call, "yes")
        await rollout.ended()
        _check_order(pipes, before, wire.Ended)
        await pipes.settled()
    async with probe.own(replace(probe.open, says_settled=False)) as pipes:
        rollout = await pipes.start(SAY, ASK, reward=1.0)
        await rollout.turn([user("one")])
        await rollout.ended()
        if any(isinstance(message, wire.Settled) for message in pipes.log):
            raise Violation("it says Settled although says_settled is False")
    return "after it has computed, and if the run asks for it"


def _check_order(pipes: Pipes, start: int, kind: type[Any]) -> None:
    """Checks that the worker did not report itself idle before it sent a message of ``kind``."""
    said = pipes.log[start:]
    at = next(number for number, message in enumerate(said) if isinstance(message, kind))
    if any(isinstance(message, wire.Settled) and message.frames == pipes.frames_sent for message in said[:at]):
        raise Violation(f"it says Settled while a rollout computes, before its {kind.__name__}")


async def _data(probe: WorkerProbe) -> str:
    values: list[Any] = [BIG, -BIG, 2**64 - 1, -(2**63), 0.1, True, None, "ünï\0🎲", {"": [[], {}]}]
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ASK, reward=1.0, echo=values)
        await rollout.turn([user("one")])
        await rollout.ended()
    return "JSON, with integers of any size"


async def _unknown_fields(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ASK, reward=1.0, fields={"news": {"of": ["a later run"]}})
        answer = msgspec.to_builtins(rollout.step(await rollout.call([user("one")]), "yes"), builtin_types=(bytes,))
        answer["news"] = answer["step"]["news"] = 1
        await pipes.send(answer)
        await rollout.ended()
    return "ignored"


async def _frames(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(SAY, ASK, SAY, ASK, reward=1.0, echo="x" * LONG_BYTES)
        call = await rollout.call([user("one")])
        data = wire.frame(wire.encoded([rollout.step(call, "yes")]))
        for at in range(len(data)):
            await pipes.write(data[at : at + 1], frames=int(at == len(data) - 1))
        call = await rollout.call([user("one"), yes(), user("one")])
        both = [wire.frame(wire.encoded([one])) for one in (wire.Cancel(999_999), rollout.step(call, "yes"))]
        await pipes.write(b"".join(both), frames=2)
        await rollout.ended()
        await pipes.settled()
    return f"in parts, several at once, and one of {LONG_BYTES >> 20} MiB"


async def _output(probe: WorkerProbe) -> str:
    async with probe.opened() as pipes:
        rollout = await pipes.start(["print", "x" * 4096], SAY, ASK, ["print", "y"], reward=1.0)
        await rollout.turn([user("one")])
        await rollout.ended()
    return "the output of a workflow is not read as frames"


async def _closing(probe: WorkerProbe) -> str:
    async with probe.own(probe.open) as pipes:
        rollout = await pipes.start(SAY, ASK)
        await rollout.call([user("one")])
        await pipes.send(wire.Close())
        await pipes.next(wire.Closed)
        code = await pipes.exits()
    if code:
        raise Violation(f"it exited with {code} after Close")
    return "Closed, and exit code 0"


async def _end_of_input(probe: WorkerProbe) -> str:
    async with probe.own(probe.open) as pipes:
        rollout = await pipes.start(SAY, ASK, ["wait"])
        await rollout.turn([user("one")])
        assert pipes.process.stdin is not None
        pipes.process.stdin.close()
        await pipes.exits()
    return "exits, although a rollout waits"


WORKER_CHECKS: dict[str, Check[WorkerProbe]] = {
    "ready": _ready,
    "opening": _opening,
    "refusals": _refusals,
    "one call": _one_call,
    "turns": _turns,
    "edits": _edits,
    "forks": _forks,
    "branches": _branches,
    "tools": _tools,
    "failed calls": _failed_calls,
    "failures": _failures,
    "given up": _given_up,
    "cancellation": _cancellation,
    "two at once": _two_at_once,
    "settled": _settled,
    "data": _data,
    "unknown fields": _unknown_fields,
    "frames": _frames,
    "output": _output,
    "closing": _closing,
    "end of input": _end_of_input,
}
