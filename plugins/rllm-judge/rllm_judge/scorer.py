"""The base class of this package's scorers: options, the judge, and its questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer, ScorerModel, ScorerServices, Unscorable
from rllm_core.services import Score
from rllm_judge.asking import Questions
from rllm_judge.judges import judge_of
from rllm_judge.options import ENDPOINT, POLICY, JudgeOptions


class JudgeScorer(GroupScorer):
    """Base class of scorers that ask a judge."""

    options_model = JudgeOptions
    options: JudgeOptions

    def __init__(self, options: Mapping[str, Any] | None = None, *, where: str = "options") -> None:
        super().__init__(options, where=where)
        if self.options.engine not in (ENDPOINT, POLICY):
            self.model = ScorerModel(self.options.engine, self.options.model, self.options.parser)
        self.frozen_version = self.options.frozen_version
        self._questions: Questions | None = None

    async def open(self, services: ScorerServices) -> None:
        """Opens the judge and its cache."""
        self._questions = Questions(judge_of(self.options, services), self.options)

    async def close(self) -> None:
        """Closes the judge and its cache."""
        if self._questions is not None:
            await self._questions.close()

    @property
    def questions(self) -> Questions:
        """Questions to the judge; available from `open` to `close`."""
        assert self._questions is not None, "open() was not called"
        return self._questions

    @staticmethod
    def known(scores: Mapping[str, Score | None], problems: Sequence[str]) -> Mapping[str, Score | None]:
        """Returns the scores if there is one, or if nothing prevented an answer.

        Raises:
            Unscorable: Otherwise, with the last of the problems.
        """
        if problems and all(score is None for score in scores.values()):
            raise Unscorable(problems[-1])
        return scores
