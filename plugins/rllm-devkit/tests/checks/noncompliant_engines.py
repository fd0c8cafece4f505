"""Engines that break one rule each, with the check that must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from bigrams import VOCABULARY, BigramEngine

from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.types import FinishReason, Floats, SamplingParams, TokenIds, TokenInput, TokenOutput, token_ids

LIMIT_SECONDS = 1.0  # for calls of the engines that hang


def answering(output: TokenOutput, **changes: Any) -> TokenOutput:
    """Returns an output without validating it."""
    return TokenOutput.model_construct(**{**output.__dict__, **changes})


class Noncompliant(BigramEngine):
    """Changes single completions of an honest engine."""

    async def get_token_output_from_token_input(self, token_input: TokenInput, **asked: Any) -> TokenOutput:
        return self.lie(await super().get_token_output_from_token_input(token_input, **asked), asked)

    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        raise NotImplementedError


class WithForeignIds(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, token_ids=output.token_ids + np.int32(VOCABULARY))


class WithNothing(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, token_ids=token_ids([]), logprobs=np.zeros(0, np.float32))


class WithLists(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return output.token_ids.tolist()


class Overlong(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        params = asked["sampling_params"]
        longer = params.model_copy(update={"max_response_tokens": params.max_response_tokens + 1})
        return await super().get_token_output_from_token_input(token_input, **{**asked, "sampling_params": longer})


class FallingShort(BigramEngine):
    """Returns one completion too few."""

    async def get_token_outputs_from_token_input(self, token_input: Any, *, seeds: Any, **more: Any) -> Any:
        return await super().get_token_outputs_from_token_input(token_input, seeds=seeds[:-1] or seeds, **more)


class Capped(BigramEngine):
    async def get_token_outputs_from_token_input(self, token_input: Any, *, seeds: Any, **more: Any) -> Any:
        return await super().get_token_outputs_from_token_input(token_input, seeds=seeds[:20], **more)


class Unstoppable(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        without = asked["sampling_params"].model_copy(update={"stop_token_ids": ()})
        return await super().get_token_output_from_token_input(token_input, **{**asked, "sampling_params": without})


class DroppingStops(Noncompliant):
    """Drops the stop token, as some engines do."""

    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        if output.finish_reason is FinishReason.LENGTH or len(output.token_ids) == 1 or output.logprobs is None:
            return output
        return answering(output, token_ids=output.token_ids[:-1], logprobs=output.logprobs[:-1])


class AlwaysDone(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, finish_reason=FinishReason.STOP)


class NeverDone(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, finish_reason=FinishReason.LENGTH)


class Silent(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, logprobs=None)


class Padded(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, logprobs=np.zeros(len(output.token_ids), np.float32))


class OneMissing(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        assert output.logprobs is not None
        return answering(output, logprobs=output.logprobs[1:])


class WithProbabilities(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        assert output.logprobs is not None
        return answering(output, logprobs=np.exp(output.logprobs))


class WithNaN(Noncompliant):
    def lie(self, output: TokenOutput, asked: dict[str, Any]) -> Any:
        return answering(output, logprobs=np.full(len(output.token_ids), np.nan, np.float32))


class NeverGreedy(BigramEngine):
    def choose(self, distribution: Any, params: SamplingParams, rng: np.random.Generator) -> int:
        return int(rng.choice(VOCABULARY, p=np.exp(distribution)))


class OfOneSeed(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        return await super().get_token_output_from_token_input(token_input, **{**asked, "seed": 7})


class OfOneSeedOneByOne(OfOneSeed):
    async def get_token_outputs_from_token_input(self, *arguments: Any, seeds: Any, **asked: Any) -> list[TokenOutput]:
        honest = BigramEngine(self.table, self.parser)
        return await honest.get_token_outputs_from_token_input(*arguments, seeds=seeds, **asked)


class CopyingGroups(BigramEngine):
    """Samples once for a whole group."""

    async def get_token_outputs_from_token_input(self, token_input: Any, *, seeds: Any, **more: Any) -> Any:
        [output] = await super().get_token_outputs_from_token_input(token_input, seeds=seeds[:1], **more)
        return [output] * len(seeds)


class Unrepeatable(BigramEngine):
    asked = 0

    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        self.asked += 1
        return await super().get_token_output_from_token_input(token_input, **{**asked, "seed": self.asked})


class RememberingParams(BigramEngine):
    """Uses the parameters of the latest call for all running calls."""

    params = SamplingParams()

    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        self.params = asked["sampling_params"]
        await asyncio.sleep(0)
        return await super().get_token_output_from_token_input(token_input, **{**asked, "sampling_params": self.params})


class MixingUp(BigramEngine):
    """Answers a call with the prompt of another."""

    waiting: tuple[Any, ...] = ()

    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        self.waiting = (*self.waiting, token_input)
        await asyncio.sleep(0)
        *self.waiting, mine = self.waiting
        return await super().get_token_output_from_token_input(mine, **asked)


class DyingWhenCancelled(BigramEngine):
    is_dead = False

    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        if self.is_dead:
            raise EngineError("dead")
        try:
            return await super().get_token_output_from_token_input(*arguments, **asked)
        except asyncio.CancelledError:
            self.is_dead = True
            raise


class CancellingNeighbours(BigramEngine):
    running: tuple[asyncio.Task[TokenOutput], ...] = ()

    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        task = asyncio.create_task(super().get_token_output_from_token_input(*arguments, **asked))
        self.running = (*self.running, task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            for each in self.running:
                each.cancel()
            raise


class IgnoringCancellation(BigramEngine):
    async def get_token_outputs_from_token_input(self, *arguments: Any, **asked: Any) -> list[TokenOutput]:
        try:
            return await super().get_token_outputs_from_token_input(*arguments, **asked)
        except asyncio.CancelledError:
            await asyncio.sleep(2 * LIMIT_SECONDS)
            raise


class FailingWhenCancelled(BigramEngine):
    async def get_token_outputs_from_token_input(self, *arguments: Any, **asked: Any) -> list[TokenOutput]:
        try:
            return await super().get_token_outputs_from_token_input(*arguments, **asked)
        except asyncio.CancelledError as error:
            raise EngineError("given up") from error


def has_foreign_id(token_input: Any) -> bool:
    return isinstance(token_input, np.ndarray) and int(token_input.max()) >= VOCABULARY


def clipped(token_input: TokenInput) -> TokenIds:
    return token_ids(np.minimum(np.asarray(token_input), VOCABULARY - 1))


class TakingAnyId(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        return await super().get_token_output_from_token_input(clipped(token_input), **asked)


class TakingOneIdTooMany(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        if VOCABULARY in token_input:
            token_input = clipped(token_input)
        return await super().get_token_output_from_token_input(token_input, **asked)


class StumblingOverIds(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        self.table[np.asarray(token_input)]
        return await super().get_token_output_from_token_input(token_input, **asked)


class HangingOnIds(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        if has_foreign_id(token_input):
            await asyncio.Event().wait()
        return await super().get_token_output_from_token_input(token_input, **asked)


class SpoiltByIds(BigramEngine):
    """Fails every call after one prompt that should be rejected."""

    is_spoilt = False

    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        self.is_spoilt = self.is_spoilt or has_foreign_id(token_input)
        await asyncio.sleep(0)
        if self.is_spoilt:
            raise EngineError("the batch failed")
        return await super().get_token_output_from_token_input(token_input, **asked)


class WithoutVersion(BigramEngine):
    weight_version = 3

    def output(self, ids: Any, logprobs: Any, params: Any, version: int) -> TokenOutput:
        return super().output(ids, logprobs, params, 0)


class ExploringInTraining(BigramEngine):
    """Stays greedy after a validation."""

    is_greedy = False

    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        self.is_greedy = self.is_greedy or asked["is_validation"]
        if self.is_greedy:
            asked["sampling_params"] = asked["sampling_params"].model_copy(update={"temperature": 0.0})
        return await super().get_token_output_from_token_input(*arguments, **asked)


class OtherInValidation(BigramEngine):
    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        if asked["is_validation"]:
            asked["sampling_params"] = asked["sampling_params"].model_copy(update={"max_response_tokens": 1})
        return await super().get_token_output_from_token_input(*arguments, **asked)


def without_media(token_input: Any) -> list[int]:
    return [token for token in token_input if not hasattr(token, "sha256")]


class LeavingMediaOut(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        return await super().get_token_output_from_token_input(token_ids(without_media(token_input)), **asked)


class RefusingMediaNamelessly(BigramEngine):
    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> TokenOutput:
        if len(without_media(token_input)) < len(token_input):
            raise EngineError("no images, please")
        return await super().get_token_output_from_token_input(token_input, **asked)


class Scorer(BigramEngine):
    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        return self.score(await super().compute_logprobs(tokens, start=start), tokens, start)

    def score(self, scores: Floats, tokens: TokenIds, start: int) -> Any:
        raise NotImplementedError


class ScoringTheNext(Scorer):
    def score(self, scores: Floats, tokens: TokenIds, start: int) -> Any:
        return np.roll(scores, 1)


class ScoringThePromptToo(Scorer):
    def score(self, scores: Floats, tokens: TokenIds, start: int) -> Any:
        return np.pad(scores, (start, 0))


class KnowingNothing(Scorer):
    def score(self, scores: Floats, tokens: TokenIds, start: int) -> Any:
        return np.full_like(scores, np.nan)


class SayingItScores(BigramEngine):
    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        return await RolloutEngine.compute_logprobs(self, tokens, start=start)


class AfterTheCut(BigramEngine):
    """Returns log-probabilities of the distribution after top_k."""

    def output(self, ids: Any, logprobs: Any, params: SamplingParams, version: int) -> TokenOutput:
        left: Sequence[float] = [0.0] * len(ids) if params.top_k == 1 else logprobs
        return super().output(ids, list(left), params, version)


class Hanging(BigramEngine):
    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        await asyncio.Event().wait()
        raise AssertionError


class CancelledInside(BigramEngine):
    async def get_token_output_from_token_input(self, *arguments: Any, **asked: Any) -> TokenOutput:
        raise asyncio.CancelledError


HANGING = (Hanging, HangingOnIds, IgnoringCancellation)
NONCOMPLIANT: list[tuple[type[BigramEngine], str, str]] = [
    (WithForeignIds, "tokens", "ids outside the vocabulary of 258"),
    (WithNothing, "tokens", "a completion is empty"),
    (WithLists, "tokens", "must return a TokenOutput"),
    (Overlong, "tokens", "but max_response_tokens is 8"),
    (FallingShort, "tokens", "16 completions were requested"),
    (Hanging, "tokens", "no answer within 1 s"),
    (CancelledInside, "tokens", "a call raised CancelledError without being cancelled"),
    (Unstoppable, "ends", "continues after a stop token"),
    (DroppingStops, "ends", "without its stop token"),
    (AlwaysDone, "ends", "finish_reason is 'stop', not 'length'"),
    (NeverDone, "ends", "finish_reason is 'length', not 'stop'"),
    (Silent, "log-probabilities", "has no log-probabilities"),
    (Padded, "log-probabilities", "all log-probabilities are 0"),
    (OneMissing, "log-probabilities", "log-probabilities of shape"),
    (WithProbabilities, "log-probabilities", "finite and at most 0"),
    (WithNaN, "log-probabilities", "finite and at most 0"),
    (NeverGreedy, "greedy", "at temperature 0, one prompt has several completions"),
    (OfOneSeed, "seeds", "different seeds in one call all give"),
    (OfOneSeedOneByOne, "seeds", "different seeds one by one all give"),
    (CopyingGroups, "seeds", "different seeds in one call all give"),
    (Unrepeatable, "seeds", "the same seed gives different tokens"),
    (Capped, "groups", "32 completions were requested"),
    (RememberingParams, "concurrency", "at most"),
    (MixingUp, "concurrency", "compute_logprobs returned"),
    (DyingWhenCancelled, "cancellation", "raised EngineError: dead"),
    (CancellingNeighbours, "cancellation", "a call raised CancelledError without being cancelled"),
    (IgnoringCancellation, "cancellation", "did not end within 1 s"),
    (FailingWhenCancelled, "cancellation", "a cancelled call raised EngineError"),
    (TakingAnyId, "vocabulary", "a prompt with token id 2147483647 must raise"),
    (TakingOneIdTooMany, "vocabulary", "a prompt with token id 258 must raise"),
    (StumblingOverIds, "vocabulary", "raised IndexError"),
    (HangingOnIds, "vocabulary", "no answer within 1 s"),
    (SpoiltByIds, "vocabulary", "rejecting a prompt changes the completions"),
    (WithoutVersion, "versions", "completions have weight version 0 to 3"),
    (ExploringInTraining, "validation", "a call with is_validation"),
    (OtherInValidation, "validation", "is_validation changes the sampled tokens"),
    (LeavingMediaOut, "media", "a prompt with an image must raise"),
    (RefusingMediaNamelessly, "media", "must name the engine and the kind of media"),
    (ScoringTheNext, "scores", "compute_logprobs returned"),
    (ScoringThePromptToo, "scores", "compute_logprobs returned shape"),
    (KnowingNothing, "scores", "NaN for every token"),
    (SayingItScores, "scores", "raised NotImplementedError"),
    (AfterTheCut, "scores", "log-probabilities before top_k and top_p"),
]
