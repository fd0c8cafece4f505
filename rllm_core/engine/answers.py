"""Record that a completer keeps of every answer, so that conversations can be forked after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm_core.parser import ToolSpec
from rllm_core.types import Step, TokenLog


@dataclass(slots=True, eq=False)
class Answer:
    """A sampled step in its conversation.

    Attributes:
        step: The step, which the workflow can change.
        sampled: Values of the fields `rllm_core.scope.SAMPLED` when it was sampled.
        tools: Tools that the prompt offered, if known.
        before: Previous answer of the conversation, or None.
    """

    step: Step
    sampled: tuple[Any, ...]
    tools: Sequence[ToolSpec] | None
    before: Answer | None

    @property
    def tokens(self) -> TokenLog:
        """Prompt and completion, as a new log that shares their memory."""
        return TokenLog.up_to(self.sampled[1])

    def steps(self) -> list[Step]:
        """Returns all steps of the conversation up to this one."""
        steps: list[Step] = []
        at: Answer | None = self
        while at is not None:
            steps.append(at.step)
            at = at.before
        return steps[::-1]
