"""Completer for a workflow in a worker: sends its calls to the run, which keeps the conversation's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from rllm_core.engine import Completer
from rllm_core.engine.answers import Answer
from rllm_core.hosts import wire
from rllm_core.messages import identical
from rllm_core.parser import ToolSpec
from rllm_core.scope import RolloutScope
from rllm_core.types import (
    FinishReason,
    FrozenList,
    MessageLike,
    MessageView,
    SamplingParams,
    Step,
    freeze,
    snapshot,
)

NO_TOOLS = object()


class SampledSteps:
    """Steps that the model sampled in one rollout.

    Attributes:
        fields: Fields of each step as it was sampled, by step id.
        by_response: Step ids by the Python ``id`` of their responses, which `fields` keeps alive.
    """

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, Any]] = {}
        self.by_response: dict[int, str] = {}

    def add(self, step: Step) -> None:
        """Adds a step."""
        self.fields[step.step_id] = dict(step.__dict__)
        self.by_response[id(step.response)] = step.step_id

    def returned(self, step: Step) -> wire.ReturnedStep:
        """Describes a step that the workflow returns: its id, and the fields that the workflow has set."""
        before = self.fields.get(step.step_id)
        if before is None:
            return wire.ReturnedStep("", step.model_dump())
        changed = {name for name, value in step.__dict__.items() if value is not before[name]}
        return wire.ReturnedStep(step.step_id, step.model_dump(include=changed) if changed else {})


class RemoteCompleter(Completer):
    """One conversation of a rollout in a worker.

    Args:
        ask: Function that numbers and sends a call, and returns its result.
        sampled: Steps of the rollout so far; the completer and its forks add theirs.
    """

    def __init__(
        self,
        start: wire.Start,
        scope: RolloutScope,
        ask: Callable[[wire.ModelCall | wire.Spell], Awaitable[Any]],
        sampled: SampledSteps,
    ) -> None:
        self.sampling_params = SamplingParams(**start.sampling)
        self.is_validation = start.is_validation
        self.max_prompt_tokens = start.max_prompt_tokens
        self.scope = scope
        self._rollout = start.rollout
        self._ask = ask
        self._sampled = sampled
        self._path: tuple[int | wire.Fork, ...] = ()
        self._begin(start.seed)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("engine", "session"):
            raise AttributeError(f"a rollout in a worker has no {name}: engine, parser and tokens stay with the run")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _begin(self, seed: int) -> None:
        super()._begin(seed)
        self._said = MessageView()  # messages of the conversation that the run has, including the last answer
        self._offered: Any = NO_TOOLS
        self._tools = FrozenList()
        self._named: Counter[int | str] = Counter()

    def forked(self, name: int | str, after: Step | None = None) -> Self:
        """See `Completer.forked`."""
        fork = super().forked(name, after)
        last: int | wire.Fork
        if isinstance(name, int) and after is None:
            last = name
        else:
            last = wire.Fork(name, "" if after is None else after.step_id, self._named[name])
            self._named[name] += 1
        fork._path = (*self._path, last)
        return fork

    def _begin_after(self, answer: Answer) -> None:
        super()._begin_after(answer)
        self._said = answer.step.messages.extended([answer.step.response])
        self._tools = freeze(answer.step.tools)

    def _check_tools(self, tools: Sequence[ToolSpec] | None) -> None:
        """Does nothing: the run checks the tools, since it has the parser."""

    async def _complete(
        self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, params: SamplingParams, seed: int
    ) -> Step:
        view = snapshot(messages, self._said)
        call, offered = self._call(view, tools)
        if params.max_response_tokens != self.sampling_params.max_response_tokens:
            call.max_response_tokens = params.max_response_tokens
        call.stop_texts = list(params.stop_texts)
        sampled = await self._ask(call)
        self._offered = offered
        if tools is not None:
            self._tools = freeze(list(tools))
        step = self._step(sampled, view)
        self._sampled.add(step)
        self._said = view.extended([step.response])
        return step

    async def _count(self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> int:
        call, _ = self._call(snapshot(messages, self._said), tools)
        call.counts = True
        tokens: int = await self._ask(call)
        return tokens

    async def _spell(self, step: Step) -> list[bytes]:
        tokens: list[bytes] = await self._ask(wire.Spell(self._rollout, 0, step.step_id))
        return tokens

    def _call(self, view: MessageView, tools: Sequence[ToolSpec] | None) -> tuple[wire.ModelCall, FrozenList | None]:
        """Returns a call with everything that the run does not know yet, and the tools on offer in it."""
        kept = self._kept(view)
        call = wire.ModelCall(
            rollout=self._rollout,
            call=0,
            conversation=list(self._path),
            kept=kept,
            messages=[self._sampled.by_response.get(id(message), message) for message in view[kept:]],
        )
        offered: FrozenList | None = None if tools is None else freeze(list(tools))
        if offered != self._offered:
            call.tools = offered
        self._offered = NO_TOOLS  # until the call is answered, it is unknown which tools the run keeps
        return call, offered

    def _kept(self, view: MessageView) -> int:
        """Returns how many messages at the start of ``view`` the run already has."""
        said = self._said
        if view.goes_on_from(said):
            return len(said)
        both = enumerate(zip(view, said, strict=False))
        return next((at for at, (mine, known) in both if not identical(mine, known)), min(len(view), len(said)))

    def _step(self, sampled: wire.SampledStep, view: MessageView) -> Step:
        if sampled.kept != len(self._tokens):
            self._tokens = self._tokens.prefix(sampled.kept)
        tokens = self._tokens
        tokens.extend(_ids(sampled.prompt))
        cut = len(tokens)
        tokens.extend(_ids(sampled.completion))
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = np.frombuffer(sampled.logprobs, "<f4")
        return Step._trusted(
            step_id=sampled.step,
            messages=view,
            response=freeze(sampled.response),
            tools=self._tools,
            prompt_ids=tokens.span(0, cut),
            completion_ids=tokens.span(cut, len(tokens)),
            logprobs=logprobs,
            finish_reason=FinishReason(sampled.finish_reason),
            weight_version=sampled.weight_version,
            segment=sampled.segment,
            break_reason=sampled.break_reason,
            control_tokens=sampled.control_tokens,
            metadata=freeze({}),
        )


def _ids(content: bytes) -> Any:
    return np.frombuffer(content, "<i4")
