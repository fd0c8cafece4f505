"""Record that a completer keeps of every answer, so that conversations can be forked after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllm_core.parser import ToolSpec
from rllm_core.types import Step, TokenLog


@dataclass(slots=True, eq=False)
class Answer:
    """A sampled step in its conversation.

    Attributes:
        step: The step.
        tokens: Prompt and completion.
        tools: Tools that the prompt offered, if known.
        before: Previous answer of the conversation, or None.
    """

    step: Step
    tokens: TokenLog
    tools: Sequence[ToolSpec] | None
    before: Answer | None

    def steps(self) -> list[Step]:
        """Returns all steps of the conversation up to this one."""
        steps: list[Step] = []
        at: Answer | None = self
        while at is not None:
            steps.append(at.step)
            at = at.before
        return steps[::-1]
