"""A run with everything that the viewer shows, and others with one planted fault each."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from recorded_runs import add_tokens, failed, group, rollout, step, with_tools, write_run

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.types import FinishReason, Step, Task, Trajectory

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)
STEPS = 12
END, OPEN = 256, 257
ROLLOUTS = 4


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def sorted_call(question: str, answer: str, version: int, **fields: Any) -> Step:
    """Returns a call whose tokens are bytes, in a template with control tokens."""
    prompt = [OPEN, *ids_of(f"user\n{question}"), END, OPEN, *ids_of("assistant\n")]
    completion = [*ids_of(answer), END]
    asked = [{"role": "system", "content": "Sort the letters."}, {"role": "user", "content": question}]
    logprobs = -np.linspace(0.01, 2.5, len(completion))
    defaults = {"prompt_ids": prompt, "completion_ids": completion, "logprobs": logprobs, "weight_version": version}
    return step(asked, answer, **defaults | fields)


def sorting(number: int, at: int, kept: str, **fields: Any) -> RecordedGroup:
    """Returns a group of rollouts that sort letters, some of them right."""
    letters = random.Random(number).sample("abcdefgh", 4)
    right = "".join(sorted(letters))
    question = f"sort: {''.join(letters)}"
    rollouts = []
    for index in range(ROLLOUTS):
        solved = (index + number) % ROLLOUTS == 0
        answer = right if solved else right[:2] + right[2:][::-1] if index % 2 else right[::-1]
        share = sum(one == other for one, other in zip(answer, right, strict=True)) / 4
        call = sorted_call(question, answer, max(0, at - 1))
        one = rollout(
            index, [call], share, is_correct=solved, metrics={"share": share}, rollout_id=f"r{number}-{index}",
            metadata={"reward_parts": {"share": share, "expected": right}},
        )  # fmt: skip
        advantages = np.full(len(call.completion_ids), share - 0.5, np.float32)
        weights = np.linspace(0.5, 1.5, len(call.completion_ids)).astype(np.float32)
        # The weights have moved a little since; an entropy bonus was on up to some step.
        trainer = (call.logprobs + np.linspace(-0.2, 0.0, len(call.completion_ids))).astype(np.float32)
        entropies = [[np.linspace(0.1, 2.0, len(call.completion_ids)).astype(np.float32)]] if at > 1 else []
        numbers = {"corrections": [[weights]], "trainer_logprobs": [[trainer]], "entropies": entropies}
        rollouts.append(replace(one, advantages=[[advantages]], **numbers))
    task = Task(task_id=f"word-{number % 5}", data={"question": question, "answer": right})
    return group(rollouts, step=at, group=number, kept=kept, task=task, weight_version=max(0, at - 1), **fields)


def roles(number: int, at: int) -> RecordedGroup:
    asked = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "what?"}],
        }
    ]
    solver = Trajectory(role="solver", steps=[step(asked, '{"answer": [1, 2]}', prompt_ids=[1, 2])], reward=1.0)
    judge = Trajectory(
        role="judge", steps=[step([{"role": "user", "content": "judge"}], "good")], reward=0.5, trainable=False
    )
    one = rollout(0, [], None, trajectories=[solver, judge], rollout_id=f"r{number}-0")
    return group([one], step=at, group=number, kept="first")


def validation(at: int) -> RecordedGroup:
    one = sorting(at, at, "validation", outcome="validation", reason="validation")
    rollouts = [RecordedRollout(replace_solved(each, at), "validation", "validation") for each in one.rollouts]
    return replace(one, group=None, rollouts=rollouts)


def replace_solved(one: RecordedRollout, at: int) -> Any:
    return one.episode.model_copy(update={"is_validation": True, "rollout_id": f"v{at}-{one.episode.rollout_index}"})


def demo(path: Path, steps: int = STEPS, **keys: Any) -> Path:
    """Writes a run of some steps, with groups of every kind."""
    groups = [validation(0)]
    for at in range(1, steps + 1):
        groups.append(sorting(at, at, ("first", "best", "worst", "divided")[at % 4]))
    groups += [
        with_tools(6, step=3, group=100, task=Task(task_id="sum", data={"question": "3 plus 4", "answer": "7"})),
        failed(step=4, group=101, kept="example"),
        roles(102, 5),
        sorting(103, 6, "example", outcome="filtered", reason="uniform_reward"),
        validation(steps),
    ]
    run = write_run(
        path, groups, metrics=[metrics(at, steps) for at in range(1, steps + 1)], training={"steps": steps}, **keys
    )
    write_lines(run / "timings.jsonl", [timings(at) for at in range(1, steps + 1)])
    names = {"reward_mean": 0.2, "solved": 0.1}, {"reward_mean": 0.9, "solved": 0.8}
    events = [
        {"event": "validation", "step": at, "weight_version": at, "rollouts": 8, "failed": 0, **values, "episodes": []}
        for at, values in zip((0, steps), names, strict=True)
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in events))
    owners = [each.episode.rollout_id for one in groups for each in one.rollouts]
    write_lines(run / "group_timings.jsonl", [calls(owner, at) for at, owner in enumerate(owners)])
    texts = {number: chr(number) for number in range(128)} | {END: "<|im_end|>", OPEN: "<|im_start|>"}
    add_tokens(run, texts)
    with (run / "tokens.jsonl").open("a") as file:
        file.write(json.dumps({"id": 226, "text": "\ufffd", "bytes": "e2"}) + "\n")
    (run / "summary.json").write_text(
        json.dumps(
            {
                "status": "completed",
                "optimizer_steps": steps,
                "validation": [{"step": 0, "solved": 0.1}, {"step": steps, "solved": 0.8}],
            }
        )
    )
    return run


def metrics(at: int, steps: int) -> dict[str, float]:
    share = at / steps
    return {
        "step": at, "epoch": 0, "weight_version": at, "reward_mean": share, "trajectory_reward_min": share / 2,
        "trajectory_reward_max": min(1.0, share + 0.3), "solved": share, "groups_solved_by_none": 1 - share,
        "groups_solved_by_some": share / 2, "groups_solved_by_all": share / 2, "turns_mean": 1.0,
        "response_tokens_mean": 5.0 + at, "staleness_mean": at % 2, "staleness_max": at % 2, "truncated_share": 0.0,
        "sampled_entropy": 1 / at, "loss": 0.5, "grad_norm": 0.1, "samples": 16.0, "uniform_groups_share": 0.0,
    }  # fmt: skip


def timings(at: int) -> dict[str, float]:
    return {
        "step": at, "step_seconds": 4.0, "generation_wait_seconds": 2.5, "training_seconds": 1.0, "drain_seconds": 0.0,
        "sync_seconds": 0.25, "between_steps_seconds": 0.5, "tokens_per_second": 1234.5, "generation_idle_share": 0.25,
    }  # fmt: skip


def calls(owner: str, at: int) -> dict[str, Any]:
    listed = [
        {"kind": "model", "start": 0.1, "seconds": 0.5 + at / 100},
        {"kind": "tool", "name": "add", "start": 0.7 + at / 100, "seconds": 0.2},
        {"kind": "reward", "start": 1.0 + at / 100, "seconds": 0.1},
    ]
    return {"rollout": owner, "seconds": 1.2 + at / 100, "calls": listed}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Planted faults


def swapped_rewards(path: Path) -> Path:
    """The grader gives two rollouts each other's reward: the right answer has 0, and the wrong one 1."""
    right = sorting(1, 1, "divided")
    answers = {bool(one.episode.is_correct): one for one in right.rollouts}
    rollouts = []
    for solved, one in answers.items():
        reward = 0.0 if solved else 1.0
        trajectory = one.episode.trajectories[0].model_copy(update={"reward": reward})
        fields = {
            "trajectories": [trajectory],
            "metadata": {"reward_parts": {"share": reward, "expected": right.task.data["answer"]}},
            "metrics": {},
            "is_correct": not solved,
        }
        rollouts.append(replace(one, episode=one.episode.model_copy(update=fields)))
    return write_run(path, [replace(right, rollouts=rollouts)], metrics=[metrics(1, 2)])


def broken_prefix(path: Path) -> Path:
    """The chat template drops the reasoning of earlier answers, so the second prompt does not continue the first."""
    asked = [{"role": "user", "content": "7 times 6"}]
    thought = "<think>six sevens</think>42"
    opening = ids_of("user: 7 times 6\nassistant: ")
    first = step(asked, thought, prompt_ids=opening, completion_ids=ids_of(thought), logprobs=-np.ones(len(thought)))
    later = [*asked, {"role": "assistant", "content": thought}, {"role": "user", "content": "sure?"}]
    later_ids = [*opening, *ids_of("42\nuser: sure?\nassistant: ")]
    second = step(later, "yes", prompt_ids=later_ids, segment=1, break_reason="prefix_mismatch")
    run = write_run(
        path, [group([rollout(0, [first, second], 1.0, 0.5)])], metrics=[metrics(4, 4) | {"segment_breaks": 1.0}]
    )
    add_tokens(run, {number: chr(number) for number in range(128)})
    return run


def stale_group(path: Path) -> Path:
    """A group that weights of version 1 sampled is trained at step 9."""
    late = sorting(9, 9, "worst")
    rollouts = []
    for one in late.rollouts:
        call = one.episode.trajectories[0].steps[0].model_copy(update={"weight_version": 1})
        trajectory = one.episode.trajectories[0].model_copy(update={"steps": [call]})
        rollouts.append(replace(one, episode=one.episode.model_copy(update={"trajectories": [trajectory]})))
    rows = [metrics(at, 9) | {"staleness_max": 7.0 if at == 9 else 0.0} for at in range(1, 10)]
    groups = [sorting(8, 8, "best"), replace(late, rollouts=rollouts, weight_version=1)]
    run = write_run(path, groups, metrics=rows)
    syncs = [{"event": "sync", "version": version, "step": version, "reason": "step"} for version in range(9)]
    started = {"event": "dispatch", "group": 9, "task": "t", "epoch": 0, "rollouts": 4, "weight_version": 1}
    complete = {"event": "enqueue", "group": 9, "weight_version": 1, "left_out": 0, "filtered": None}
    trained = {"event": "consume", "groups": [9], "weight_version": 8}
    events = [*syncs[:2], started, *syncs[2:7], complete, *syncs[7:], trained]
    (run / "events.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in events))
    return run


def cut_answers(path: Path) -> Path:
    """Answers end at the limit of tokens, in the middle."""
    asked = [{"role": "user", "content": "explain"}]
    long = [
        rollout(at, [step(asked, "because it is", finish_reason=FinishReason.LENGTH)], 0.0, 0.0, is_correct=False)
        for at in range(4)
    ]
    return write_run(
        path,
        [group(long, step=1, reason="uniform_reward", outcome="filtered", kept="example")],
        metrics=[metrics(1, 2) | {"truncated_share": 1.0}],
    )


def hacked_reward(path: Path) -> Path:
    """The reward counts a word: an answer that repeats it has the highest reward, though it is wrong."""
    asked = [{"role": "user", "content": "what is the capital of France?"}]
    honest = rollout(
        0, [step(asked, "Paris")], 1.0, -0.7, is_correct=True, metadata={"reward_parts": {"please": 0, "right": 1}}
    )
    hacked = rollout(
        1,
        [step(asked, "please " * 40)],
        8.0,
        0.7,
        is_correct=False,
        metadata={"reward_parts": {"please": 8, "right": 0}},
    )
    task = Task(task_id="capital", data={"question": "what is the capital of France?", "answer": "Paris"})
    return write_run(path, [group([honest, hacked], task=task)], metrics=[metrics(1, 2)])
