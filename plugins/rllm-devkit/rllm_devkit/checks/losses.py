"""Contract checks for policy losses; see `rllm_devkit.checks.check_policy_loss`. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss, clipped_of, losses_of
from rllm_core.errors import UserError
from rllm_devkit.checks.configured import Check
from rllm_devkit.checks.results import NotApplicable, Violation


def drawn_inputs(rng: np.random.Generator, examples: int, *, moved: float | None = None) -> Iterator[LossInputs]:
    """Draws batches of some sequences, in float64, with positive, negative and zero advantages.

    Args:
        rng: Random generator.
        examples: Number of batches.
        moved: Scale of the log-probability difference to the old policy; drawn if None.
    """
    for _ in range(examples):
        lengths = rng.integers(1, 6, rng.integers(1, 5))
        tokens = int(lengths.sum())
        logprobs = -rng.exponential(size=tokens)
        scale = float(rng.choice([0.0, 0.05, 0.5, 3.0])) if moved is None else moved
        advantages = rng.normal(size=tokens) * (rng.random(tokens) < 0.9)
        yield LossInputs(
            torch.from_numpy(logprobs).requires_grad_(),
            torch.from_numpy(logprobs + rng.normal(scale=scale, size=tokens) if scale else logprobs.copy()),
            torch.from_numpy(advantages),
            torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            len(lengths),
        )


def _computed(loss: PolicyLoss, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(tokens,)`` losses, and the gradient of their sum."""
    try:
        losses = losses_of(loss, inputs)
        [gradient] = torch.autograd.grad(losses.sum(), [inputs.logprobs], allow_unused=True)
    except UserError as error:
        raise Violation(str(error)) from error
    if gradient is None:
        raise Violation("the gradient of the losses does not go through inputs.logprobs")
    return losses.detach(), gradient


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-7, atol=1e-10)


def _shapes(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    tokens = 0
    for inputs in drawn_inputs(rng, examples):
        tokens += len(_computed(loss, inputs)[0])
        try:
            clipped_of(loss, inputs)
        except UserError as error:
            raise Violation(str(error)) from error
    return f"{tokens} tokens in {examples} batches"


def _edges(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    lowest = -1e4  # about the log-probability of a token whose float32 softmax has underflowed
    for mine, old in ((0.0, 0.0), (lowest, 0.0), (0.0, lowest), (lowest, lowest)):
        for advantage in (0.0, 1e-6, -1e-6, 1e3, -1e3):
            for tokens in (1, 3):
                logprobs = torch.full((tokens,), mine, requires_grad=True)
                inputs = LossInputs(
                    logprobs,
                    torch.full((tokens,), old),
                    torch.full((tokens,), advantage),
                    torch.zeros(tokens, dtype=torch.int64),
                    1,
                )
                _, gradient = _computed(loss, inputs)
                if advantage == 0 and gradient.any():
                    raise Violation("a token with advantage 0 has a non-zero gradient")
    return "finite in float32 for log-probabilities from 0 to -10000, advantages up to 1000 and single tokens"


def _gradient(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    for inputs in drawn_inputs(rng, examples, moved=0.0):
        constant = replace(inputs, logprobs=inputs.logprobs.detach())
        if losses_of(loss, constant).requires_grad:
            raise Violation("the losses have a gradient that does not come from inputs.logprobs")
        sign = torch.from_numpy(rng.choice([-1.0, 1.0], inputs.sequences))[inputs.sequence_of_token]
        _, gradient = _computed(loss, replace(inputs, advantages=sign))
        if not (gradient * sign < 0).all():
            raise Violation(
                "on policy, gradient descent must raise the probability of tokens with positive advantages and "
                "lower it for negative ones; check the sign"
            )
    return "through inputs.logprobs only; on policy, its sign follows the advantages"


def _scale(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    for inputs in drawn_inputs(rng, examples):
        losses, gradient = _computed(loss, inputs)
        for factor in (0.5, 3.0):
            scaled = _computed(loss, replace(inputs, advantages=factor * inputs.advantages))
            if not _is_same(scaled[0], factor * losses) or not _is_same(scaled[1], factor * gradient):
                raise Violation(
                    "losses and gradients must scale with the advantages, because corrections are weights on them"
                )
    return "losses and gradients scale with the advantages"


def _sequence_by_sequence(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    for inputs in drawn_inputs(rng, examples):
        together = _computed(loss, inputs)
        for number in range(inputs.sequences):
            chosen = inputs.sequence_of_token == number
            assert inputs.old_logprobs is not None
            alone = LossInputs(
                inputs.logprobs.detach()[chosen].requires_grad_(),
                inputs.old_logprobs[chosen],
                inputs.advantages[chosen],
                torch.zeros(int(chosen.sum()), dtype=torch.int64),
                1,
            )
            if not all(
                _is_same(one, other[chosen]) for one, other in zip(_computed(loss, alone), together, strict=True)
            ):
                raise Violation("the losses of a sequence depend on other sequences, and so on how a step is split")
    return f"{examples} batches"


def _old_logprobs(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    if loss.needs_old_logprobs:
        raise NotApplicable("needs_old_logprobs is true")
    for inputs in drawn_inputs(rng, examples):
        without = _computed(loss, replace(inputs, old_logprobs=None))
        if not all(map(_is_same, _computed(loss, inputs), without)):
            raise Violation("it depends on inputs.old_logprobs; set needs_old_logprobs = True")
    return "not needed"


def _leaves_inputs_alone(loss: PolicyLoss, rng: np.random.Generator, examples: int) -> str:
    for inputs in drawn_inputs(rng, examples):
        tensors = [value for value in vars(inputs).values() if isinstance(value, torch.Tensor)]
        before = [tensor.detach().clone() for tensor in tensors]
        first, second = _computed(loss, inputs), _computed(loss, inputs)
        if not all(map(torch.equal, tensors, before)):
            raise Violation("it modifies the tensors passed to it")
        if not all(map(torch.equal, first, second)):
            raise Violation("a second call with the same inputs returns different losses")
    return f"{examples} batches"


LOSS_CHECKS: dict[str, Check[PolicyLoss]] = {
    "shapes": _shapes,
    "edge cases": _edges,
    "gradient": _gradient,
    "scale of advantages": _scale,
    "sequence by sequence": _sequence_by_sequence,
    "old log-probabilities": _old_logprobs,
    "no side effects": _leaves_inputs_alone,
}
