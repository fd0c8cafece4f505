"""Conversion of trajectories to training samples: one per unbroken token sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllm_core.algorithms.advantages import Credit
from rllm_core.tokens import repeated
from rllm_core.types import Floats, Step, TrainingSample, Trajectory, TrajectoryGroup, new_id


class Segment(NamedTuple):
    """An unbroken token sequence of a trajectory, as positions of steps.

    Attributes:
        last: Position of the last step, whose prompt and completion are the whole sequence.
        trained: Positions of the steps whose completions are trained, at least one.
        lengths: Tokens of each of these completions.
    """

    last: int
    trained: list[int]
    lengths: list[int]


def segments(steps: Sequence[Step]) -> list[list[int]]:
    """Groups positions of steps that continue each other token for token, in order.

    The prefix is checked regardless of the steps' own segment numbers. A mismatch starts a new segment, so no token is
    lost.
    """
    if len(steps) == 1:  # fast path: such trajectories dominate the time that short rollouts take
        return [[0]]
    result: list[list[int]] = []
    for position, step in enumerate(steps):
        if position and step.segment == steps[position - 1].segment and step.continues(steps[position - 1]):
            result[-1].append(position)
        else:
            result.append([position])
    return result


def training_samples(
    group: TrajectoryGroup,
    credits: Sequence[Credit] | None = None,
    *,
    learns_written: bool = False,
    credited_by: str = "the estimator",
) -> list[TrainingSample]:
    """Builds the training samples of a group.

    Args:
        group: Trajectories, all of them with steps.
        credits: Advantages: per trajectory ``(steps,)``, or per step ``(completion_tokens,)``; None for zeros.
        learns_written: Whether to train tokens that the policy did not sample, too.
        credited_by: Source of the advantages, for errors.

    Returns:
        One sample per segment with at least one trained token.

    Raises:
        ValueError: If an advantage is missing, superfluous or not finite, or a completion has no prompt.
    """
    if credits is None:
        credits = [np.zeros(len(trajectory.steps)) for trajectory in group.trajectories]
    else:
        _check(group, credits, credited_by)
    samples = []
    for trajectory, credit, rollout_id in zip(group.trajectories, credits, group.rollout_ids, strict=True):
        for segment in trained_segments(trajectory, learns_written=learns_written):
            samples.append(_sample(group, trajectory, segment, credit, rollout_id))
    return samples


def trained_segments(trajectory: Trajectory, *, learns_written: bool = False) -> list[Segment]:
    """Returns the trained segments of a trajectory, in the order of `training_samples`."""
    result = []
    for positions in segments(trajectory.steps):
        segment = Segment(positions[-1], [], [])
        for position in positions:
            step = trajectory.steps[position]
            if (learns_written or step.weight_version is not None) and (length := step.completion_tokens):
                segment.trained.append(position)
                segment.lengths.append(length)
        if segment.trained:
            result.append(segment)
    return result


def with_token_rewards(group: TrajectoryGroup, rewards: Sequence[Floats]) -> TrajectoryGroup:
    """Returns the group with additional token rewards.

    ``rewards`` are ``(sampled_tokens,)`` per sample of `training_samples`.
    """

    def rewarded(step: Step, more: Floats) -> Step:
        before = step.token_rewards
        return step.model_copy(update={"token_rewards": more if before is None else before + more})

    return with_tokens(group, rewards, rewarded)


def with_tokens(
    group: TrajectoryGroup, values: Sequence[Floats], changed: Callable[[Step, Floats], Step]
) -> TrajectoryGroup:
    """Returns the group with every sampled step replaced by ``changed(step, values of its completion's tokens)``.

    ``values`` are ``(sampled_tokens,)`` per sample of `training_samples`; ``changed`` gets those of one completion.
    """
    remaining = iter(values)
    trajectories = []
    for trajectory in group.trajectories:
        trained = trained_segments(trajectory)
        parts = per_step(trajectory, trained, itertools.islice(remaining, len(trained)))
        steps = [
            step if part is None else changed(step, part) for step, part in zip(trajectory.steps, parts, strict=True)
        ]
        trajectories.append(trajectory.model_copy(update={"steps": steps}))
    return group.model_copy(update={"trajectories": trajectories})


def per_step(
    trajectory: Trajectory, trained: Sequence[Segment], values: Iterable[Floats | None]
) -> list[Floats | None]:
    """Splits per-token values of a trajectory's samples by step.

    ``values`` are ``(sampled_tokens,)`` per segment of ``trained``, or None for a sample without values.

    Returns:
        Per step ``(completion_tokens,)``, or None for a step without values.
    """
    if len(trained) == len(trajectory.steps) == 1:  # fast path: there is nothing to split
        return list(values)
    result: list[Floats | None] = [None] * len(trajectory.steps)
    for segment, of_sample in zip(trained, values, strict=True):
        if of_sample is None:
            continue
        start = 0
        for position, length in zip(segment.trained, segment.lengths, strict=True):
            stop = start + length
            result[position] = of_sample[start:stop]
            start = stop
    return result


def _check(group: TrajectoryGroup, credits: Sequence[Credit], credited_by: str) -> None:
    credited = list(zip(group.trajectories, credits, strict=True))
    if not _fit(credited):  # all at once: numpy takes as long for one trajectory as for a group
        trajectory, credit = next(one for one in credited if not _fit([one]))
        shown, steps = " ".join(f"{credit!r:.200}".split()), len(trajectory.steps)
        raise ValueError(f"task {group.task_id!r}: {credited_by} returned advantages {shown} for {steps} steps")


def _fit(credited: Sequence[tuple[Trajectory, Credit]]) -> bool:
    """Whether advantages are finite float32 numbers, one for each step or completion token."""
    parts: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    for trajectory, credit in credited:
        steps, per_token = trajectory.steps, isinstance(credit, list)
        parts += credit if per_token else [credit]
        shapes += [(step.completion_tokens,) for step in steps] if per_token else [(len(steps),)]
        if len(parts) != len(shapes):
            return False
    try:
        arrays = [np.asarray(part) for part in parts]
    except (TypeError, ValueError):  # not numbers
        return False
    # Check the kind first: astype would turn digit strings and None into numbers.
    if [array.shape for array in arrays] != shapes or any(array.dtype.kind not in "fiu" for array in arrays):
        return False
    with np.errstate(over="ignore"):
        return not arrays or bool(np.isfinite(np.concatenate(arrays).astype(np.float32)).all())


def _sample(
    group: TrajectoryGroup, trajectory: Trajectory, segment: Segment, credit: Credit, rollout_id: str
) -> TrainingSample:
    sampled = [trajectory.steps[position] for position in segment.trained]
    last = trajectory.steps[segment.last]
    if not sampled[0].prompt_tokens:
        raise ValueError(f"task {group.task_id!r}: a sample cannot begin with a sampled token: there was no prompt")
    logprobs = [step.logprobs for step in sampled if step.logprobs is not None]
    # No validation needed: steps are validated, advantages checked above, and all lengths follow from them.
    return TrainingSample._trusted(
        sample_id=new_id(),
        group_id=group.group_id,
        rollout_id=rollout_id,
        role=group.role,
        token_ids=np.concatenate((last.prompt_ids, last.completion_ids)),
        turn_spans=tuple((s.prompt_tokens, s.prompt_tokens + s.completion_tokens) for s in sampled),
        logprobs=_joined(logprobs) if len(logprobs) == len(sampled) else None,
        advantages=_spread(credit, segment.trained, segment.lengths),
        weight_versions=tuple(group.weight_version if s.weight_version is None else s.weight_version for s in sampled),
        media=last.prompt_media,
    )


def _joined(arrays: Sequence[Floats]) -> Floats:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)  # concatenate would copy even a single array


def _spread(credit: Credit, positions: Sequence[int], lengths: Sequence[int]) -> Floats:
    """``(sampled_tokens,)`` advantages. A single value for all tokens is stored once."""
    if isinstance(credit, list):
        return np.concatenate([np.asarray(credit[position], np.float32) for position in positions])
    values = [float(credit[position]) for position in positions]
    if len(set(values)) == 1:
        return repeated(values[0], sum(lengths))
    return np.concatenate([repeated(value, length) for value, length in zip(values, lengths, strict=True)])
