"""The endpoint of one rollout: answers its agent's calls, and keeps the sampled answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rllm_core.engine import Completer, EngineBusy, Terminated
from rllm_core.errors import UserError
from rllm_core.scope import RolloutEnded
from rllm_core.types import Episode, FinishReason, MessageView, Step, Task, TerminationReason, Trajectory
from rllm_gateway.bodies import Bodies
from rllm_gateway.calls import AnswerNode, ClientCall, up_to_stop_text
from rllm_gateway.errors import BadRequest, Busy, CallFault, CallRefused, Forbidden, TooLong
from rllm_gateway.forest import Forest, ForestPlace
from rllm_gateway.history import History

MAX_ALTERNATIVES = 64
MAX_REQUEST_BYTES = 1 << 32


class Options(NamedTuple):
    """Options for how a rollout's endpoint treats its agent.

    Attributes:
        max_calls: Maximum number of calls, or None for no limit.
        max_request_bytes: Maximum total size of the rollout's requests.
        hide_tools: Whether to hide the tools from the model.
        hide_system: Whether to hide system messages from the model.
    """

    max_calls: int | None = None
    max_request_bytes: int = MAX_REQUEST_BYTES
    hide_tools: bool = False
    hide_system: bool = False


DEFAULTS = Options()


class Endpoint:
    """The address at which one rollout's agent reaches the policy; see `Gateway.rollout`.

    Args:
        completer: The rollout's completer.
        url: Address of the gateway, such as ``http://127.0.0.1:4711``.
        secret: The rollout's secret.
        options: Limits, and the handling of tools, system messages and unsupported fields.
        socket: Path of the Unix socket on which the gateway is served, too; "" for none.

    Attributes:
        forest: The answers so far.
        counts: Numbers of calls, ignored fields and other events, by metric name.
        bodies: Reads the request bodies.
        sending: Connections on which answers are being sent. `close` closes them, since a client may not read.
        failure: The error by which the rollout fails when it ends: the first one that the agent could not have caused,
            or, after `close`, a last call that was too long.
        refused: The last call that was refused, as status and message, or "".
    """

    def __init__(
        self, completer: Completer, url: str, secret: str, *, options: Options = DEFAULTS, socket: str = ""
    ) -> None:
        self.forest = Forest()
        self.counts: Counter[str] = Counter()
        self.sending: set[asyncio.Transport] = set()
        self.failure: Exception | None = None
        self.refused = ""
        self._completer = completer
        self._root_url = f"{url}/r/{secret}"
        self._secret = secret
        self.socket = socket
        self._options = options
        self.bodies = Bodies()
        self._recorded: dict[bytes, list[AnswerNode]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._too_long: Terminated | None = None
        self._is_open = True
        self._received = 0
        self._waited = 0.0
        self._since = time.monotonic()

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's APIs; it contains the secret."""
        return f"{self._root_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Address for clients of Anthropic's API, which add ``/v1`` themselves."""
        return self._root_url

    @property
    def api_key(self) -> str:
        """API key of the endpoint: the same secret as in its address."""
        return self._secret

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the agent's program."""
        found = {"RLLM_GATEWAY_SOCKET": self.socket} if self.socket else {}
        # A proxy would look for the gateway's loopback address on its own machine.
        for name in ("NO_PROXY", "no_proxy"):
            found[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
        return found | {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def receive(self, size: int) -> None:
        """Counts the bytes of a request.

        Raises:
            Forbidden: If the agent's requests exceed the limit.
        """
        self._received += size
        if self._received > self._options.max_request_bytes:
            self._end(f"the agent has sent more than {self._options.max_request_bytes:,} bytes")
            raise Forbidden(
                f"this rollout may send at most {self._options.max_request_bytes:,} bytes", code="size_limit"
            )

    def _end(self, why: str) -> None:
        self.failure = self.failure or Terminated(TerminationReason.MAX_TURNS, why)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Marks the rollout as failed by any error that is not an answer to the client, and counts refusals.

        Raises:
            Refused: The error that the client gets instead.
        """
        try:
            yield
        except CallRefused as refused:
            self.counts[f"refused_{refused.status // 100}xx"] += 1
            self.refused = f"{refused.status}: {refused}"
            raise
        except Exception as error:
            self.counts["refused_5xx"] += 1
            self.failure = self.failure or error
            raise CallFault(f"{type(error).__name__}: {error}") from error

    async def answer(self, call: ClientCall) -> list[AnswerNode]:
        """Samples the answers to a call. A retry gets the answers of the call that it repeats.

        Raises:
            Refused: If there is no answer.
        """
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self._waited += time.monotonic() - self._since
        self._running.add(task)
        try:
            return await self._answer(call)
        finally:
            self._running.discard(task)
            if not self._running:
                self._since = time.monotonic()

    async def _answer(self, call: ClientCall) -> list[AnswerNode]:
        self._check(call)
        recorded = self._recorded.get(call.digest)
        if call.is_retry and recorded is not None:
            self.counts["retried"] += 1
            return recorded
        # Otherwise, a retry of this call would get the answer of an earlier call with the same body.
        self._recorded.pop(call.digest, None)
        if self._options.max_calls is not None and self.counts["calls"] >= self._options.max_calls:
            self._end(f"the agent has made {self._options.max_calls} calls")
            raise Forbidden(f"this rollout may make at most {self._options.max_calls} calls", code="call_limit_reached")
        self.counts["calls"] += 1
        for name in call.ignored:
            self.counts[f"ignored_{name}"] += 1
        answers = await self._sampled(call)
        self._too_long = None
        self._recorded[call.digest] = answers
        return answers

    def _check(self, call: ClientCall) -> None:
        if not self._is_open:
            raise Forbidden("the rollout is over", code="rollout_ended")
        if not len(call.history):
            raise BadRequest("messages must not be empty")
        if not 1 <= call.count <= MAX_ALTERNATIVES:
            raise BadRequest(f"n must be between 1 and {MAX_ALTERNATIVES}, not {call.count}")
        if call.max_tokens is not None and call.max_tokens < 1:
            raise BadRequest(f"the maximum number of tokens must be at least 1, not {call.max_tokens}")

    async def _sampled(self, call: ClientCall) -> list[AnswerNode]:
        place = self._placed(call)
        before = place.before
        said = call.history.digest + call.model.encode()  # calls to several models may arrive in any order
        messages = self._prompt(place)
        if before is not None:
            before.is_delivered = True
        numbers = [self.forest.reserve(said) for _ in range(call.count)]
        limit = self._completer.sampling_params.max_response_tokens
        asking = [
            asyncio.ensure_future(
                self._completer.fork(
                    after=None if before is None else before.step, key=f"{said.hex()} {number}"
                ).complete(
                    messages,
                    tools=self._tools(call, before),
                    max_response_tokens=None if call.max_tokens is None else min(call.max_tokens, limit),
                    stop_texts=call.stop_texts,
                    metadata={"model": call.model} if call.model else None,
                )
            )
            for number in numbers
        ]
        try:
            steps = await asyncio.gather(*asking)
            tokens = (
                await asyncio.gather(*map(self._completer.spell, steps)) if call.shows_logprobs else [()] * len(steps)
            )
        except BaseException as error:
            for one in asking:
                one.cancel()
            for number in numbers:
                self.forest.release(said, number)
            if not isinstance(error, Exception):
                raise
            raise self._refusal(error, messages) from error
        return [self._added(call, step, before, spelled) for step, spelled in zip(steps, tokens, strict=True)]

    async def count(self, call: ClientCall) -> int:
        """Returns the number of prompt tokens of a call.

        Raises:
            Refused: If the prompt cannot be rendered or is refused.
        """
        self._check(call)
        place = self._placed(call)
        prompt = self._prompt(place)
        fork = self._completer.fork(after=None if place.before is None else place.before.step, key="count")
        try:
            return await fork.count_prompt_tokens(prompt, tools=self._tools(call, place.before))
        except Exception as error:
            raise self._refusal(error, prompt) from error

    def _prompt(self, place: ForestPlace) -> MessageView:
        prompt = place.prompt(hide_system=self._options.hide_system)
        if not prompt:
            raise BadRequest("the conversation has only system messages, which are hidden from the model")
        return prompt

    def _tools(self, call: ClientCall, before: AnswerNode | None) -> list[dict[str, Any]] | None:
        tools = None if self._options.hide_tools else call.tools
        return tools or ([] if before is not None else None)

    def _placed(self, call: ClientCall) -> ForestPlace:
        if call.after is None:
            return self.forest.place(call.history, call.model)
        try:
            before = self.forest[call.after]
        except KeyError:
            raise BadRequest(f"no answer {call.after!r} was given in this rollout") from None
        call.history = _with_instructions(before.history, call.instructions).extended(call.history.since(0))
        return self.forest.place(call.history, call.model, named=before)

    def _added(self, call: ClientCall, step: Step, before: AnswerNode | None, tokens: Sequence[bytes]) -> AnswerNode:
        text = up_to_stop_text(step.text, call.stop_texts)
        spoken = {"role": "assistant", "content": text, "tool_calls": list(step.response.get("tool_calls") or ())}
        if (reasoning := step.response.get("reasoning_content")) is not None:
            spoken["reasoning_content"] = reasoning
        answer = AnswerNode(step, call.history.extended([spoken]), text, before, call.model, tokens=tokens)
        self.forest.add(answer)
        return answer

    def _refusal(self, error: Exception, messages: Sequence[Mapping[str, Any]]) -> CallRefused:
        """Returns the error for the client, and keeps errors that the agent cannot have caused."""
        if isinstance(error, Terminated) and error.reason is TerminationReason.MAX_PROMPT_TOKENS:
            self._too_long = error  # the agent may shorten its history and continue
            return TooLong(str(error))
        if isinstance(error, RolloutEnded):
            return Forbidden("the rollout is over", code="rollout_ended")
        if isinstance(error, UserError) and any(not isinstance(one.get("content") or "", str) for one in messages):
            return BadRequest(str(error))  # for a model of text only; the agent may go on without the image
        self.failure = self.failure or error
        if isinstance(error, EngineBusy):
            return Busy(str(error))
        return CallFault(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Closes the endpoint: cancels running calls, and closes connections whose answers are still unread."""
        self._is_open = False
        if not self._running:
            self._waited += time.monotonic() - self._since
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for connection in list(self.sending):
            connection.abort()
        self.failure = self.failure or self._too_long

    def trajectories(self, by: Literal["model", "conversation"] = "model") -> list[Trajectory]:
        """Returns the sampled answers as trajectories without rewards.

        Args:
            by: ``model`` returns one trajectory for each model name that the agent asked for, with its conversations in
                sequence. ``conversation`` returns one for each conversation. A rollout with many conversations then
                weighs more in a baseline, but estimators with per-turn rewards need this mode if conversations run
                concurrently.
        """
        found: dict[Any, Trajectory] = {}
        for answer in self.forest.paths():
            root = answer
            while by == "conversation" and root.before is not None:
                root = root.before
            key = answer.model if by == "model" else root.id
            trajectory = found.setdefault(key, Trajectory(role=answer.model or "agent"))
            trajectory.steps.append(answer.step)
        return list(found.values())

    def episode(
        self,
        task: Task,
        *,
        reward: float | None = None,
        is_correct: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        by: Literal["model", "conversation"] = "model",
    ) -> Episode:
        """Returns the rollout's episode, with one reward for all its trajectories and the gateway's metrics."""
        trajectories: Sequence[Trajectory] = self.trajectories(by)
        for trajectory in trajectories:
            trajectory.reward = reward
        return Episode(
            task_id=task.task_id,
            trajectories=list(trajectories),
            is_correct=is_correct,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if self._is_cut_off() else TerminationReason.DONE,
            metrics=self.metrics(),
            metadata=dict(metadata or {}),
        )

    def _is_cut_off(self) -> bool:
        """Whether the last answer of every conversation reached the token limit."""
        last = [answer for answer in self.forest.paths() if not answer.after]
        return bool(last) and all(answer.step.finish_reason is FinishReason.LENGTH for answer in last)

    def metrics(self) -> dict[str, float]:
        """Counts of the rollout, under their documented metric names."""
        counts: dict[str, float] = {"calls": 0.0, "retried": 0.0, **self.counts}
        counts["roots"] = float(len(self.forest.roots))
        counts["rewritten_answers"] = float(self.forest.rewritten)
        counts["client_seconds"] = self._waited
        return {f"gateway_{name}": float(value) for name, value in counts.items()}


def _with_instructions(history: History, instructions: str | None) -> History:
    """Returns a conversation with new instructions in place of its first ones; None keeps those."""
    if instructions is None:
        return history
    messages = history.since(0)
    begun = [{"role": "system", "content": instructions}] if instructions else []
    if messages[: messages[0]["role"] == "system"] == begun:
        return history
    return History([*begun, *messages[messages[0]["role"] == "system" :]])
