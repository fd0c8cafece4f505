"""The forward pass of the sampler on a GPU, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from rllm_local.fused import FusedDecoder

PLAIN_STEPS = 4


class GraphDecoder(FusedDecoder):
    """Decodes by replaying a graph of the layers' kernels, whose launch takes longer than the kernels themselves.

    A graph always reads and writes the same memory. So it reads the whole cache, under a mask, and is captured again
    after the cache has grown. A batch whose rows have just changed is decoded without a graph for ``PLAIN_STEPS``
    steps, since a capture takes longer than a step, and completions that branch change the rows at almost every step.
    """

    title: ClassVar[str] = "fused decoder with CUDA graphs"
    probe_steps: ClassVar[int] = PLAIN_STEPS + 2

    def __init__(self, model: Any, dtype: torch.dtype, **options: Any) -> None:
        self._steps = 0  # since the rows have changed
        self._captured_positions = 0
        self._graph: Any = None
        self._stream: Any = None
        super().__init__(model, dtype, **options)

    def logits(self, prompts: torch.Tensor, padding: torch.Tensor, count: int) -> torch.Tensor:
        """See `Decoder`."""
        self._steps = self._captured_positions = 0
        return super().logits(prompts, padding, count)

    def select(self, rows: torch.Tensor) -> None:
        """See `Decoder`."""
        self._steps = self._captured_positions = 0
        super().select(rows)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        self._steps += 1
        if self._steps <= PLAIN_STEPS:
            return super().step(tokens)
        if self._length >= self._captured_positions:
            self._prepare(len(tokens))
            self._replay, self._output = self._captured()
        self._tokens.copy_(tokens)
        self._replay()
        self._length += 1
        return self._logits(self._output)

    def _prepare(self, rows: int) -> None:
        """Allocates what the graph reads and changes: tokens, ``(rows,)``, their position, and the mask.

        The mask hides the cache's free positions only if the numbers there are finite.
        """
        self._make_room()
        positions, device = self._cache.positions, self._embedding.device
        self._captured_positions = positions
        self._grow_rotations(positions)
        for cached in (*self._cache.keys, *self._cache.values):
            cached[:, :, self._length :] = 0
        self._tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self._position = torch.full((1,), self._length, device=device)
        nothing = torch.zeros(rows, 1, 1, 0, device=device, dtype=self._dtype)
        seen = nothing if self._bias is None else self._bias
        seen = F.pad(seen, (0, self._length - seen.shape[-1]))
        self._mask = F.pad(seen, (0, positions - self._length), value=float("-inf"))

    def _captured(self) -> tuple[Callable[[], object], torch.Tensor]:
        """Returns what replays a step, and the tensor that it writes the last layer's output to."""
        device = self._embedding.device
        current = torch.cuda.current_stream(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._graph is None:  # loading kernels and reserving workspaces cannot be captured
                self._read_token()
                self._position -= 1
            graph = torch.cuda.CUDAGraph()
            # Another thread may train meanwhile. A deleted graph's memory is freed late, so the next one takes it over.
            pool = None if self._graph is None else self._graph.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = self._read_token()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graph = graph
        return graph.replay, output

    def _read_token(self) -> torch.Tensor:
        """Appends one position to the cache, and returns the last layer's output at it, ``(rows, hidden)``."""
        column = self._position
        self._mask.index_fill_(3, column, 0.0)
        if self._padding is None:
            rotations = self._rotations[column]
        else:
            rotations = self._rotations[column - self._padding][:, None]
        x = self._embedded(self._tokens)
        for layer, keys, values in zip(self._layers, self._cache.keys, self._cache.values, strict=True):
            q, k, v = self._queries_keys_values(x, layer, rotations)
            keys.index_copy_(2, column, k[:, :, None])
            values.index_copy_(2, column, v[:, :, None])
            x = self._mlp(x, self._attended(q, keys, values, self._mask), layer)
        self._position += 1
        return x
