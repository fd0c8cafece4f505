"""A rollout that runs in a worker, as the run sees it: answers its calls, and reads its episode."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rllm_core.costs import spend
from rllm_core.engine import Completer, EngineError, Terminated
from rllm_core.errors import ConfigError, RefusedConversation, UserError
from rllm_core.hosts import wire
from rllm_core.hosts.contract import RolloutFailed
from rllm_core.hosts.elsewhere import GROUP
from rllm_core.hosts.rollout_failures import failure_of
from rllm_core.parser import SegmentBreak
from rllm_core.scope import CallTime, RolloutEnded, ended_calls
from rllm_core.types import Episode, Messages, MessageView, Step, Task, TerminationReason, Trajectory


@dataclass(slots=True)
class _Conversation:
    """A conversation: its completer, its messages including the last answer, and the tools on offer."""

    completer: Completer
    said: MessageView = field(default_factory=MessageView)
    tools: list[dict[str, Any]] | None = None
    last: Step | None = None
    asked: asyncio.Task[Any] | None = None


class PlayedRollout:
    """A rollout in a worker.

    Args:
        completer: First conversation of the rollout.

    Attributes:
        over: Future that is done when the rollout has ended.
        waits_at: Where the rollout was waiting when it was cancelled; None before the worker has reacted.
    """

    def __init__(self, number: int, task: Task, completer: Completer, send: Callable[[Any], None]) -> None:
        self.number = number
        self.name = completer.scope.name.removeprefix("rollout ")
        self.over: asyncio.Future[wire.Ended | wire.Failed] = asyncio.get_running_loop().create_future()
        self.waits_at: str | None = None
        self._task = task
        self._completer = completer
        self._send = send
        self._context = contextvars.copy_context()
        self._conversations: dict[tuple[int | wire.Fork, ...], _Conversation] = {(): _Conversation(completer)}
        self._steps: dict[str, Step] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._errors: dict[int, Exception] = {}

    def start(self) -> None:
        """Starts the rollout."""
        completer = self._completer
        self._send(
            wire.Start(
                self.number,
                self.name,
                self._task.task_id,
                dict(self._task.data),
                completer.seed,
                is_validation=completer.is_validation,
                sampling=completer.sampling_params.model_dump(),
                max_prompt_tokens=completer.max_prompt_tokens,
            )
        )

    def receive(self, message: wire.OfRollout) -> None:
        """Handles a message of the worker."""
        if isinstance(message, wire.ModelCall | wire.Spell):
            answering = asyncio.get_running_loop().create_task(self._answer(message), context=self._context)
            self._answering[message.call] = answering
        elif isinstance(message, wire.GiveUp):
            if given_up := self._answering.get(message.call):
                given_up.cancel()
        elif isinstance(message, wire.Cancelling):
            self.waits_at = message.waits_at
        elif not self.over.done():
            self.over.set_result(message)

    def lose(self, why: str) -> None:
        """Ends the rollout, because its worker is lost."""
        if not self.over.done():
            self.over.set_exception(RolloutFailed(TerminationReason.WORKER_LOST, why))
            self.over.exception()  # a cancelled rollout never retrieves it, which asyncio would report

    def result(self, ended: wire.Ended | wire.Failed) -> object:
        """Returns the result of ``run``, or raises its error.

        Raises:
            RolloutFailed: If the rollout failed in the worker.
            UserError: If only the user can fix the problem.
        """
        for timed in ended.timed:
            ended_calls(CallTime(timed.kind, timed.name, timed.start, timed.seconds))
        for kind, amounts in ended.costs.items():
            spend(kind, **amounts)
        if isinstance(ended, wire.Failed):
            if ended.call in self._errors:
                raise self._errors[ended.call]
            if ended.ends_run:
                raise ConfigError(ended.message)
            raise RolloutFailed(
                TerminationReason(ended.reason), ended.message, traceback=ended.traceback, is_final=ended.is_final
            )
        if ended.returned:
            return _stand_in(ended.returned)
        try:
            trajectories = [
                self._trajectory(one) if isinstance(one, wire.ReturnedTrajectory) else _stand_in(one)
                for one in ended.trajectories
            ]
            episode = Episode(**ended.fields)
        except ValueError as error:  # a worker in another language may send anything
            raise failure_of(error) from error
        episode.__dict__["trajectories"] = trajectories  # unchecked: `rllm_core.training.acceptance` checks them
        return episode

    def _trajectory(self, returned: wire.ReturnedTrajectory) -> Trajectory:
        trajectory = Trajectory(**returned.fields)
        if returned.group:
            trajectory.metadata = {**trajectory.metadata, GROUP: returned.group}
        trajectory.__dict__["steps"] = [
            self._step(step) if isinstance(step, wire.ReturnedStep) else _stand_in(step) for step in returned.steps
        ]
        return trajectory

    def _step(self, returned: wire.ReturnedStep) -> Step:
        step = self._steps.get(returned.step)
        if step is None:
            return Step(**returned.changes)
        for name, value in returned.changes.items():
            setattr(step, name, value)
        return step

    async def _answer(self, call: wire.ModelCall | wire.Spell) -> None:
        try:
            answer = await (self._spelled(call) if isinstance(call, wire.Spell) else self._called(call))
        except asyncio.CancelledError:
            return  # the workflow expects no answer
        except Exception as error:
            self._errors[call.call] = error
            self._send(_failed(self.number, call.call, error))
        else:
            self._send(answer)
        finally:
            del self._answering[call.call]

    async def _spelled(self, call: wire.Spell) -> wire.Spelled:
        return wire.Spelled(self.number, call.call, await self._completer.spell(self._steps[call.step]))

    async def _called(self, call: wire.ModelCall) -> wire.CallAnswered | wire.Counted:
        conversation = self._conversation(tuple(call.conversation))
        asked, conversation.asked = conversation.asked, asyncio.current_task()
        if asked is not None and not asked.done():
            await asyncio.wait([asked])  # the workflow gave up this call, and the engine may need a moment to cancel it
        if not 0 <= call.kept <= len(conversation.said):
            raise ValueError(f"the conversation has {len(conversation.said)} messages so far, not {call.kept}")
        whole = call.kept == len(conversation.said)
        messages = Messages(conversation.said if whole else conversation.said[: call.kept])
        for message in call.messages:
            messages.append(self._steps[message].response if isinstance(message, str) else message)
        if isinstance(call.tools, list) or call.tools is None:
            conversation.tools = call.tools
        if call.counts:
            tokens = await conversation.completer.count_prompt_tokens(messages, tools=conversation.tools)
            return wire.Counted(self.number, call.call, tokens)
        before = conversation.last
        step = await conversation.completer.complete(
            messages,
            tools=conversation.tools,
            max_response_tokens=call.max_response_tokens,
            stop_texts=call.stop_texts,
        )
        conversation.last = step
        conversation.said = step.messages.extended([step.response])
        self._steps[step.step_id] = step
        kept = 0
        if before is not None and before.segment == step.segment:
            kept = len(before.prompt_ids) + len(before.completion_ids)
        return wire.CallAnswered(
            self.number,
            call.call,
            wire.SampledStep(
                step.step_id,
                step.response,  # type: ignore[arg-type]
                kept,
                step.prompt_ids[kept:].tobytes(),
                step.completion_ids.tobytes(),
                None if step.logprobs is None else step.logprobs.tobytes(),
                step.finish_reason.value,
                step.weight_version,
                segment=step.segment,
                break_reason=step.break_reason,
                control_tokens=step.control_tokens,
            ),
        )

    def _conversation(self, path: tuple[int | wire.Fork, ...]) -> _Conversation:
        """Returns the conversation at a path; creates it, and the forks on the path to it, if they are new.

        Raises:
            ValueError: If a fork's number is not positive, or a fork starts after a step that was not sampled here.
        """
        found = self._conversations.get(path)
        if found is not None:
            return found
        *before, last = path
        fork = last if isinstance(last, wire.Fork) else wire.Fork(last)
        if isinstance(fork.name, int) and fork.name < 1:
            raise ValueError(f"forks are numbered from 1, not {fork.name}")
        after = self._steps.get(fork.after)
        if fork.after and after is None:
            raise ValueError(f"no step {fork.after!r} was sampled in this rollout")
        opened = _Conversation(self._conversation(tuple(before)).completer.forked(fork.name, after))
        if after is not None:
            opened.last, opened.said = after, after.messages.extended([after.response])
        self._conversations[path] = opened
        return opened


def _failed(rollout: int, call: int, error: Exception) -> wire.CallFailed:
    if isinstance(error, Terminated):
        return wire.CallFailed(rollout, call, "terminated", str(error), error.reason.value)
    if isinstance(error, SegmentBreak):
        return wire.CallFailed(rollout, call, "segment_break", str(error), error.reason.value)
    kind = next((kind for kind, error_type in _KINDS.items() if isinstance(error, error_type)), "other")
    return wire.CallFailed(rollout, call, kind, str(error) if kind != "other" else f"{type(error).__name__}: {error}")


_KINDS: dict[str, type[Exception]] = {
    "engine_error": EngineError,
    "refused_conversation": RefusedConversation,
    "configuration": UserError,
    "rollout_ended": RolloutEnded,
    "value": ValueError,
    "type": TypeError,
}


def _stand_in(type_name: str) -> object:
    """Returns an object of a type with this name, for a check that rejects it by its type."""
    return None if type_name == "NoneType" else type(type_name, (), {})()
