"""The output head in training: computes log-probabilities and entropies of sampled tokens from hidden states.

With a real vocabulary, the logits of a pass are larger than the rest of a small model. They therefore exist for one
chunk of nodes at a time, and are recomputed in the backward pass. A pass that fits in one chunk keeps its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from rllm_core.errors import ConfigError
from rllm_local.memory import chunk_nodes

ADDED_TOKENS = 2**14  # rows of the bfloat16 product that exist before they are added to the float32 gradient


def decoder_of(model: Any) -> Any:
    """Returns the part of a model that computes hidden states.

    Transformers' own ``get_decoder`` returns more than that for Llama 4, and the head for ModernBERT.

    Raises:
        ConfigError: If no part is found.
    """
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    for found in (decoder, getattr(decoder, "model", None), model.base_model):
        if found is not None and all(module is not head for module in found.modules()):
            return found
    raise ConfigError(
        f"model.path: backend local cannot train models of type {model.config.model_type!r}, because transformers does "
        "not say which part of them computes hidden states; use another model"
    )


class Chunk(NamedTuple):
    """Nodes ``start`` to ``end``, and the tokens they predict."""

    start: int
    end: int
    tokens: torch.Tensor


class Head:
    """The head of a model.

    Args:
        model: Causal LM.
        temperature: Sampling temperature, which divides the logits.
        autocast_dtype: Precision of the forward passes; None for the precision of the weights.

    Attributes:
        decoder: Part of the model that computes hidden states.
        takes_hidden_states: Whether `numbers` can compute logits from the decoder's last hidden states. Otherwise, the
            model computes all logits of a pass at once.
    """

    def __init__(self, model: Any, temperature: float, autocast_dtype: torch.dtype | None) -> None:
        self.decoder = decoder_of(model)
        self._model = model
        self._module: Any = model.get_output_embeddings()
        self._temperature = temperature
        self._dtype = autocast_dtype
        self._is_bare = True
        probe = torch.arange(4, device=model.device)[None]
        with torch.no_grad():
            hidden = self.decoder(input_ids=probe, use_cache=False).last_hidden_state
            logits = self._model(input_ids=probe, use_cache=False).logits
            self._is_bare = torch.equal(self._module(hidden), logits)
            self.takes_hidden_states = self._is_bare or torch.equal(self._raw_logits(hidden[0]), logits[0])

    def numbers(
        self, hidden: torch.Tensor, node_of_token: torch.Tensor, targets: torch.Tensor, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probabilities of tokens and, with ``entropy``, entropies at them; both ``(tokens,)``.

        Args:
            hidden: Last hidden states of the nodes, ``(nodes, hidden)``.
            node_of_token: Node that predicts each token, ``(tokens,)``.
            targets: Tokens, ``(tokens,)``.
            entropy: Whether to compute entropies.
        """
        most = chunk_nodes(self._module.weight.shape[0], on_gpu=hidden.is_cuda)
        if len(hidden) <= most:
            return self._numbers(hidden, node_of_token, targets, entropy)
        chunks = _chunks(node_of_token, len(hidden), most)
        if self._is_bare and type(self._module) is torch.nn.Linear and self._module.bias is None:
            found = _ChunkedHead.apply(
                hidden, self._module.weight, node_of_token, targets, chunks, self._temperature, self._dtype, entropy
            )
            return found[0], found[1] if entropy else None
        parts = [
            checkpoint(
                self._numbers,
                hidden[start:end],
                node_of_token[tokens] - start,
                targets[tokens],
                entropy,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start, end, tokens in chunks
        ]
        back = torch.cat([chunk.tokens for chunk in chunks]).argsort()
        logprobs = torch.cat([part[0] for part in parts])[back]
        return logprobs, torch.cat([part[1] for part in parts])[back] if entropy else None

    def numbers_of_logits(
        self, logits: torch.Tensor, node_of_token: torch.Tensor, targets: torch.Tensor, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Does the same as `numbers` from the logits at the nodes, ``(nodes, vocabulary)``."""
        logits = logits.float()
        if self._temperature != 1:
            logits = logits / self._temperature
        distributions = torch.log_softmax(logits, -1)
        logprobs = distributions[node_of_token, targets]
        return logprobs, -(distributions.exp() * distributions).sum(-1)[node_of_token] if entropy else None

    def _numbers(
        self, hidden: torch.Tensor, node_of_token: torch.Tensor, targets: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.autocast(hidden.device.type, self._dtype, enabled=self._dtype is not None):
            logits = self._raw_logits(hidden)
        return self.numbers_of_logits(logits, node_of_token, targets, entropy=entropy)

    def _raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the model's logits for hidden states; some models scale or cap the output of their head."""
        logits: torch.Tensor
        if self._is_bare:
            logits = self._module(hidden)
        else:
            unread = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            with _decoder_that_returns(self.decoder, hidden[None]):
                logits = self._model(input_ids=unread, use_cache=False).logits[0]
        return logits


@contextmanager
def _decoder_that_returns(decoder: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Replaces a decoder's forward pass by its result, so that the model only computes logits."""
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        del decoder.forward


def _chunks(node_of_token: torch.Tensor, nodes: int, most: int) -> list[Chunk]:
    """Divides nodes into chunks of at most ``most``."""
    starts = range(0, nodes, most)
    ordered, order = node_of_token.sort(stable=True)
    edges = torch.searchsorted(ordered, torch.tensor([*starts, nodes], device=ordered.device)).tolist()
    return [
        Chunk(start, min(nodes, start + most), order[first:last])
        for start, first, last in zip(starts, edges, edges[1:], strict=False)
    ]


class _ChunkedHead(torch.autograd.Function):
    """Log-probabilities and entropies with the logits of one chunk at a time.

    The gradient of the weight is added directly to its ``grad``, which a tied embedding shares. This saves one matrix
    of the weight's size, and the addition of two such matrices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        node_of_token: torch.Tensor,
        targets: torch.Tensor,
        chunks: list[Chunk],
        temperature: float,
        dtype: torch.dtype | None,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities, and entropies; the latter are empty without ``entropy``."""
        inputs, matrix = hidden.to(dtype or weight.dtype), weight.detach().to(dtype or weight.dtype)
        buffers = _buffers(chunks, matrix)
        normalizers = torch.empty(len(hidden), 1, device=hidden.device)
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropies = torch.empty(len(hidden) if entropy else 0, 1, device=hidden.device)
        for start, end, tokens in chunks:
            logits = _scaled_logits(inputs[start:end], matrix, temperature, buffers[0])
            largest = logits.amax(-1, keepdim=True)
            weights = torch.exp(logits.sub_(largest), out=buffers[1][: end - start])
            total = weights.sum(-1, keepdim=True)
            places = node_of_token[tokens] - start
            logprobs[tokens] = logits[places, targets[tokens]] - total.log()[places, 0]
            normalizers[start:end] = largest + total.log()
            if entropy:
                entropies[start:end] = total.log() - weights.mul_(logits).sum(-1, keepdim=True) / total
        ctx.save_for_backward(inputs, matrix, node_of_token, targets, normalizers, entropies)
        ctx.weight, ctx.chunks, ctx.temperature, ctx.hidden_dtype = weight, chunks, temperature, hidden.dtype
        return logprobs, entropies[node_of_token, 0] if entropy else entropies[:, 0]

    @staticmethod
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropies: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradient of the hidden states, and the weight's gradient if it has no ``grad`` to add to."""
        inputs, matrix, node_of_token, targets, normalizers, entropies = ctx.saved_tensors
        of_hidden = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        of_weight, added = None, ctx.weight.grad if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[1] and added is None:
            of_weight = added = torch.zeros_like(ctx.weight)
        of_node = torch.zeros_like(normalizers).index_add_(0, node_of_token, of_logprobs[:, None])
        if len(entropies):
            entropy_of_node = torch.zeros_like(normalizers).index_add_(0, node_of_token, of_entropies[:, None])
        buffers = _buffers(ctx.chunks, matrix)
        for start, end, tokens in ctx.chunks:
            logprobs = _scaled_logits(inputs[start:end], matrix, ctx.temperature, buffers[0])
            logprobs.sub_(normalizers[start:end])
            if len(entropies):
                probabilities = torch.exp(logprobs, out=buffers[1][: end - start])
                logprobs.add_(entropies[start:end]).mul_(entropy_of_node[start:end]).add_(of_node[start:end])
                of_logits = logprobs.mul_(probabilities).neg_()
            else:
                of_logits = logprobs.exp_().mul_(-of_node[start:end])
            places = (node_of_token[tokens] - start, targets[tokens])
            of_logits.index_put_(places, of_logprobs[tokens], accumulate=True)
            if ctx.temperature != 1:
                of_logits.div_(ctx.temperature)
            narrow = of_logits.to(matrix.dtype)
            if of_hidden is not None:
                torch.mm(narrow, matrix, out=of_hidden[start:end])
            if added is not None and added.dtype == narrow.dtype:
                added.addmm_(narrow.t(), inputs[start:end])
            elif added is not None:
                _add_product(added, narrow, inputs[start:end])
            del narrow  # free it before the next chunk needs its memory
        if of_hidden is not None:
            of_hidden = of_hidden.to(ctx.hidden_dtype)
        return of_hidden, of_weight, None, None, None, None, None, None


def _add_product(added: torch.Tensor, of_logits: torch.Tensor, inputs: torch.Tensor) -> None:
    """Adds the bfloat16 gradient of a weight to a float32 one, one part of the product at a time."""
    for part, columns in zip(torch.split(added, ADDED_TOKENS), torch.split(of_logits, ADDED_TOKENS, 1), strict=True):
        part.add_(torch.mm(columns.t(), inputs))


def _buffers(chunks: list[Chunk], matrix: torch.Tensor) -> torch.Tensor:
    """Returns memory for all chunks, because faulting in new blocks per chunk takes time. Unused memory is free."""
    return torch.empty(2, chunks[0].end, len(matrix), device=matrix.device)


def _scaled_logits(
    inputs: torch.Tensor, matrix: torch.Tensor, temperature: float, buffer: torch.Tensor
) -> torch.Tensor:
    """Computes logits into ``buffer``."""
    logits = buffer[: len(inputs)]
    if inputs.dtype == logits.dtype:
        torch.mm(inputs, matrix.t(), out=logits)
    else:
        logits.copy_(torch.mm(inputs, matrix.t()))
    return logits if temperature == 1 else logits.div_(temperature)
