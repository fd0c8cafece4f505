"""The scripted engine and backend, extended to satisfy their contracts in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from bigrams import VOCABULARY
from noncompliant_engines import has_foreign_id

from rllm_core.backend import Policy
from rllm_core.engine import EngineError
from rllm_core.parser import BaseParser
from rllm_core.types import Floats, TokenOutput, TrainingSample
from rllm_devkit.scripted import ScriptedBackend, ScriptedEngine


class CarefulScriptedEngine(ScriptedEngine):
    """Rejects token ids that are not bytes."""

    async def get_token_outputs_from_token_input(self, token_input: Any, **more: Any) -> list[TokenOutput]:
        if has_foreign_id(token_input):
            raise EngineError(f"a token id is outside the vocabulary of {VOCABULARY}")
        return await super().get_token_outputs_from_token_input(token_input, **more)


class FaithfulScriptedBackend(ScriptedBackend):
    """Computes log-probabilities of its current policy only."""

    speed: ClassVar[float] = 1.0

    async def init_rollout_engine(self, parser: BaseParser) -> ScriptedEngine:
        self.rollout_engine = CarefulScriptedEngine(parser, self.script, skill=self.skill)
        return self.rollout_engine

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        if policy != "current":
            raise NotImplementedError(policy)
        return [self._of_written(sample) for sample in samples]
