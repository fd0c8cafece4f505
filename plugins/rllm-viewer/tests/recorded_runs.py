"""Run folders with recorded groups, written by hand, and the commands that show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from rich.cells import cell_len

from rllm_core.cli import Session
from rllm_core.config import RunConfig, to_toml
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode, FinishReason, Step, Task, TerminationReason, Trajectory
from rllm_viewer.commands.show import show

COLUMNS = 80


def step(prompt: Sequence[Mapping[str, Any]], answer: str, **fields: Any) -> Step:
    """Returns a model call whose token ids are the characters of the last message and of the answer."""
    asked = prompt[-1]["content"] if prompt else ""
    ids = [ord(character) % 1000 for character in answer]
    defaults: dict[str, Any] = {
        "messages": list(prompt),
        "response": {"role": "assistant", "content": answer},
        "prompt_ids": [ord(character) % 1000 for character in asked] if isinstance(asked, str) else [1],
        "completion_ids": ids,
        "logprobs": -np.linspace(0.1, 2, len(ids)),
        "weight_version": 3,
    }
    return Step(**defaults | fields)


def rollout(
    index: int, steps: Sequence[Step], reward: float | None, advantage: float | None = None, **fields: Any
) -> RecordedRollout:
    """Returns a rollout with one trajectory, and one advantage for all of its tokens."""
    outcome = fields.pop("outcome", "trained")
    reason = fields.pop("reason", outcome)
    trajectories = [Trajectory(steps=list(steps), reward=reward)] if steps else []
    episode = Episode(
        **{"task_id": "t", "rollout_id": f"r{index}", "rollout_index": index}
        | fields
        | {"trajectories": fields.get("trajectories", trajectories)}
    )
    numbers = [np.full(len(one.completion_ids), advantage, np.float32) for one in steps]
    return RecordedRollout(episode, outcome, reason, [] if advantage is None else [numbers])


def group(rollouts: Sequence[RecordedRollout], **fields: Any) -> RecordedGroup:
    defaults: dict[str, Any] = {
        "step": 4,
        "group": 187,
        "task": Task(task_id="t", data={"question": "sort: dbca", "answer": "abcd"}),
        "kept": "divided",
        "outcome": "trained",
        "reason": "trained",
        "weight_version": 3,
        "rollouts": rollouts,
    }
    return RecordedGroup(**defaults | fields)


def sorting(**fields: Any) -> RecordedGroup:
    """Returns a group of two rollouts of one turn, one right and one wrong."""
    asked = [{"role": "system", "content": "You sort."}, {"role": "user", "content": "sort: dbca"}]
    parts = {"share": 0.5, "expected": "abcd"}
    return group(
        [
            rollout(0, [step(asked, "abcd")], 1.0, 0.5, is_correct=True, metrics={"share": 1.0}),
            rollout(1, [step(asked, "abdc")], 0.25, -0.5, is_correct=False, metadata={"reward_parts": parts}),
        ],
        **fields,
    )


def failed(**fields: Any) -> RecordedGroup:
    lost = rollout(
        0, [], None, outcome="failed", reason="timeout",
        termination_reason=TerminationReason.TIMEOUT, error="RolloutTimeout: took 60 s",
    )  # fmt: skip
    return group([lost], **{"outcome": "failed", "reason": "timeout", "weight_version": None} | fields)


def with_tools(turns: int = 3, **fields: Any) -> RecordedGroup:
    """Returns a group of one rollout that calls a tool in every turn but the last; its second turn is a new segment."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "3 plus 4"}]
    steps = []
    for turn in range(turns):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": f'{{"turn": {turn}}}'}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        is_last = turn == turns - 1
        steps.append(
            step(
                messages,
                "7" if is_last else "calls",
                **({} if is_last else {"response": answer}),
                segment=int(turn > 0),
                break_reason="prefix_mismatch" if turn == 1 else None,
                finish_reason=FinishReason.LENGTH if is_last else FinishReason.STOP,
                weight_version=3 + turn,
            )
        )
        messages = [*messages, answer, {"role": "tool", "tool_call_id": "1", "content": f"result {turn}"}]
    return group([rollout(0, steps, 1.0, 0.25)], **fields)


def write_run(
    path: Path, groups: Sequence[RecordedGroup] | None = (), *, metrics: Sequence[Mapping[str, Any]] = (), **keys: Any
) -> Path:
    """Writes a run folder; one with ``groups=None`` is as of a version that did not record them."""
    path.mkdir(parents=True)
    config = RunConfig(**{"workflow": "sort", "backend": "local"} | keys)
    (path / "run.toml").write_text(to_toml(config.to_tables()), encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
    if groups is None:
        return path
    offset = 0
    with (path / "groups.jsonl").open("wb") as lines, (path / "groups_index.jsonl").open("w") as index:
        for one in groups:
            line = one.to_json().encode()
            lines.write(line + b"\n")
            index.write(json.dumps(IndexedGroup.of(one, offset, len(line)).to_json()) + "\n")
            offset += len(line) + 1
    return path


def add_tokens(run: Path, texts: Mapping[int, str]) -> None:
    lines = (json.dumps({"id": token, "text": text}) for token, text in texts.items())
    (run / "tokens.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def called(command: Any, *arguments: object, columns: int = COLUMNS, charset: str = "utf-8") -> Result:
    """Calls a command of the viewer; every line that it prints fits in the columns, and no character is control."""
    result = CliRunner(charset=charset).invoke(
        command, [str(argument) for argument in arguments], obj=Session(), env={"COLUMNS": str(columns)}
    )
    if "--json" not in arguments:
        for line in result.output.splitlines():
            assert cell_len(line) <= columns, line
            assert line.isprintable(), repr(line)
    return result


def shown(run: Path, *options: object, columns: int = COLUMNS, charset: str = "utf-8") -> str:
    """Returns what ``show`` prints."""
    result = called(show, run, *options, columns=columns, charset=charset)
    assert result.exit_code == 0, result.exception
    return result.output
