"""The endpoint of one rollout: takes the calls of its agent, and keeps what was sampled for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rllm_core.engine import Completer, EngineBusy, Terminated
from rllm_core.scope import RolloutEnded
from rllm_core.types import Episode, FinishReason, Step, Task, TerminationReason, Trajectory
from rllm_gateway.calls import Answer, Call, up_to_stop_text
from rllm_gateway.errors import BadRequest, Busy, Failed, Forbidden, Refused, TooLong
from rllm_gateway.forest import Forest, prompt
from rllm_gateway.messages import chained

MAX_ALTERNATIVES = 64


class Endpoint:
    """Address under which one rollout's agent finds the policy; see `Gateway.rollout`.

    Args:
        completer: Completer of the rollout.
        url: Address of the gateway, such as ``http://127.0.0.1:4711``.
        secret: Secret of the rollout.
        max_calls: Maximum number of calls, or None.

    Attributes:
        forest: The answers so far.
        counts: Numbers of calls, ignored fields and others, by the name of their metric.
        failure: What the rollout fails by when it ends: the first error that the agent could not have caused, or, after
            `close`, a last call that was too long.
    """

    def __init__(self, completer: Completer, url: str, secret: str, *, max_calls: int | None = None) -> None:
        self.forest = Forest()
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._completer = completer
        self._root_url = f"{url}/r/{secret}"
        self._secret = secret
        self._max_calls = max_calls
        self._recorded: dict[bytes, list[Answer]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._too_long: Terminated | None = None
        self._is_open = True

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's interfaces; it contains the secret."""
        return f"{self._root_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Address for clients of Anthropic's interface, which add ``/v1`` themselves."""
        return self._root_url

    @property
    def api_key(self) -> str:
        """Key of the endpoint; the same secret as in its address."""
        return self._secret

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for a program."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def answer(self, call: Call) -> list[Answer]:
        """Samples the answers to a call, or returns those of the call that it repeats.

        Raises:
            Refused: If there is no answer.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._answer(call)
        finally:
            self._running.discard(task)

    async def _answer(self, call: Call) -> list[Answer]:
        self._check(call)
        recorded = self._recorded.get(call.digest)
        if call.is_retry and recorded is not None:
            self.counts["retried"] += 1
            return recorded
        # A retry of this call must not get the answer of an earlier one with the same body.
        self._recorded.pop(call.digest, None)
        if self._max_calls is not None and self.counts["calls"] >= self._max_calls:
            self.failure = self.failure or Terminated(
                TerminationReason.MAX_TURNS, f"the agent has made {self._max_calls} calls"
            )
            raise Forbidden(f"this rollout may make at most {self._max_calls} calls", code="call_limit_reached")
        self.counts["calls"] += 1
        for name in call.ignored:
            self.counts[f"ignored_{name}"] += 1
        answers = await self._sampled(call)
        self._too_long = None
        self._recorded[call.digest] = answers
        return answers

    def _check(self, call: Call) -> None:
        if not self._is_open:
            raise Forbidden("the rollout is over", code="rollout_ended")
        if not call.messages:
            raise BadRequest("messages must not be empty")
        if not 1 <= call.count <= MAX_ALTERNATIVES:
            raise BadRequest(f"n must be between 1 and {MAX_ALTERNATIVES}, not {call.count}")
        if call.max_tokens is not None and call.max_tokens < 1:
            raise BadRequest(f"the maximum number of tokens must be at least 1, not {call.max_tokens}")

    async def _sampled(self, call: Call) -> list[Answer]:
        before, start, said = self._placed(call)
        messages = prompt(before, call.messages, start)
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
                    tools=call.tools or ([] if before is not None else None),
                    max_response_tokens=None if call.max_tokens is None else min(call.max_tokens, limit),
                    stop_texts=call.stop_texts,
                    metadata={"model": call.model} if call.model else None,
                )
            )
            for number in numbers
        ]
        try:
            steps = await asyncio.gather(*asking)
        except BaseException as error:
            for one in asking:
                one.cancel()
            for number in numbers:
                self.forest.release(said, number)
            if not isinstance(error, Exception):
                raise
            raise self._refusal(error) from error
        return [self._added(call, step, before, said) for step in steps]

    def _placed(self, call: Call) -> tuple[Answer | None, int, bytes]:
        if call.after is not None:
            try:
                before = self.forest[call.after]
            except KeyError:
                raise BadRequest(f"no answer {call.after!r} was given in this rollout") from None
            call.messages = [*self._words(before, call.instructions), *call.messages]
            return self.forest.place(call.messages, named=before)
        return self.forest.place(call.messages)

    @staticmethod
    def _words(answer: Answer, instructions: str | None) -> list[dict[str, Any]]:
        """The conversation up to an answer, as its client knows it, with other instructions if it sends some."""
        words: list[dict[str, Any]] = [dict(one) for one in answer.step.messages]
        if instructions is not None:
            begun = [{"role": "system", "content": instructions}] if instructions else []
            words[: words[0]["role"] == "system"] = begun
        spoken = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}
        return [*words, spoken | {"tool_calls": list(answer.calls)}]

    def _added(self, call: Call, step: Step, before: Answer | None, said: bytes) -> Answer:
        text = up_to_stop_text(step.text, call.stop_texts)
        spoken = {"role": "assistant", "content": text, "tool_calls": step.response.get("tool_calls")}
        answer = Answer(step, chained(said, spoken), text, before, call.model)
        self.forest.add(answer)
        return answer

    def _refusal(self, error: Exception) -> Refused:
        """Returns what the client is told, and keeps what the agent cannot have caused."""
        if isinstance(error, Terminated) and error.reason is TerminationReason.MAX_PROMPT_TOKENS:
            self._too_long = error  # the agent may shorten its history and go on
            return TooLong(str(error))
        if isinstance(error, RolloutEnded):
            return Forbidden("the rollout is over", code="rollout_ended")
        self.failure = self.failure or error
        if isinstance(error, EngineBusy):
            return Busy(str(error))
        return Failed(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Ends the endpoint: cancels running calls."""
        self._is_open = False
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self.failure = self.failure or self._too_long

    def trajectories(self, by: Literal["model", "conversation"] = "model") -> list[Trajectory]:
        """Returns what was sampled, as trajectories without rewards.

        Args:
            by: ``model``: one trajectory for each model name that the agent has asked for, its conversations one after
                the other. ``conversation``: one for each conversation, which gives rollouts with many of them more
                weight in a baseline, but which estimators with rewards per turn need if conversations run at once.
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
        """Returns the episode of the rollout, with one reward for all its trajectories, and the gateway's metrics."""
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
        """Whether the last answer of every conversation reached the maximum length."""
        last = [answer for answer in self.forest.paths() if not answer.after]
        return bool(last) and all(answer.step.finish_reason is FinishReason.LENGTH for answer in last)

    def metrics(self) -> dict[str, float]:
        """Counts of the rollout, by the names that the docs list."""
        counts: dict[str, float] = {"calls": 0.0, "retried": 0.0, **self.counts}
        counts["roots"] = float(len(self.forest.roots))
        counts["rewritten_answers"] = float(self.forest.rewritten)
        return {f"gateway_{name}": float(value) for name, value in counts.items()}
