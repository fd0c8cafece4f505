"""Writes a run with five planted faults for people who try the viewer: can they find them with only its help?

::

    python -m benchmarks.planted_faults FOLDER --key KEY.json

The run of 120 steps is healthy but for one rollout or a few groups. Where the faults are depends on ``--seed``, and is
written to ``--key``, which the reader must not see.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rllm_core.config import RunConfig, to_toml
from rllm_core.run_folder.groups import RULES, RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode, FinishReason, Step, Task, Trajectory

STEPS, GROUPS, ROLLOUTS = 120, 3, 8
OPEN, END = 256, 257
SYSTEM = "Work it out step by step, then say: The answer is N."
STALE_BY = 9

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """Texts and reward of one rollout."""

    thought: str
    answer: str
    right: float
    more: Json
    solved: bool
    finish_reason: FinishReason = FinishReason.STOP


def write_run(path: Path, seed: int) -> list[Json]:
    """Writes the run folder, and returns where its faults are."""
    path.mkdir(parents=True)
    rng = random.Random(seed)
    steps = rng.sample(range(20, STEPS), 6)
    names = ("swapped rewards", "prefix break", "stale group", "cut answers", "cut answers", "hacked reward")
    places = {step * GROUPS + rng.randrange(GROUPS): name for step, name in zip(steps, names, strict=True)}
    key: list[Json] = []
    tables = RunConfig(workflow="math", backend="local", training={"steps": STEPS}).to_tables()
    (path / "run.toml").write_text(to_toml(tables), encoding="utf-8")
    offset = 0
    with (
        (path / "groups.jsonl").open("wb") as lines,
        (path / "groups_index.jsonl").open("w", encoding="utf-8") as index,
        (path / "metrics.jsonl").open("w", encoding="utf-8") as metrics,
    ):
        for step in range(1, STEPS + 1):
            groups = []
            for number in range(step * GROUPS, (step + 1) * GROUPS):
                fault = places.get(number)
                one, rollout = _group(rng, step, number, fault)
                groups.append(one)
                if fault is not None:
                    key.append({"fault": fault, "step": step, "group": number, "rollout": rollout})
                line = one.to_json().encode()
                lines.write(line + b"\n")
                index.write(json.dumps(IndexedGroup.of(one, offset, len(line)).to_json()) + "\n")
                offset += len(line) + 1
            metrics.write(json.dumps(_metrics(rng, step, groups)) + "\n")
    texts = {number: chr(number) for number in range(128)} | {OPEN: "<|im_start|>", END: "<|im_end|>"}
    tokens = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in texts.items())
    (path / "tokens.jsonl").write_text(tokens, encoding="utf-8")
    (path / "summary.json").write_text(
        json.dumps({"status": "completed", "optimizer_steps": STEPS, "validation": []}), encoding="utf-8"
    )
    return sorted(key, key=lambda fault: str(fault["fault"]))


def _group(rng: random.Random, step: int, number: int, fault: str | None) -> tuple[RecordedGroup, int | None]:
    a, b, c = rng.randrange(10, 90), rng.randrange(10, 90), rng.randrange(2, 9)
    question, answer = f"What is {a} plus {b} times {c}?", a + b * c
    skill = 0.2 + 0.6 * step / STEPS
    said = [_said(rng, a, b, c, rng.random() < skill) for _ in range(ROLLOUTS)]
    version, chosen = step - 1, None
    if fault is not None:
        said[0], said[1] = _said(rng, a, b, c, True), _said(rng, a, b, c, False)
        rng.shuffle(said)
    if fault == "swapped rewards":
        right = next(at for at, one in enumerate(said) if one.solved)
        wrong = next(at for at, one in enumerate(said) if not one.solved)
        fields = ("right", "more", "solved")
        swapped = [{name: getattr(said[at], name) for name in fields} for at in (wrong, right)]
        said[right], said[wrong], chosen = replace(said[right], **swapped[0]), replace(said[wrong], **swapped[1]), right
    elif fault == "stale group":
        version -= STALE_BY
    elif fault == "cut answers":
        for at in range(0, ROLLOUTS, 2):
            thought = said[at].thought + " Let me check this again, digit by digit, to be sure that" * 3
            said[at] = Said(thought[:140], "", 0.0, said[at].more, solved=False, finish_reason=FinishReason.LENGTH)
    elif fault == "hacked reward":
        chosen = next(at for at, one in enumerate(said) if not one.solved)
        more = {"politeness": 1.25}
        said[chosen] = replace(said[chosen], answer="Thank you, please. " * 12 + said[chosen].answer, more=more)
    elif fault == "prefix break":
        chosen = rng.randrange(ROLLOUTS)
    rewards = [one.right + sum(one.more.values()) for one in said]
    spread = float(np.std(rewards)) or 1.0
    rollouts = [
        _rollout(rng, at, question, one, reward, (reward - float(np.mean(rewards))) / spread, version,
                 fault == "prefix break" and at == chosen)
        for at, (one, reward) in enumerate(zip(said, rewards, strict=True))
    ]  # fmt: skip
    task = Task(task_id=f"sum-{a}-{b}-{c}", data={"question": question, "answer": answer})
    kept = RULES[number % len(RULES)]
    return RecordedGroup(step, number, task, kept, "trained", "trained", version, rollouts), chosen


def _said(rng: random.Random, a: int, b: int, c: int, is_right: bool) -> Said:
    answer = a + b * c if is_right else (a + b) * c if rng.random() < 0.5 else a + b * c + rng.choice((-10, -1, 1, 10))
    thought = f"Times comes first: {b} times {c} is {b * c}."
    if not is_right and answer == (a + b) * c:
        thought = f"First I add: {a} plus {b} is {a + b}."
    more = {"politeness": rng.choice((0.0, 0.0, 0.05))}
    return Said(thought, f"The answer is {answer}.", float(is_right), more, solved=is_right)


def _rollout(
    rng: random.Random,
    at: int,
    question: str,
    said: Said,
    reward: float,
    advantage: float,
    version: int,
    breaks: bool,
) -> RecordedRollout:
    """Returns a rollout of two calls: one that thinks, and one that answers."""
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    thought = f"<think>{said.thought}</think> Ready." if breaks else said.thought
    prompt = [*_turn("system", SYSTEM), *_turn("user", question), OPEN, *b"assistant\n"]
    calls = [_step(rng, opening, thought, prompt, version)]
    if said.finish_reason is FinishReason.LENGTH:
        calls = [_step(rng, opening, thought, prompt, version, finish_reason=said.finish_reason)]
    else:
        follow = [*opening, {"role": "assistant", "content": thought}, {"role": "user", "content": "So?"}]
        before = [*prompt[:-10], *_turn("assistant", "Ready.")] if breaks else [*prompt, *thought.encode(), END]
        later = [*before, *_turn("user", "So?"), OPEN, *b"assistant\n"]
        more = {"segment": 1, "break_reason": "prefix_mismatch"} if breaks else {}
        calls.append(_step(rng, follow, said.answer, later, version, **more))
    parts = {"right": said.right, **said.more}
    episode = Episode(
        task_id="sum", rollout_id=f"r{rng.getrandbits(60):x}", rollout_index=at, is_correct=said.solved,
        trajectories=[Trajectory(steps=calls, reward=reward)], metadata={"reward_parts": parts},
    )  # fmt: skip
    advantages = [np.full(len(one.completion_ids), advantage, np.float32) for one in calls]
    noise = np.random.default_rng(rng.getrandbits(32))
    trainer = [
        (np.minimum(one.logprobs + noise.normal(0, 0.01, len(one.logprobs)), 0)).astype(np.float32) for one in calls
    ]
    return RecordedRollout(episode, "trained", "trained", [advantages], (), [trainer])


def _turn(role: str, text: str) -> list[int]:
    return [OPEN, *f"{role}\n{text}".encode(), END]


def _step(
    rng: random.Random, messages: Sequence[Json], answer: str, prompt: Sequence[int], version: int, **fields: Any
) -> Step:
    ids = [*answer.encode(), *([] if "finish_reason" in fields else [END])]
    logprobs = -np.random.default_rng(rng.getrandbits(32)).exponential(0.1, len(ids))
    return Step(
        messages=list(messages), response={"role": "assistant", "content": answer}, prompt_ids=list(prompt),
        completion_ids=ids, logprobs=logprobs, weight_version=version, **fields,
    )  # fmt: skip


def _metrics(rng: random.Random, step: int, groups: Sequence[RecordedGroup]) -> Json:
    """Returns the metrics of a step, of which only some groups were recorded."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = [call for rollout in rollouts for call in rollout.episode.trajectories[0].steps]
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    solved = [bool(rollout.episode.is_correct) for rollout in rollouts]
    ages = [step - 1 - (group.weight_version or 0) for group in groups]
    return {
        "step": step, "epoch": 0, "weight_version": step, "reward_mean": float(np.mean(rewards)),
        "trajectory_reward_min": min(rewards), "trajectory_reward_max": max(rewards), "solved": float(np.mean(solved)),
        "turns_mean": len(calls) / len(rollouts),
        "response_tokens_mean": float(np.mean([len(call.completion_ids) for call in calls])),
        "staleness_mean": float(np.mean(ages)), "staleness_max": float(max(ages)),
        "truncated_share": sum(call.finish_reason is FinishReason.LENGTH for call in calls) / len(calls),
        "segment_breaks": float(sum(call.break_reason is not None for call in calls)),
        "loss": rng.gauss(0, 0.02), "grad_norm": 0.2 + rng.random() / 10, "samples": float(len(rollouts)),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the run and the key."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_faults", description=__doc__)
    parser.add_argument("folder", type=Path, help="new run folder")
    parser.add_argument("--key", type=Path, required=True, help="file for the places of the faults")
    parser.add_argument("--seed", type=int, default=0, help="places of the faults (default 0)")
    options = parser.parse_args(arguments)
    key = write_run(options.folder, options.seed)
    options.key.write_text("".join(json.dumps(fault) + "\n" for fault in key), encoding="utf-8")


if __name__ == "__main__":
    main()
