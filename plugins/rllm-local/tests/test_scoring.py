"""Engine ``local`` scores given tokens, and works without a backend."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local.config import LocalConfig
from rllm_local.decoders import TransformersDecoder
from rllm_local.fused import FusedDecoder
from rllm_local.sampler import ScoreRequest, score
from rllm_local.standalone import StandaloneEngine
from rllm_local.starter import make_model, make_tokenizer
from rllm_renderers.chat_template import ChatTemplateParser
from transformers import AutoModelForCausalLM

from rllm_core.config import ModelConfig, RunConfig
from rllm_core.distillation.teacher import Teacher
from rllm_core.engine import EngineError
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, SamplingParams, Step, TokenIds, Trajectory, token_ids

PARSER: Any = SimpleNamespace(supports_media=False, get_stop_token_ids=lambda: (2,))


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture
def scorings() -> list[ScoreRequest]:
    rng = np.random.default_rng(0)
    made = []
    for length, start in ((2, 1), (40, 39), (40, 1), (7, 3), (300, 120), (299, 298)):
        made.append(ScoreRequest(token_ids(rng.integers(10, 250, length)), start))
    return made


def plainly(model: Any, tokens: TokenIds, start: int) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1].double()
    known = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    return known[start - 1 :].numpy()


@pytest.mark.parametrize("kind", ["fused", "transformers"])
@pytest.mark.parametrize("positions", [4096, 64])
def test_log_probabilities_are_those_of_the_model(
    model: Any, scorings: list[ScoreRequest], kind: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm_local.sampler.SCORED_POSITIONS", positions)
    decoder = FusedDecoder(model, torch.float32) if kind == "fused" else TransformersDecoder(model, shared=True)
    found = score(decoder, scorings, torch.device("cpu"), vocabulary_size=model.config.vocab_size)
    for scoring, known in zip(scorings, found, strict=True):
        assert known.dtype == np.float32
        assert known.shape == (scoring.count,)
        assert np.allclose(known, plainly(model, scoring.token_ids, scoring.start), atol=1e-4)


@pytest.fixture
def engine(run_config: Callable[..., RunConfig]) -> StandaloneEngine:
    return StandaloneEngine.from_config(run_config(), PARSER)


async def test_it_samples_and_scores_without_a_backend(engine: StandaloneEngine, model: Any) -> None:
    await engine.wake_up()
    prompt = token_ids([1, 50, 60, 70])
    params = SamplingParams(max_response_tokens=12, stop_token_ids=(2,))
    sampled = await asyncio.gather(
        *(
            engine.get_token_outputs_from_token_input(prompt, sampling_params=params, seeds=(s, s + 9))
            for s in range(3)
        ),
        *(engine.compute_logprobs(token_ids([1, 5, 9, seed]), start=2) for seed in range(3)),
    )
    for outputs in sampled[:3]:
        for output in outputs:
            known = await engine.compute_logprobs(np.concatenate([prompt, output.token_ids]), start=len(prompt))
            assert np.allclose(known, output.logprobs, atol=1e-4)
    for seed, known in enumerate(sampled[3:]):
        assert np.allclose(known, plainly(model, token_ids([1, 5, 9, seed]), 2), atol=1e-4)
    await engine.sleep()
    with pytest.raises(EngineError, match="is shut down"):
        await engine.compute_logprobs(prompt, start=1)
    await engine.sleep()
    await engine.wake_up()
    assert len(await engine.compute_logprobs(prompt, start=1)) == 3
    await engine.sleep()


async def test_what_cannot_be_scored(engine: StandaloneEngine) -> None:
    await engine.wake_up()
    for tokens, start, complaint in (
        ([1, 2], 0, "cannot score tokens 0 to 2"),
        ([1, 2], 2, "cannot score tokens 2 to 2"),
        ([1, 10**6], 1, "is outside the vocabulary of"),
        ([1] * 5000, 1, "do not fit the model's 4096 positions"),
    ):
        with pytest.raises(EngineError, match=complaint):
            await engine.compute_logprobs(token_ids(tokens), start=start)
    await engine.sleep()


async def test_a_model_that_is_not_there(run_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = run_config(local=LocalConfig(device="cpu"))
    missing = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await StandaloneEngine.from_config(missing, PARSER).wake_up()


async def test_a_teacher_with_another_tokenizer(
    model_folder: Path, tmp_path: Path, run_config: Callable[..., RunConfig]
) -> None:
    def other_conversations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [{"role": "user", "content": "sort: abc"}, {"role": "assistant", "content": "hello abcabc"}]

    tokenizer = make_tokenizer(other_conversations, 0)
    make_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    student, own = (ChatTemplateParser.from_model(folder) for folder in (model_folder, tmp_path))
    assert student.vocabulary() != own.vocabulary()

    messages = [{"role": "user", "content": "sort: cba"}]
    said = [*student.vocabulary().encode("hello abcabc é"), student.get_stop_token_ids()[0]]
    logprobs = -np.linspace(0.5, 3.0, len(said), dtype=np.float32)
    prompt = student.render(messages)
    step = Step(messages=messages, prompt_ids=prompt, completion_ids=said, logprobs=logprobs, weight_version=0)
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=[step])])

    config = run_config()
    engine = StandaloneEngine.from_config(config.model_copy(update={"model": ModelConfig(path=str(tmp_path))}), own)
    await engine.wake_up()
    scored = await Teacher(engine, student, own, config.rollout).score(episode, lambda whole, part: True)
    await engine.sleep()

    advantages = scored.trajectories[0].steps[0].advantages
    assert advantages is not None
    text = [*own.vocabulary().encode("hello abcabc é"), own.get_stop_token_ids()[0]]
    assert len(text) < len(said), "the teacher has whole words where the student has letters"
    asked = own.render(messages)
    teacher_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = plainly(teacher_model, token_ids([*asked, *text]), len(asked))
    assert float(advantages.sum()) == pytest.approx(theirs.sum() - logprobs.sum(), abs=1e-3)
    assert float(advantages[-1]) == pytest.approx(theirs[-1] - logprobs[-1], abs=1e-4), "the stop tokens"
    assert not scored.trajectories[0].steps[0].metadata
