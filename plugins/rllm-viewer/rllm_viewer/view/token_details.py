"""The tokens of a rollout as the page shows them: whole trained sequences, with numbers for each token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm_core.algorithms.samples import segments
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.types import Step, Trajectory
from rllm_viewer.recordings import best_and_worst
from rllm_viewer.token_view import first_difference

Json = dict[str, Any]

DIGITS = 5
# A control token is a single token; ordinary text that spells the same takes several.
CONTROL = re.compile(
    r"<[^\w\s/<>][^<>\s]*[^\w\s/<>]>|</?s>|<(?:bos|eos|pad|unk|(?:start|end)_of_\w+)>|\[/?[A-Z_]{3,}\]"
)

BEGINNINGS = ("<", "[")


def of_rollout(group: RecordedGroup, position: int, texts: Mapping[int, str], pieces: Mapping[int, str]) -> Json:
    """Returns the tokens of a rollout as JSON data.

    Args:
        group: Group of the rollout.
        position: Position of the rollout in the group.
        texts: Text of each token id.
        pieces: Bytes, in hexadecimal, of tokens that are only part of a character.
    """
    rollout = group.rollouts[position]
    sequences = [
        _sequence(rollout, at, trajectory, positions)
        for at, trajectory in enumerate(rollout.episode.trajectories)
        for positions in segments(trajectory.steps)
    ]
    # Sorted like the texts in memory, because that is faster.
    used = np.unique([token for sequence in sequences for token in sequence["ids"]]).tolist()
    known = {token: text for token in used if (text := texts.get(token)) is not None}
    return {
        "position": position,
        "index": rollout.episode.rollout_index,
        "sequences": sequences,
        "texts": known,
        "bytes": {token: pieces[token] for token in used if token in pieces},
        "control": [token for token, text in known.items() if text.startswith(BEGINNINGS) and CONTROL.fullmatch(text)],
        "differs": _difference(group, rollout, sequences),
    }


def _sequence(rollout: RecordedRollout, at: int, trajectory: Trajectory, positions: Sequence[int]) -> Json:
    steps = [trajectory.steps[position] for position in positions]
    last = steps[-1]
    return {
        "trajectory": at,
        "role": trajectory.role,
        "trainable": trajectory.trainable,
        "break_reason": steps[0].break_reason,
        "ids": [*last.prompt_ids.tolist(), *last.completion_ids.tolist()],
        "spans": [_span(rollout, at, position, trajectory.steps[position]) for position in positions],
        "media": [{"kind": media.kind, "start": media.start, "stop": media.stop} for media in last.prompt_media],
    }


def _span(rollout: RecordedRollout, at: int, position: int, step: Step) -> Json:
    """Returns a completion: its position in its sequence, and its numbers."""
    start = len(step.prompt_ids)
    return {
        "call": position,
        "start": start,
        "stop": start + len(step.completion_ids),
        "version": step.weight_version,
        "logprob": _numbers(step.logprobs),
        "advantage": _numbers(_of_step(rollout.advantages, at, position)),
        "correction": _numbers(_of_step(rollout.corrections, at, position)),
        "trainer": _numbers(_of_step(rollout.trainer_logprobs, at, position)),
        "entropy": _numbers(_of_step(rollout.entropies, at, position)),
        "reward": _numbers(step.token_rewards),
    }


def _difference(group: RecordedGroup, rollout: RecordedRollout, sequences: Sequence[Json]) -> Json | None:
    """Returns the first token in which a rollout differs from the group's worst; for the worst, from the best."""
    others = [each for each in best_and_worst(group) if each is not rollout]
    if not others:
        return None
    place = first_difference(rollout, others[-1])
    if place is None:
        return None
    trajectory, call, token = place
    for number, sequence in enumerate(sequences):
        for span in sequence["spans"]:
            if (sequence["trajectory"], span["call"]) == (trajectory, call):
                position = span["start"] + token if token >= 0 else _first_of_prompts(rollout, others[-1], place)
                return {"sequence": number, "position": position, "other": others[-1].episode.rollout_index}
    return None


def _first_of_prompts(rollout: RecordedRollout, other: RecordedRollout, place: tuple[int, int, int]) -> int:
    prompts = [each.episode.trajectories[place[0]].steps[place[1]].prompt_ids for each in (rollout, other)]
    length = min(map(len, prompts))
    unequal = np.flatnonzero(prompts[0][:length] != prompts[1][:length])
    return int(unequal[0]) if len(unequal) else length


def _of_step(numbers: Sequence[Sequence[Any]], at: int, position: int) -> Any:
    return numbers[at][position] if at < len(numbers) and position < len(numbers[at]) else None


def _numbers(array: Any) -> float | list[float] | None:
    """Returns one number if all are equal, as advantages usually are, else the list."""
    if array is None or not len(array):
        return None
    rounded = np.round(np.asarray(array, np.float64), DIGITS)
    return float(rounded[0]) if bool((rounded == rounded[0]).all()) else rounded.tolist()
