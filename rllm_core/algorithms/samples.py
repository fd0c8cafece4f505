"""Trajectories to training samples: one per unbroken token sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rllm_core.tokens import repeated
from rllm_core.types import Step, TrainingSample, TrajectoryGroup, new_id


def segments(steps: Sequence[Step]) -> list[list[int]]:
    """Positions of steps that continue each other token for token, in order.

    The prefix is checked here whatever the steps claim: where it does not hold, a new segment begins. Nothing is
    masked away.
    """
    result: list[list[int]] = []
    for position, step in enumerate(steps):
        if position and step.segment == steps[position - 1].segment and step.continues(steps[position - 1]):
            result[-1].append(position)
        else:
            result.append([position])
    return result


def training_samples(group: TrajectoryGroup, advantages: Sequence[npt.NDArray[np.float64]]) -> list[TrainingSample]:
    """The samples of a group.

    Args:
        group: Trajectories, all of them with steps.
        advantages: Per trajectory ``(steps,)``.

    Returns:
        One sample per segment with at least one token that the policy sampled.

    Raises:
        ValueError: If an advantage is missing, superfluous or not finite, or a completion has no prompt.
    """
    samples = []
    for trajectory, credit, rollout_id in zip(group.trajectories, advantages, group.rollout_ids, strict=True):
        with np.errstate(over="ignore"):  # samples hold float32
            finite = bool(np.isfinite(np.asarray(credit, np.float32)).all())
        if len(credit) != len(trajectory.steps) or not finite:
            steps = len(trajectory.steps)
            raise ValueError(f"task {group.task_id!r}: the estimator returned advantages {credit!r} for {steps} steps")
        for positions in segments(trajectory.steps):
            sample = _sample(group, [(trajectory.steps[p], float(credit[p])) for p in positions], rollout_id)
            if sample is not None:
                samples.append(sample)
    return samples


def _sample(group: TrajectoryGroup, steps: Sequence[tuple[Step, float]], rollout_id: str) -> TrainingSample | None:
    sampled = [(s, a) for s, a in steps if s.weight_version is not None and len(s.completion_ids)]
    if not sampled:
        return None
    last = steps[-1][0]
    if not len(sampled[0][0].prompt_ids):
        raise ValueError(f"task {group.task_id!r}: a sample cannot begin with a sampled token: there was no prompt")
    logprobs = [step.logprobs for step, _ in sampled if step.logprobs is not None]
    # Joined from validated steps and the advantages checked above, in lengths that follow from one another.
    return TrainingSample.model_construct(
        sample_id=new_id(),
        group_id=group.group_id,
        rollout_id=rollout_id,
        role=group.role,
        token_ids=np.concatenate((last.prompt_ids, last.completion_ids)),
        turn_spans=tuple((len(s.prompt_ids), len(s.prompt_ids) + len(s.completion_ids)) for s, _ in sampled),
        logprobs=_joined(logprobs) if len(logprobs) == len(sampled) else None,
        advantages=_spread([(a, len(s.completion_ids)) for s, a in sampled]),
        weight_versions=tuple(s.weight_version for s, _ in sampled if s.weight_version is not None),
        media=last.prompt_media,
    )


def _spread(credit: list[tuple[float, int]]) -> npt.NDArray[np.float32]:
    """Each value as often as it says; one value for all of them takes no memory, however many tokens there are."""
    if len({advantage for advantage, _ in credit}) == 1:
        return repeated(credit[0][0], sum(tokens for _, tokens in credit))
    return np.concatenate([repeated(advantage, tokens) for advantage, tokens in credit])


def _joined(arrays: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
