"""Plays an agent through workflow ``agent``, with a policy that says what it is told to.

The referee is the engine: what it was asked and what it gave. Nothing here reads the gateway's own records.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rllm_gateway import Endpoint, Gateway
from rllm_gateway.agent import AgentConfig, AgentWorkflow
from rllm_local.starter import starter_model
from rllm_renderers.chat_template import ChatTemplateParser

from rllm_core.algorithms.samples import segments
from rllm_core.engine import TITOCompleter
from rllm_core.types import Episode, FinishReason, SamplingParams, Step, TokenOutput
from rllm_devkit.scripted import ScriptedEngine

PLAYERS = Path(__file__).parent.parent / "players"
QUESTION = "what are 3+4, 2*5 and 9-1?"
MAX_RESPONSE_TOKENS = 2000

Tokens = tuple[int, ...]
Exchange = tuple[Tokens, Tokens, tuple[float, ...]]


@cache
def parser() -> ChatTemplateParser:
    """The starter model's parser."""
    return ChatTemplateParser.from_model(starter_model())


@cache
def _spellings() -> tuple[dict[str, int], dict[int, int]]:
    """Control tokens by their text, and tokens of one byte."""
    vocabulary = parser().vocabulary()
    single = {text[0]: token for token, text in enumerate(vocabulary.spellings) if text and len(text) == 1}
    return dict(vocabulary.control_ids), single


def spelled(text: str) -> list[int]:
    """Returns tokens as no tokenizer would choose them: one for each byte, except for control tokens."""
    control, single = _spellings()
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in control if text.startswith(mark)), None)
        said, text = (mark, text[len(mark) :]) if mark else (text[0], text[1:])
        tokens += [control[said]] if mark else [single[byte] for byte in said.encode()]
    return tokens


class Script(ScriptedEngine):
    """A policy that says one text after another.

    Attributes:
        exchanges: What it was asked, and what it gave: prompt, completion, log-probabilities.
    """

    def __init__(self, *texts: str) -> None:
        super().__init__(parser())
        self.exchanges: list[Exchange] = []
        self._texts = texts

    async def get_token_output_from_token_input(self, token_input: Any, *, sampling_params: Any, **more: Any) -> Any:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        number = len(self.exchanges)
        tokens = spelled(self.say(parser().decode(token_input)) + "<|im_end|>")
        assert len(tokens) <= sampling_params.max_response_tokens
        logprobs = -np.random.default_rng(number).exponential(size=len(tokens)).astype(np.float32)
        self.exchanges.append((tuple(map(int, token_input)), tuple(tokens), tuple(logprobs.tolist())))
        return TokenOutput(
            token_ids=tokens, logprobs=logprobs, finish_reason=FinishReason.STOP, weight_version=self.weight_version
        )

    async def get_token_outputs_from_token_input(
        self, token_input: Any, *, seeds: Sequence[int], **more: Any
    ) -> list[TokenOutput]:
        """See `RolloutEngine.get_token_outputs_from_token_input`."""
        return [await self.get_token_output_from_token_input(token_input, seed=seed, **more) for seed in seeds]

    def say(self, prompt: str) -> str:
        """Returns the next text."""
        if len(self.exchanges) == len(self._texts):
            raise AssertionError(f"a call after the last text of the script: {prompt!r}")
        return self._texts[len(self.exchanges)]


def check_exact(steps: Sequence[Step], engine: Script, stop_text: str | None = None) -> int:
    """Checks that steps are what the engine was asked and gave, each once.

    Args:
        steps: All steps of the rollout.
        engine: The referee.
        stop_text: Text at which the agent lets answers end.

    Returns:
        How many steps end there, before the engine's end.
    """
    trained = sorted(
        (tuple(step.prompt_ids.tolist()), tuple(step.completion_ids.tolist()), tuple(step.logprobs.tolist()))
        for step in steps
    )
    gave = sorted(engine.exchanges)
    assert [prompt for prompt, _, _ in trained] == [prompt for prompt, _, _ in gave]
    cut = 0
    for (_, tokens, logprobs), (_, all_tokens, all_logprobs) in zip(trained, gave, strict=True):
        assert tokens == all_tokens[: len(tokens)]
        assert logprobs == all_logprobs[: len(tokens)]
        if tokens != all_tokens:
            assert stop_text is not None
            assert parser().decode(tokens).endswith(stop_text)
            cut += 1
    return cut


@asynccontextmanager
async def opened(*script: str) -> AsyncIterator[tuple[Endpoint, Script]]:
    """Opens the endpoint of a rollout, and what answers there."""
    gateway, engine = Gateway(), Script(*script)
    await gateway.open()
    try:
        async with gateway.rollout(_completer(engine)) as endpoint:
            yield endpoint, engine
    finally:
        await gateway.close()


def _completer(engine: Script) -> TITOCompleter:
    ends = tuple(parser().get_stop_token_ids())
    params = SamplingParams(max_response_tokens=MAX_RESPONSE_TOKENS, stop_token_ids=ends)
    return TITOCompleter(engine, sampling_params=params, seed=0)


@dataclass
class Played:
    """What became of a rollout."""

    episode: Episode
    engine: Script

    @property
    def answer(self) -> str:
        """What the agent says in the end."""
        result = self.episode.metadata["result"]
        assert isinstance(result, str)
        return result.strip()

    @property
    def steps(self) -> list[Step]:
        """All steps."""
        return [step for trajectory in self.episode.trajectories for step in trajectory.steps]

    @property
    def segments(self) -> int:
        """Number of token sequences to train on."""
        return sum(len(segments(trajectory.steps)) for trajectory in self.episode.trajectories)

    def metric(self, name: str) -> int:
        """A count of the gateway."""
        return int(self.episode.metrics.get(f"gateway_{name}", 0))

    @property
    def ignored(self) -> set[str]:
        """Fields of the requests that the run file decides."""
        prefix = "gateway_ignored_"
        return {name.removeprefix(prefix) for name in self.episode.metrics if name.startswith(prefix)}


async def play(folder: Path, script: Sequence[str], *, seconds: float = 120, **settings: Any) -> Played:
    """Plays a rollout of workflow ``agent``.

    Args:
        folder: Folder for the rows and the reward function.
        script: What the policy says.
        seconds: Time for the rollout.
        **settings: Section ``[agent]``.
    """
    (folder / "rows.jsonl").write_text(json.dumps({"id": "row", "question": QUESTION}) + "\n")
    (folder / "score.py").write_text("def score(task, text):\n    return float('ok' in text)\n")
    files = {"train_file": str(folder / "rows.jsonl"), "held_out_share": 0, "reward": f"{folder / 'score.py'}:score"}
    workflow = AgentWorkflow(AgentConfig(**files, **settings))
    [task] = workflow.tasks("train")
    engine = Script(*script)
    await workflow.open()
    try:
        return Played(await asyncio.wait_for(workflow.run(task, _completer(engine)), seconds), engine)
    finally:
        await workflow.close()
        await workflow.services.close()
