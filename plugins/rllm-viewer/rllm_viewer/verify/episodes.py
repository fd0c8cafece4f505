"""Checks the episodes of ``trajectories.jsonl`` and of a checkpoint's buffer against their events."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_viewer.verify.findings import FLOAT32_TOLERANCE, RELATIVE_TOLERANCE, Verification, same
from rllm_viewer.verify.measures import mean
from rllm_viewer.verify.records import RolloutRecord


@dataclass
class Told:
    """Facts about a trainable trajectory, computed from its tokens.

    Attributes:
        segments: Digest and number of sampled tokens of each unbroken token sequence that has sampled tokens.
        is_sampled: Whether the policy sampled all of its completions.
    """

    role: str
    reward: float | None
    turns: int
    tokens: int
    weight_version: int | None
    tolerance: float
    is_truncated: bool = False
    is_sampled: bool = True
    control_tokens: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    segments: list[tuple[bytes, int]] = field(default_factory=list)

    @classmethod
    def read(cls, trajectory: dict[str, Any]) -> Told:
        """Reads a trajectory of an episode."""
        steps = trajectory["steps"]
        versions = [step["weight_version"] for step in steps if step["weight_version"] is not None]
        told = cls(
            role=trajectory["role"],
            reward=_reward(trajectory),
            turns=len(steps),
            tokens=sum(len(step["completion_ids"]) for step in steps),
            weight_version=min(versions, default=None),
            # Token rewards are float32, and so was the sum that the run computed.
            tolerance=FLOAT32_TOLERANCE if any(step.get("token_rewards") for step in steps) else RELATIVE_TOLERANCE,
            is_truncated=any(step["finish_reason"] == "length" for step in steps),
            is_sampled=len(versions) == len(steps),
            control_tokens=sum(step["control_tokens"] for step in steps),
            breaks=Counter(step["break_reason"] for step in steps if step["break_reason"] is not None),
        )
        told._read_segments(steps)
        return told

    def _read_segments(self, steps: Sequence[dict[str, Any]]) -> None:
        tokens: list[int] = []
        sampled, before = 0, None
        for step in steps:
            prompt, completion = step["prompt_ids"], step["completion_ids"]
            goes_on = isinstance(prompt, dict)
            if before is not None and not (goes_on and step["segment"] == before):
                self._end_segment(tokens, sampled)
                sampled = 0
            tokens = tokens + prompt["new"] if goes_on else list(prompt)
            tokens += completion
            sampled, before = sampled + len(completion), step["segment"]
        self._end_segment(tokens, sampled)

    def _end_segment(self, tokens: Sequence[int], sampled: int) -> None:
        if sampled:
            self.segments.append((hashlib.sha256(str(tokens).encode()).digest(), sampled))


def _reward(trajectory: dict[str, Any]) -> float | None:
    """Returns the trajectory's reward, or the sum of its steps' rewards, plus its token rewards."""
    of_tokens = [math.fsum(s["token_rewards"]) for s in trajectory["steps"] if s.get("token_rewards") is not None]
    own = trajectory["reward"]
    of_steps = [step["reward"] for step in trajectory["steps"] if step["reward"] is not None]
    if own is None and not of_steps and not of_tokens:
        return None
    return (math.fsum(of_steps) if own is None else float(own)) + math.fsum(of_tokens)


def check_episode(found: Verification, place: str, episode: dict[str, Any], rollout: RolloutRecord) -> list[Told]:
    """Checks an episode against the finish event of its rollout; ``place`` names the file and line."""
    outcome = rollout.outcome
    told = [Told.read(trajectory) for trajectory in episode["trajectories"] if trajectory["trainable"]]
    versions = [step["weight_version"] for t in episode["trajectories"] for step in t["steps"]]
    expected: dict[str, Any] = {"termination_reason": outcome.reason}
    if rollout.task is not None:
        expected |= {"task_id": rollout.task, "rollout_index": rollout.index, "is_validation": False}
    source = f"finish of {outcome.rollout} in events.jsonl"
    oldest = min((version for version in versions if version is not None), default=None)
    found.compare(place, {"weight_version": oldest}, {"weight_version": outcome.weight_version}, source)
    for trajectory in episode["trajectories"]:
        for step in trajectory["steps"]:
            for name in ("logprobs", "token_rewards", "advantages"):
                if step.get(name) is not None and len(step[name]) != len(step["completion_ids"]):
                    tokens = len(step["completion_ids"])
                    found.problem(f"{place} has {name} of {len(step[name])} tokens, but completion_ids has {tokens}")
    if outcome.parts is None:
        found.compare(place, episode, expected, source)
        return told
    found.compare(place, episode, {**expected, "is_correct": outcome.is_correct}, source)
    if len(told) != len(outcome.parts):
        found.problem(f"{place} has {len(told)} trainable trajectories, expected {len(outcome.parts)} from {source}")
        return told
    for number, (said, part) in enumerate(zip(told, outcome.parts, strict=True)):
        for name in part.__slots__:
            if not same(getattr(said, name), getattr(part, name), said.tolerance):
                found.problem(
                    f"{place} has trajectories[{number}] {name} {getattr(said, name)}, "
                    f"expected {getattr(part, name)} from {source}"
                )
    return told


def of_step(kept: Sequence[tuple[dict[str, Any], list[Told]]], counted: dict[str, dict[int, bool]]) -> dict[str, Any]:
    """Computes the metrics of an optimizer step that follow from its episodes, not from events."""
    marked = [
        (told, marks[place])
        for episode, trajectories in kept
        for place, told in enumerate(trajectories)
        if place in (marks := counted.get(episode["rollout_id"], {}))
    ]
    parts, trained = [told for told, _ in marked], [told for told, is_trained in marked if is_trained]
    breaks = sum((told.breaks for told in parts), Counter[str]())
    expected: dict[str, Any] = {
        "truncated_share": mean([told.is_truncated for told in parts]),
        "segment_breaks": breaks.total(),
        **{f"segment_breaks/{reason}": count for reason, count in breaks.items()},
        "control_tokens_in_text": sum(told.control_tokens for told in parts),
        **{f"workflow/{name}": value for name, value in metric_means([episode for episode, _ in kept]).items()},
    }
    if all(told.is_sampled for told in trained):
        digests = [segment for told in trained for segment, _ in told.segments]
        expected |= {
            "samples": len(digests),
            "sampled_tokens": sum(sampled for told in trained for _, sampled in told.segments),
            "distinct_samples_share": len(set(digests)) / len(digests) if digests else None,
        }
    return expected


def metric_means(episodes: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Averages each of the workflow's own metrics over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode["metrics"].items():
            values[name].append(value)
    return {name: mean(found) for name, found in values.items()}
