from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from rllm_core.cli import main
from rllm_core.engine import RolloutEngine, TITOCompleter
from rllm_core.types import Episode, FinishReason, SamplingParams, Task, TokenInput, TokenOutput, token_ids
from rllm_core.workflow import Workflow
from rllm_devkit.scripted import ByteParser

# The same examples in every run, and no machine is too slow for them.
settings.register_profile(
    "tests", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

CUT_OFF = "[cut off]"


@pytest.fixture(scope="session")
def rllm_core() -> Callable[..., None]:
    """``rllm_core(*arguments)``: runs a command that succeeds, in this process, which imports torch only once."""

    def run(*arguments: object) -> None:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert not ended.value.code

    return run


class Answers(RolloutEngine):
    """Returns fixed answers in order and records the prompts. An answer that ends in `CUT_OFF` has no stop token."""

    name = "answers"

    def __init__(self, answers: Sequence[str]) -> None:
        self.parser = ByteParser()
        self.answers = list(answers)
        self.prompts: list[str] = []

    @property
    def supports_token_in_token_out(self) -> bool:
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        self.prompts.append(bytes(token for token in token_input if token < 256).decode())
        text = self.answers.pop(0)
        cut = text.endswith(CUT_OFF)
        ids = [*text.removesuffix(CUT_OFF).encode(), *([] if cut else [ByteParser.END])]
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            weight_version=0,
        )


Play = Callable[..., tuple[Episode, Answers]]


@pytest.fixture
def play() -> Play:
    """``play(workflow, task, *answers)``: one rollout with fixed answers, and its engine."""

    def run(workflow: Workflow, task: Task, *answers: str) -> tuple[Episode, Answers]:
        engine = Answers(answers)
        episode = asyncio.run(workflow.run(task, TITOCompleter(engine)))
        assert not engine.answers, "the workflow stopped asking early"
        return episode, engine

    return run


@pytest.fixture
def make_completer() -> Callable[..., tuple[Answers, TITOCompleter]]:
    """``make_completer(*answers)``: an engine with fixed answers, and its completer."""

    def make(*answers: str) -> tuple[Answers, TITOCompleter]:
        engine = Answers(answers)
        return engine, TITOCompleter(engine)

    return make
