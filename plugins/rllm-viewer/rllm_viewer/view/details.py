"""A group as the page shows it: the task, the prompt once, and the new messages of each rollout's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.types import Step, Trajectory
from rllm_viewer.conversation_view import common, opening_of
from rllm_viewer.recordings import best_and_worst, parts_of
from rllm_viewer.token_view import first_difference

Json = dict[str, Any]


def of_group(
    identity: int, group: RecordedGroup, timings: Mapping[str, Mapping[str, Any]], texts: Mapping[int, str]
) -> Json:
    """Returns a group as JSON data.

    Args:
        identity: Position of the group in its file.
        group: The group.
        timings: Lines of ``group_timings.jsonl`` for its rollouts, by rollout id.
        texts: Text of each token id, for responses in which the parser found nothing.
    """
    names = ("step", "group", "kept", "outcome", "reason", "weight_version")
    openings = _openings(group)
    extremes = best_and_worst(group)
    positions = {id(rollout): position for position, rollout in enumerate(group.rollouts)}
    place = first_difference(*extremes) if len(extremes) == 2 else None
    return {
        "id": identity,
        **{name: getattr(group, name) for name in names},
        "task": {"task_id": group.task.task_id, "data": group.task.data},
        "openings": openings,
        "extremes": [positions[id(rollout)] for rollout in extremes],
        "differs": place,
        "rollouts": [
            _rollout(each, openings, timings.get(each.episode.rollout_id, {}), texts) for each in group.rollouts
        ],
    }


def _openings(group: RecordedGroup) -> list[Json | None]:
    """Returns the first messages of each trajectory number, where all rollouts share them."""
    longest = max((len(rollout.episode.trajectories) for rollout in group.rollouts), default=0)
    found: list[Json | None] = []
    for at in range(longest):
        trajectories = [r.episode.trajectories[at] for r in group.rollouts if len(r.episode.trajectories) > at]
        with_steps = [trajectory for trajectory in trajectories if trajectory.steps]
        opening = opening_of(with_steps[0]) if with_steps else []
        is_shared = bool(opening) and all(opening_of(other) == opening for other in with_steps)
        found.append({"role": with_steps[0].role, "messages": opening} if is_shared else None)
    return found


def _rollout(
    rollout: RecordedRollout, openings: Sequence[Json | None], timing: Mapping[str, Any], texts: Mapping[int, str]
) -> Json:
    episode = rollout.episode
    return {
        "index": episode.rollout_index,
        "id": episode.rollout_id,
        "reward": rollout.reward,
        "solved": episode.is_correct,
        "end": episode.termination_reason.value,
        "outcome": rollout.outcome,
        "reason": rollout.reason,
        "error": episode.error,
        "parts": parts_of(rollout),
        "metadata": {name: value for name, value in episode.metadata.items() if name != "reward_parts"},
        "seconds": timing.get("seconds"),
        "calls": timing.get("calls"),
        "trajectories": [
            _trajectory(
                trajectory,
                openings[at] is not None,
                _at(rollout.advantages, at),
                _at(rollout.corrections, at),
                texts,
            )
            for at, trajectory in enumerate(episode.trajectories)
        ],
    }


def _trajectory(
    trajectory: Trajectory,
    is_opening_known: bool,
    advantages: Sequence[Any],
    corrections: Sequence[Any],
    texts: Mapping[int, str],
) -> Json:
    known: list[Mapping[str, Any]] = opening_of(trajectory) if is_opening_known else []
    steps = []
    for position, step in enumerate(trajectory.steps):
        before = list(step.messages)
        is_edited = before[: len(known)] != known
        if is_edited:
            known = common(known, before)
        steps.append(
            {
                "messages": before[len(known) :],
                "edited": is_edited,
                "advantage": _spread(_at(advantages, position)),
                "correction": _spread(_at(corrections, position)),
                **_step(step, texts),
            }
        )
        known = [*before, step.response]
    return {
        "role": trajectory.role,
        "reward": trajectory.total_reward if trajectory.has_reward else None,
        "trainable": trajectory.trainable,
        "metadata": trajectory.metadata,
        "steps": steps,
    }


def _step(step: Step, texts: Mapping[int, str]) -> Json:
    has_response = any(value for name, value in step.response.items() if name != "role")
    logprobs = step.logprobs
    return {
        "response": step.response if has_response else None,
        "sampled": None if has_response else "".join(texts.get(token, "") for token in step.completion_ids.tolist()),
        "prompt_tokens": len(step.prompt_ids),
        "tokens": len(step.completion_ids),
        "finish_reason": step.finish_reason.value,
        "weight_version": step.weight_version,
        "segment": step.segment,
        "break_reason": step.break_reason,
        "control_tokens": step.control_tokens,
        "reward": step.reward,
        "token_rewards": None if step.token_rewards is None else float(step.token_rewards.sum()),
        "logprob": float(logprobs.mean()) if logprobs is not None and len(logprobs) else None,
        "media": [
            {"kind": media.kind, "tokens": media.length_tokens, "start": media.start} for media in step.prompt_media
        ],
        "metadata": step.metadata,
    }


def _spread(numbers: Any) -> list[float] | None:
    """Returns the lowest number, the mean and the highest; None for a step that was not trained."""
    if numbers is None or not len(numbers):
        return None
    return [float(np.min(numbers)), float(np.mean(numbers)), float(np.max(numbers))]


def _at(numbers: Sequence[Any] | None, position: int) -> Any:
    return numbers[position] if numbers is not None and position < len(numbers) else None
