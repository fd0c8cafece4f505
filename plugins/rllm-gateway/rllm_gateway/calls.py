"""A client's call and its answer, in the form that all dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_core.types import FinishReason, Step
from rllm_gateway.history import History


@dataclass(slots=True)
class ClientCall:
    """A client's call, in whatever dialect it was made.

    Attributes:
        history: The whole conversation.
        tools: Tools on offer, in the format of chat completions, or None.
        model: Model name that the client asked for; becomes the role of the trajectory.
        max_tokens: Maximum length of the answer, or None for the run's own limit.
        stop_texts: Texts that end the answer.
        count: Number of alternative answers.
        after: Id of the answer to continue from, if the client names it instead of repeating the conversation.
        instructions: System message that replaces the conversation's first one; None keeps it.
        ignored: Request fields that are ignored, because the run file decides them.
        shows_logprobs: Whether the client gets the log-probabilities of the tokens.
        digest: Hash of the body, by which a repeated call is recognized.
        is_retry: Whether the client marks the call as a retry.
    """

    history: History
    tools: list[dict[str, Any]] | None = None
    model: str = ""
    max_tokens: int | None = None
    stop_texts: tuple[str, ...] = ()
    count: int = 1
    after: str | None = None
    instructions: str | None = None
    ignored: Sequence[str] = ()
    shows_logprobs: bool = False
    digest: bytes = b""
    is_retry: bool = False


@dataclass(slots=True, eq=False)
class AnswerNode:
    """A sampled answer in its conversation: a node of the rollout's forest.

    Attributes:
        step: Recorded step: prompt and completion tokens.
        history: The conversation up to and with the answer, as its client knows it.
        text: Text that the client gets, cut before the stop text.
        before: The answer that this one continues from; None at a root.
        model: Name of the model that the client asked for.
        is_delivered: Whether the client received the answer, or has continued from it.
        after: Answers that continue from this one.
        tokens: Bytes of each sampled token, if the client gets log-probabilities.
    """

    step: Step
    history: History
    text: str
    before: AnswerNode | None
    model: str
    is_delivered: bool = False
    after: list[AnswerNode] = field(default_factory=list)
    tokens: Sequence[bytes] = ()

    @property
    def id(self) -> str:
        """Id of the answer, unique within the run."""
        return self.step.step_id

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Tool calls."""
        found: Sequence[Mapping[str, Any]] = self.step.response.get("tool_calls") or ()
        return found

    @property
    def reasoning(self) -> str | None:
        """Reasoning, if any."""
        return self.step.response.get("reasoning_content")

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.step.prompt_ids)

    @property
    def sampled_tokens(self) -> int:
        """Number of completion tokens."""
        return len(self.step.completion_ids)

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: ``tool_calls``, ``stop`` or ``length``."""
        reason = self.step.finish_reason
        return "tool_calls" if self.calls and reason is not FinishReason.LENGTH else reason.value


def up_to_stop_text(text: str, stop_texts: Sequence[str]) -> str:
    """Returns the text before the first stop text."""
    found = [at for at in (text.find(stop) for stop in stop_texts) if at >= 0]
    return text[: min(found)] if found else text
