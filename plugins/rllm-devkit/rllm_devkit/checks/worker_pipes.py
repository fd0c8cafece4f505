"""The run's side of the worker protocol, over the pipes of a process; `check_worker` uses it."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UnsetType

from rllm_core.hosts import wire
from rllm_devkit.checks.results import Violation

MessageT = TypeVar("MessageT")
TOKENS_PER_PART = 3


class Pipes:
    """A worker under test.

    Args:
        process: Process of the worker.
        seconds: Maximum time for each of its reactions.

    Attributes:
        log: All messages from the worker, in order.
        frames_sent: Number of frames sent to the worker.
        frames_read: Number of frames read from the worker.
    """

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self.process = process
        self.seconds = seconds
        self.log: list[Any] = []
        self.frames_sent = 0
        self.frames_read = 0
        self._queues: dict[int | None, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._stderr = b""
        self._rollouts = 0
        self._settled = asyncio.Condition()
        self._reading = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    async def send(self, *messages: Any) -> None:
        """Sends messages as one frame; a dictionary is sent unchanged."""
        await self.write(wire.frame(wire.encoded(list(messages))))

    async def write(self, data: bytes, *, frames: int = 1) -> None:
        """Writes bytes to the worker's standard input; they complete a number of frames."""
        self.frames_sent += frames
        assert self.process.stdin is not None
        with suppress(ConnectionError):  # the worker's last messages explain more than this error
            self.process.stdin.write(data)
            await self.process.stdin.drain()

    async def next(self, kind: type[MessageT], rollout: int | None = None) -> MessageT:
        """Returns the worker's next message (of a rollout, if given), which must be of the given kind.

        Raises:
            Broken: If the message is of another kind, or there is none.
        """
        wanted = f"a {kind.__name__}" + (f" for rollout {rollout}" if rollout is not None else "")
        try:
            message = await asyncio.wait_for(self._queues[rollout].get(), self.seconds)
        except TimeoutError:
            raise Violation(f"{wanted} did not come within {self.seconds:g} s{self.errors()}") from None
        if isinstance(message, Exception):
            raise Violation(f"instead of {wanted}, {message}{self.errors()}")
        if not isinstance(message, kind):
            raise Violation(f"instead of {wanted}, it said {_shown(message)}")
        return message

    @property
    def rollouts(self) -> range:
        """Numbers of the rollouts started so far."""
        return range(1, self._rollouts + 1)

    def rest(self, rollout: int | None = None) -> list[Any]:
        """Returns the messages that no check has asked for."""
        queue = self._queues[rollout]
        return [queue.get_nowait() for _ in range(queue.qsize())]

    async def settled(self) -> None:
        """Waits until the worker reports that it is idle, after everything it was sent."""

        def is_settled() -> bool:
            said = [message for message in self.log if isinstance(message, wire.Settled)]
            return bool(said) and said[-1].frames == self.frames_sent

        try:
            async with self._settled:
                await asyncio.wait_for(self._settled.wait_for(is_settled), self.seconds)
        except TimeoutError:
            said = [message.frames for message in self.log if isinstance(message, wire.Settled)]
            raise Violation(
                f"it got {self.frames_sent} frames and has nothing to do, but no Settled with that number came within "
                f"{self.seconds:g} s; the last had {said[-1] if said else 'none'}"
            ) from None

    async def opened(self, open: wire.Open) -> None:
        """Opens the workflow as a run does: without waiting for the worker's first message."""
        await self.send(open)
        await self.next(wire.Ready)
        await self.next(wire.Opened)

    async def start(self, *do: Any, fields: dict[str, Any] | None = None, **data: Any) -> Played:
        """Starts a rollout of the reference workflow.

        Args:
            do: Instructions for the workflow.
            fields: Other fields of the message.
            data: Other data of the task.
        """
        self._rollouts += 1
        number = self._rollouts
        start = {
            "type": "start", "rollout": number, "name": f"0-{number}", "task_id": f"task-{number}", "seed": 7 * number,
            "data": {"do": list(do), **data}, "sampling": {"max_response_tokens": 40}, **(fields or {}),
        }  # fmt: skip
        await self.send(start)
        return Played(self, number, start)

    async def exits(self) -> int:
        """Waits for the worker to exit, and returns its exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), self.seconds)
        except TimeoutError:
            raise Violation(f"it did not exit within {self.seconds:g} s") from None

    def errors(self) -> str:
        """Returns the last line that the worker wrote to standard error, for messages."""
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return f"; the last line of its standard error is {lines[-1]!r}" if lines else ""

    async def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        try:
            while True:
                (length,) = struct.unpack(">I", await stdout.readexactly(4))
                if length > wire.MAX_FRAME_BYTES:
                    raise ValueError(f"a frame begins that is said to have {length:,} bytes")
                messages = wire.decode_from_worker(await stdout.readexactly(length))
                self.frames_read += 1
                for message in messages:
                    await self._received(message)
        except asyncio.IncompleteReadError as error:
            left = f" in the middle of a frame, after {error.partial[-40:]!r}" if error.partial else ""
            self._end(EOFError(f"its output ended{left}"))
        except (msgspec.DecodeError, ValueError) as error:
            self._end(ValueError(f"its output is not the protocol: {error}"))

    async def _received(self, message: Any) -> None:
        self.log.append(message)
        if isinstance(message, wire.Settled):
            async with self._settled:
                self._settled.notify_all()
        else:
            self._queues[getattr(message, "rollout", None)].put_nowait(message)

    def _end(self, error: Exception) -> None:
        for number in [None, *self.rollouts]:
            self._queues[number].put_nowait(error)

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(1 << 16):
            self._stderr = (self._stderr + data)[-4096:]

    async def end(self) -> None:
        """Kills the worker if it still runs."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await asyncio.gather(*self._reading)


@asynccontextmanager
async def started(command: Sequence[str], seconds: float) -> AsyncIterator[Pipes]:
    """Starts a worker, and kills it on exit."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise Violation(f"{command[0]} cannot be started: {error.strerror}") from error
    pipes = Pipes(process, seconds)
    try:
        yield pipes
    finally:
        await pipes.end()


class _Talk:
    """The run's record of one conversation."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.tools: list[Any] | None = None
        self.was_answered = True
        self.tokens: list[int] = []
        self.segment = 0


class Played:
    """A started rollout of the reference workflow.

    Attributes:
        number: Number of the rollout.
        steps: Ids of its steps, in answer order.
        tokens: Prompt and completion of each step.
    """

    def __init__(self, pipes: Pipes, number: int, start: dict[str, Any]) -> None:
        self.number = number
        self.steps: list[str] = []
        self.tokens: list[list[list[int]]] = []
        self._pipes = pipes
        self._start = start
        self._talks: dict[tuple[int | wire.Fork, ...], _Talk] = defaultdict(_Talk)
        self._responses: dict[str, Any] = {}
        self._after: dict[str, tuple[list[Any], list[int]]] = {}
        self._calls: set[int] = set()

    async def call(
        self,
        messages: Sequence[Any],
        *,
        path: Sequence[int | wire.Fork] = (),
        tools: Any = None,
        limit: int | None = None,
        stop_texts: Sequence[str] = (),
    ) -> wire.ModelCall:
        """Receives the rollout's next call, and checks its messages and tools.

        Raises:
            Broken: If they differ, or the call repeats data that the run already has.
        """
        call = await self._pipes.next(wire.ModelCall, self.number)
        if call.call in self._calls:
            raise Violation(f"two calls of a rollout have the number {call.call}")
        self._calls.add(call.call)
        if call.conversation != list(path):
            raise Violation(f"a call of conversation {list(path)} has the path {call.conversation}")
        talk = self._talk(tuple(path))
        if not 0 <= call.kept <= len(talk.said):
            raise Violation(f"a call keeps {call.kept} messages of a conversation with {len(talk.said)}")
        unknown = [one for one in call.messages if isinstance(one, str) and one not in self._responses]
        if unknown:
            raise Violation(f"a call names step {unknown[0]!r}, which the rollout does not have")
        said = [self._responses[one] if isinstance(one, str) else one for one in call.messages]
        if talk.said[: call.kept] + said != list(messages):
            raise Violation(
                f"a call says {(talk.said[: call.kept] + said)!r:.200} (it keeps {call.kept} of {len(talk.said)} "
                f"messages), but the workflow said {list(messages)!r:.200}"
            )
        most = next((at for at, pair in enumerate(zip(talk.said, messages, strict=False)) if pair[0] != pair[1]), None)
        most = min(len(talk.said), len(messages)) if most is None else most
        if call.kept != most:
            raise Violation(f"a call keeps {call.kept} messages, but the run has {most} of them; send only what is new")
        self._check_tools(talk, call, tools)
        if call.max_response_tokens != limit:
            raise Violation(f"a call has max_response_tokens {call.max_response_tokens}, not {limit}")
        if call.stop_texts != list(stop_texts):
            raise Violation(f"a call has stop_texts {call.stop_texts}, not {list(stop_texts)}")
        talk.was_answered = False
        return call

    def _talk(self, path: tuple[int | wire.Fork, ...]) -> _Talk:
        if path not in self._talks and path and isinstance(path[-1], wire.Fork) and path[-1].after:
            said, tokens = self._after[path[-1].after]
            self._talks[path].said, self._talks[path].tokens = [*said], [*tokens]
        return self._talks[path]

    @staticmethod
    def _check_tools(talk: _Talk, call: wire.ModelCall, tools: Any) -> None:
        if isinstance(call.tools, UnsetType):
            if not talk.was_answered:
                raise Violation("a call leaves out its tools after one that was not answered; send them again")
        else:
            if call.tools and call.tools == talk.tools and talk.was_answered:
                raise Violation("a call repeats the tools of the last one; leave them out while they are the same")
            talk.tools = call.tools
        if (talk.tools or None) != tools:
            raise Violation(f"a call offers the tools {talk.tools}, but the workflow offers {tools}")

    def step(self, call: wire.ModelCall, text: str, *, kept: int | None = None) -> wire.CallAnswered:
        """Returns the answer to a call.

        Args:
            call: The call.
            text: Content of the assistant message.
            kept: How many tokens of the conversation the prompt keeps. Defaults to all, if the call keeps all messages.
        """
        talk = self._talks[tuple(call.conversation)]
        goes_on = call.kept == len(talk.said)
        kept = (len(talk.tokens) if goes_on else 0) if kept is None else kept
        first = 1000 * self.number + 10 * call.call
        prompt = list(range(first, first + TOKENS_PER_PART))
        completion = [token + 5 for token in prompt]
        self.tokens.append([talk.tokens[:kept] + prompt, completion])
        talk.tokens = [*talk.tokens[:kept], *prompt, *completion]
        talk.segment += not goes_on
        step = f"step-{self.number}-{call.call}"
        response = {"role": "assistant", "content": text}
        said = [self._responses[one] if isinstance(one, str) else one for one in call.messages]
        talk.said = [*talk.said[: call.kept], *said, response]
        talk.was_answered = True
        self.steps.append(step)
        self._responses[step] = response
        self._after[step] = talk.said, talk.tokens
        return wire.CallAnswered(
            self.number, call.call,
            wire.SampledStep(
                step, response, kept, _bytes(prompt, "<i4"), _bytes(completion, "<i4"),
                _bytes([-0.5] * TOKENS_PER_PART, "<f4"), "stop", 0, segment=talk.segment,
            ),
        )  # fmt: skip

    async def answer(self, call: wire.ModelCall, text: str, *, kept: int | None = None) -> None:
        """Answers a call."""
        await self._pipes.send(self.step(call, text, kept=kept))

    async def turn(self, messages: Sequence[Any], text: str = "yes", **expected: Any) -> None:
        """Receives a call, checks its messages, and answers it."""
        await self.answer(await self.call(messages, **expected), text)

    async def ended(self, changes: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
        """Receives the rollout's end, checks the episode, and returns what the workflow has observed.

        Args:
            changes: Changed fields of steps, by step number.
        """
        ended = await self._pipes.next(wire.Ended, self.number)
        if ended.returned:
            raise Violation(f"the workflow returned an episode, but the worker says {ended.returned!r}")
        [trajectory] = ended.trajectories if len(ended.trajectories) == 1 else [None]
        if not isinstance(trajectory, wire.ReturnedTrajectory):
            raise Violation(f"the episode has one trajectory, but the worker says {ended.trajectories!r:.200}")
        steps = [(one.step, one.changes) if isinstance(one, wire.ReturnedStep) else one for one in trajectory.steps]
        expected = [(step, (changes or {}).get(at, {})) for at, step in enumerate(self.steps)]
        if steps != expected:
            raise Violation(f"the episode has the steps {expected}, but the worker says {steps}")
        data = self._start["data"]
        if trajectory.fields.get("reward") != data.get("reward"):
            raise Violation(f"the reward is {data.get('reward')!r}, but the trajectory has {trajectory.fields!r:.200}")
        fields = ended.fields
        if fields.get("task_id") != self._start["task_id"]:
            raise Violation(f"the episode is of task {self._start['task_id']!r}, but has the fields {fields!r:.200}")
        metadata = fields.get("metadata", {})
        echo, seen = metadata.get("echo"), metadata.get("seen", {})
        if echo != data.get("echo"):
            raise Violation(f"echo is {data.get('echo')!r:.100}, but its metadata have {echo!r:.100}")
        mine = {"task_id": self._start["task_id"], "max_response_tokens": 40, "tokens": self.tokens}
        for name, value in mine.items():
            if seen.get(name) != value:
                raise Violation(f"the workflow saw {name} = {seen.get(name)!r:.200}, but it is {value!r:.200}")
        return dict(seen)

    async def failed(self, reason: str, message: str, *, call: int | None = None) -> None:
        """Receives the rollout's failure, and checks its reason."""
        failed = await self._pipes.next(wire.Failed, self.number)
        if (failed.reason, failed.call) != (reason, call) or message not in failed.message:
            raise Violation(
                f"the rollout failed as {reason!r} with {message!r} (call {call}), but the worker says "
                f"{failed.reason!r} with {failed.message!r:.200} (call {failed.call})"
            )


def _bytes(values: list[Any], kind: str) -> bytes:
    return np.asarray(values, kind).tobytes()


def _shown(message: Any) -> str:
    shown = f"{message!r:.200}"
    return (
        shown if not isinstance(message, wire.Failed | wire.Broken) else f"{type(message).__name__}: {message.message}"
    )
