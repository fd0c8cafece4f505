"""The rollout engine: batches requests from the event loop for the worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.types import (
    Floats,
    MediaChunk,
    SamplingParams,
    TokenIds,
    TokenInput,
    TokenOutput,
    text_only,
    token_ids,
)
from rllm_local.decoders import Decoder
from rllm_local.memory import CACHE_STEP_POSITIONS, advice
from rllm_local.sampler import Request, ScoreRequest, generate, score
from rllm_local.vision import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GPU_TOKENS_AHEAD = 16  # between copies to the host, each of which waits for the GPU


@dataclass(frozen=True)
class _Waiting:
    request: Request | ScoreRequest
    future: asyncio.Future[Any]

    @property
    def rows(self) -> int:
        return len(self.request.seeds) if isinstance(self.request, Request) else 1

    @property
    def positions(self) -> int:
        """Positions that each row takes in the cache; a scored sequence keeps none."""
        if isinstance(self.request, ScoreRequest):
            return 0
        return len(self.request.prompt_ids) + self.request.params.max_response_tokens


class LocalEngine(RolloutEngine):
    """Samples from a model in this process.

    Requests that arrive in one tick of the event loop, or while a batch runs, form the next batch, regardless of their
    prompts and parameters. New weights take effect between batches: a running batch keeps the weights and the version
    it started with.

    Args:
        decoder: Forward pass.
        parser: Parser that produces the prompts.
        executor: Executor with one worker thread, which runs every batch.
        device: Device of the decoder.
        vocabulary_size: Upper bound of token ids, exclusive.
        max_model_tokens: Maximum length of prompt plus completion; None for any length.
        max_batch_rows: Maximum sequences sampled concurrently.
        takes_media: Whether prompts may contain images of ``parser``.
        takes_turns: Whether the thread of ``executor`` also calls `load_weights`.
        max_cache_positions: Maximum positions of all sequences of a batch; None for any number.
    """

    name: ClassVar[str] = "local"
    computes_logprobs: ClassVar[bool] = True

    def __init__(
        self,
        decoder: Decoder,
        parser: BaseParser | None,
        executor: Executor,
        *,
        device: torch.device,
        vocabulary_size: int,
        max_model_tokens: int | None,
        max_batch_rows: int,
        takes_media: bool = False,
        takes_turns: bool = False,
        max_cache_positions: int | None = None,
    ) -> None:
        self._decoder = decoder
        self.parser = parser
        self._executor = executor
        self._device = device
        self.vocabulary_size: int = vocabulary_size
        self._max_model_tokens = max_model_tokens
        self._max_batch_rows = max_batch_rows
        self._takes_media = takes_media
        self._takes_turns = takes_turns
        self._max_cache_positions = max_cache_positions
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and not takes_turns:
            # In the training stream, each token would wait for the queued kernels of a whole pass.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))  # for the decoder's weights
        self._waiting: list[_Waiting] = []
        self._is_busy = False
        self._is_closed = False
        self._version = self.weight_version  # version of the decoder's weights; the next batch uses `weight_version`
        self._loaded: tuple[Any, int] | None = None
        self._lock = Lock()

    @property
    def supports_token_in_token_out(self) -> bool:
        """True."""
        return True

    @property
    def max_model_tokens(self) -> int | None:
        """Maximum number of positions of the model; None if it has no limit."""
        return self._max_model_tokens

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """See `RolloutEngine`."""
        outputs = await self.get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=(seed,), is_validation=is_validation
        )
        return outputs[0]

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """See `RolloutEngine`; prefills the prompt once."""
        prompt_ids, media = self._read(token_input)
        self.check_prompt(prompt_ids, sampling_params.max_response_tokens)
        most = self._most_rows(len(prompt_ids) + sampling_params.max_response_tokens)
        parts = [
            Request(prompt_ids, sampling_params, seeds[start : start + most], media)
            for start in range(0, len(seeds), most)
        ]
        waiting = self._enqueue(parts)
        return [output for item in waiting for output in await item.future]

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        """See `RolloutEngine`; requests that arrive in one tick of the event loop are scored together."""
        if not 1 <= start < len(tokens):
            raise EngineError(f"engine {self.name!r} cannot score tokens {start} to {len(tokens)} of a sequence")
        self.check_prompt(tokens, 0)
        [waiting] = self._enqueue([ScoreRequest(tokens, start)])
        known: Floats = await waiting.future
        return known

    def _enqueue(self, requests: Sequence[Request | ScoreRequest]) -> list[_Waiting]:
        if self._is_closed:
            raise EngineError(f"engine {self.name!r} is shut down")
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(request, loop.create_future()) for request in requests]
        self._waiting += waiting
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._start_batch, loop)
        return waiting

    def _read(self, token_input: TokenInput) -> tuple[TokenIds, list[Placement]]:
        """Returns a prompt as ids, and the positions of its images; ids at these positions are never read."""
        if not self._takes_media or isinstance(token_input, np.ndarray):
            return text_only(token_input, f"engine {self.name!r}"), []
        ids: list[int] = []
        media: list[Placement] = []
        for token in token_input:
            if isinstance(token, MediaChunk):
                media.append((len(ids), token))
                ids += [0] * token.length_tokens
            else:
                ids.append(token)
        return token_ids(ids), media

    def _most_rows(self, positions: int) -> int:
        """Returns the maximum number of sequences of a length that fit in a batch."""
        if self._max_cache_positions is None or not positions:
            return self._max_batch_rows
        return max(1, min(self._max_batch_rows, self._max_cache_positions // (positions + CACHE_STEP_POSITIONS)))

    def _start_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        batch: list[_Waiting] = []
        rows, positions = 0, 0
        kind = type(self._waiting[0].request) if self._waiting else None  # A batch either samples or scores.
        while self._waiting and type(self._waiting[0].request) is kind:
            item = self._waiting[0]
            longest = max(positions, item.positions)
            if rows + item.rows > self._most_rows(longest):
                break
            self._waiting.pop(0)
            if not item.future.done():  # The caller may have cancelled it.
                batch.append(item)
                rows, positions = rows + item.rows, longest
        if not batch:
            self._is_busy = False
            return
        running = loop.run_in_executor(self._executor, self._run, [item.request for item in batch])
        running.add_done_callback(partial(self._end_batch, loop, batch))

    def _end_batch(
        self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting], done: asyncio.Future[list[Any]]
    ) -> None:
        error = None if done.cancelled() else done.exception()
        for position, item in enumerate(batch):
            if item.future.done():
                continue
            if done.cancelled():
                item.future.cancel()
            elif error is not None:
                why = advice(error, training=False) or f"{type(error).__name__}: {error}"
                failure = EngineError(f"engine {self.name!r} failed: {why}")
                failure.__cause__ = error
                item.future.set_exception(failure)
            else:
                item.future.set_result(done.result()[position])
        loop.call_soon(self._start_batch, loop)

    def _run(self, batch: list[Request | ScoreRequest]) -> list[Any]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                return self._run_on_stream(batch)
            finally:
                self._decoder.release()

    def _run_on_stream(self, batch: list[Request | ScoreRequest]) -> list[Any]:
        with self._lock:
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            # Memory of other streams is reused once nothing refers to it, even while this stream still reads it.
            if self._stream is not None:
                self._stream.synchronize()
            weights, self._version = loaded
            self._decoder.use(weights)
            if self._stream is not None:
                self._stream.synchronize()
        scorings = [item for item in batch if isinstance(item, ScoreRequest)]
        if scorings:
            return score(
                self._decoder,
                scorings,
                self._device,
                vocabulary_size=self.vocabulary_size,
                is_unwanted=lambda: self._is_closed,
            )
        requests = [item for item in batch if isinstance(item, Request)]
        return generate(
            self._decoder,
            requests,
            self._device,
            weight_version=self._version,
            is_unwanted=lambda: self._is_closed,
            tokens_ahead=GPU_TOKENS_AHEAD if self._device.type == "cuda" else 1,
        )

    def close(self) -> None:
        """Rejects further requests and cancels waiting ones; a running batch stops at its next token."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            item.future.cancel()

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Loads the current weights of ``model`` for the next batch.

        The calling thread copies the weights, so ``model`` must not change meanwhile. It does not wait for a running
        batch. While it runs, no more sets of weights exist than after it.
        """
        if self._takes_turns:  # no batch can be running
            self._loaded, self.weight_version = (self._decoder.copied(model, self._decoder.weights), version), version
            return
        with self._lock:
            if self._loaded is not None:  # no batch has started since; the next one waits here
                self._publish(self._decoder.copied(model, self._loaded[0]), version)
                return
        weights = self._decoder.copied(model)
        with self._lock:
            self._publish(weights, version)

    def _publish(self, weights: Any, version: int) -> None:
        if self._stream is not None:  # it must not read what the training stream has yet to write
            torch.cuda.current_stream(self._device).synchronize()
        self._loaded, self.weight_version = (weights, version), version
