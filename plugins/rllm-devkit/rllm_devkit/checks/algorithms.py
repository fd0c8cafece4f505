"""Contract checks for advantage estimators, corrections and losses.

Like those of `rllm_devkit.checks.check_parser`, each check draws its own examples and reports its findings. A component
is checked with the options it was built with, so check it once per set of options that changes its behavior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages import AdvantageEstimator, Credit, RoleEstimators
from rllm_core.algorithms.corrections import MAX_LOG_RATIO, Correction, Corrections
from rllm_core.algorithms.samples import training_samples
from rllm_core.errors import UserError
from rllm_core.types import Step, Trajectory, TrajectoryGroup, token_ids
from rllm_devkit.checks.configured import EXAMPLES, Check, checked
from rllm_devkit.checks.results import CheckResult, Violation

if TYPE_CHECKING:
    from rllm_core.algorithms.torch_losses import PolicyLoss


def check_estimator(estimator: AdvantageEstimator, *, seed: int = 0, examples: int = EXAMPLES) -> list[CheckResult]:
    """Checks an advantage estimator against its contract, on randomly drawn groups.

    In a test: ``assert not [r for r in check_estimator(mine) if r.outcome == "failed"]``.

    Args:
        estimator: Estimator to check.
        seed: Seed for drawing groups; equal seeds draw equal groups.
        examples: Number of groups per check.

    Returns:
        One result per check. An exception raised by the estimator fails the check that called it.
    """
    return checked(estimator, ESTIMATOR_CHECKS, seed, examples)


def check_correction(correction: Correction, *, seed: int = 0, examples: int = EXAMPLES) -> list[CheckResult]:
    """Checks an off-policy correction against its contract; see `check_estimator`."""
    return checked(correction, CORRECTION_CHECKS, seed, examples)


def check_policy_loss(loss: PolicyLoss, *, seed: int = 0, examples: int = EXAMPLES) -> list[CheckResult]:
    """Checks a policy loss against its contract; imports torch. See `check_estimator`."""
    from rllm_devkit.checks.losses import LOSS_CHECKS

    return checked(loss, LOSS_CHECKS, seed, examples)


# --------------------------------------------------------------------------------------------------------------------
# Estimators


def drawn_group(
    estimator: AdvantageEstimator,
    rng: np.random.Generator,
    group_id: int,
    size: int,
    *,
    rewards: Sequence[float] | None = None,
    most_tokens: int = 4,
) -> TrajectoryGroup:
    """Draws a realistic group: several turns, empty completions, turns the policy did not sample.

    Args:
        estimator: Estimator under test; decides whether steps carry advantages per token or per step.
        rng: Random generator.
        group_id: Number of the group.
        size: Number of trajectories.
        rewards: Rewards of the trajectories. If None, drawn for trajectories, turns or single tokens.
        most_tokens: Maximum tokens per completion; the first completion of the group has at least one.
    """
    place = "trajectory" if rewards is not None else str(rng.choice(["trajectory", "turn", "token"]))
    trajectories = []
    for index in range(size):
        reward = float(np.round(rng.normal(), 3)) if rewards is None else rewards[index]
        prompt, steps = [1, 2], []
        for turn in range(int(rng.integers(1, 4))):
            is_first = index == turn == 0
            tokens = max(int(is_first), int(rng.integers(0, most_tokens + 1)))
            sampled = is_first or rng.random() < 0.9
            completion = rng.integers(3, 9, tokens).tolist()
            advantages = rng.normal(size=tokens if estimator.per_token else 1).astype(np.float32)
            steps.append(
                Step(
                    prompt_ids=token_ids(prompt),
                    completion_ids=token_ids(completion),
                    logprobs=-rng.exponential(size=tokens).astype(np.float32) if sampled else None,
                    weight_version=0 if sampled else None,
                    reward=reward if place == "turn" else None,
                    token_rewards=rng.normal(size=tokens).astype(np.float32) if place == "token" else None,
                    advantages=np.broadcast_to(advantages, tokens).copy(),
                )
            )
            prompt = [*prompt, *completion, 9]
        trajectories.append(Trajectory(steps=steps, reward=reward if place == "trajectory" else None))
    return TrajectoryGroup(
        group_id=group_id,
        task_id=f"task-{group_id}",
        trajectories=trajectories,
        rollout_ids=[f"rollout-{group_id}-{index}" for index in range(size)],
        weight_version=0,
    )


def _drawn(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> Iterator[list[TrajectoryGroup]]:
    """Draws optimizer steps of one to three groups."""
    for _ in range(examples):
        sizes = estimator.min_group_size + rng.integers(0, 6, rng.integers(1, 4))
        yield [drawn_group(estimator, rng, number, int(size)) for number, size in enumerate(sizes)]


def _credited(estimator: AdvantageEstimator, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
    """Computes a step's advantages with the checks the core applies in a run."""
    try:
        credits = RoleEstimators(estimator)(groups)
        for group, credit in zip(groups, credits, strict=True):
            training_samples(group, credit, learns_written=estimator.learns_written, credited_by=estimator.label)
    except (UserError, ValueError) as error:
        raise Violation(str(error)) from error
    return credits


def _is_same(left: Credit, right: Credit) -> bool:
    if isinstance(left, list) != isinstance(right, list):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return np.shape(left) == np.shape(right) and bool(np.allclose(left, right, rtol=1e-6, atol=1e-8))


def _shapes(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> str:
    steps = list(_drawn(estimator, rng, examples))
    credits = [credit for groups in steps for group in _credited(estimator, groups) for credit in group]
    per_token = sum(isinstance(credit, list) for credit in credits)
    return f"{len(credits)} trajectories in {len(steps)} steps, {per_token} of them with advantages per token"


def _edges(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> str:
    smallest = estimator.min_group_size
    if smallest < 1:
        raise Violation(f"min_group_size must be >= 1, got {smallest}")
    for size in (smallest, smallest + 3):
        for rewards in (
            [0.0] * size,
            [0.1] * size,
            [1e6] * size,
            [*[0.0] * (size - 1), 1.0],
            [(-1e6) ** (index % 2) for index in range(size)],
            [1 + 1e-12 * index for index in range(size)],
        ):
            for most_tokens in (0, 4):
                _credited(estimator, [drawn_group(estimator, rng, 0, size, rewards=rewards, most_tokens=most_tokens)])
    return f"finite for >= {smallest} trajectories with equal, extreme or nearly equal rewards, and empty completions"


def _order_of_trajectories(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> str:
    for groups in _drawn(estimator, rng, examples):
        orders = [rng.permutation(len(group.trajectories)) for group in groups]
        shuffled = [
            group.model_copy(
                update={
                    "trajectories": [group.trajectories[index] for index in order],
                    "rollout_ids": [group.rollout_ids[index] for index in order],
                }
            )
            for group, order in zip(groups, orders, strict=True)
        ]
        before, after = _credited(estimator, groups), _credited(estimator, shuffled)
        for old, new, order in zip(before, after, orders, strict=True):
            if not all(_is_same(old[index], credit) for index, credit in zip(order, new, strict=True)):
                raise Violation("the advantages of a trajectory depend on the order of the trajectories in its group")
    return f"{examples} steps"


def _order_of_groups(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> str:
    for groups in _drawn(estimator, rng, examples):
        together = _credited(estimator, groups)
        if estimator.scope == "group":
            alone = [_credited(estimator, [group])[0] for group in groups]
            problem = 'the advantages of a group depend on others; set scope = "batch" or compare within the group'
        else:
            alone = _credited(estimator, groups[::-1])[::-1]
            problem = "the advantages of a group depend on the order of the groups"
        for one, other in zip(alone, together, strict=True):
            if not all(map(_is_same, one, other)):
                raise Violation(problem)
    return "independent of each other" if estimator.scope == "group" else "compared with each other, in any order"


def _leaves_groups_alone(estimator: AdvantageEstimator, rng: np.random.Generator, examples: int) -> str:
    for groups in _drawn(estimator, rng, examples):
        before = [group.model_dump_json() for group in groups]
        first, second = _credited(estimator, groups), _credited(estimator, groups)
        if [group.model_dump_json() for group in groups] != before:
            raise Violation("it modifies the groups passed to it")
        for one, other in zip(first, second, strict=True):
            if not all(map(_is_same, one, other)):
                raise Violation("a second call with the same groups returns different advantages")
    return f"{examples} steps"


ESTIMATOR_CHECKS: dict[str, Check[AdvantageEstimator]] = {
    "shapes": _shapes,
    "edge cases": _edges,
    "order of trajectories": _order_of_trajectories,
    "order of groups": _order_of_groups,
    "no side effects": _leaves_groups_alone,
}


# --------------------------------------------------------------------------------------------------------------------
# Corrections


def _drawn_ratios(
    rng: np.random.Generator, examples: int
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Draws the log ratios of some sequences, near 0 and far from it, and the start of each sequence."""
    for _ in range(examples):
        lengths = rng.integers(1, 6, rng.integers(1, 5))
        scale = rng.choice([1e-4, 0.1, 1.0, 10.0])
        ratios = rng.normal(scale=scale, size=lengths.sum()).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        yield ratios, np.cumsum([0, *lengths[:-1]]).astype(np.int64)


def _weights(correction: Correction, ratios: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> list[float]:
    try:
        weights: list[float] = Corrections([correction]).weights(ratios, starts).tolist()
    except UserError as error:
        raise Violation(str(error)) from error
    return weights


def _weights_are_weights(correction: Correction, rng: np.random.Generator, examples: int) -> str:
    found = [weight for drawn in _drawn_ratios(rng, examples) for weight in _weights(correction, *drawn)]
    for extreme in (-MAX_LOG_RATIO, MAX_LOG_RATIO):
        for tokens in (1, 100):
            found += _weights(correction, np.full(tokens, extreme), np.zeros(1, np.int64))
    return f"from {min(found):.3g} to {max(found):.3g}"


def _on_policy(correction: Correction, rng: np.random.Generator, examples: int) -> str:
    for ratios, starts in _drawn_ratios(rng, examples):
        if not np.allclose(_weights(correction, np.zeros_like(ratios), starts), 1.0, rtol=0, atol=1e-9):
            raise Violation("weights must be 1 if the policy has not changed since sampling (all log ratios are 0)")
    return "1 if the policy has not changed"


def _sequence_by_sequence(correction: Correction, rng: np.random.Generator, examples: int) -> str:
    for ratios, starts in _drawn_ratios(rng, examples):
        parts = np.split(ratios, starts[1:])
        alone = [weight for part in parts for weight in _weights(correction, part, np.zeros(1, np.int64))]
        if not np.allclose(_weights(correction, ratios, starts), alone, rtol=1e-9, atol=0):
            raise Violation("the weights of a sequence depend on other sequences, and so on how a step is split")
    return f"{examples} batches"


def _leaves_ratios_alone(correction: Correction, rng: np.random.Generator, examples: int) -> str:
    for ratios, starts in _drawn_ratios(rng, examples):
        given = ratios.copy(), starts.copy()
        first = np.array(correction(*given))
        if not np.array_equal(given[0], ratios) or not np.array_equal(given[1], starts):
            raise Violation("it modifies the arrays passed to it")
        if not np.array_equal(first, correction(ratios, starts)):
            raise Violation("a second call with the same ratios returns different weights")
    return f"{examples} batches"


CORRECTION_CHECKS: dict[str, Check[Correction]] = {
    "weights": _weights_are_weights,
    "on policy": _on_policy,
    "sequence by sequence": _sequence_by_sequence,
    "no side effects": _leaves_ratios_alone,
}
