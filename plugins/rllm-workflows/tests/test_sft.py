"""Tests workflow ``sft``: its steps are exactly the parser's tokens and masks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rllm_workflows.sft import SFTConfig, SFTWorkflow, steps_of
from rllm_workflows.sft_rows import ConversationRow

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.grouping import group_trajectories
from rllm_core.algorithms.samples import training_samples
from rllm_core.builtin.estimators.without_rewards import SFT
from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, TerminationReason, TrainingSample, Trajectory
from rllm_devkit.scripted import ByteParser, ScriptedEngine

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=6)},
        optional={"weight": st.sampled_from([0, 1])},
    ),
    min_size=2,
    max_size=8,
)


def samples_of(conversation: ConversationRow, method: Any) -> list[TrainingSample]:
    sequences = ByteParser().tokenize_and_mask(conversation.messages, method=method)
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=steps_of(conversation, sequences))])
    [group] = group_trajectories(3, "t", [episode], dispatched_version=7)
    [credits] = RoleEstimators(SFT())([group])
    assert group.weight_version == 7
    return training_samples(group, credits, learns_written=True)


@given(messages=MESSAGES, method=st.sampled_from(["cumulative", "stepwise"]), weight=st.sampled_from([1, 0.25]))
def test_what_is_trained_is_what_the_parser_masks(messages: list[dict[str, Any]], method: Any, weight: float) -> None:
    messages[0] = {"role": "user", "content": "first"}
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        messages.append({"role": "assistant", "content": "last"})
    conversation = ConversationRow.of({"messages": messages, "weight": weight})
    masked = ByteParser().tokenize_and_mask(conversation.messages, method=method)
    samples = samples_of(conversation, method)
    assert len(samples) == len(masked)
    for sample, row in zip(samples, masked, strict=True):
        length = int(np.flatnonzero(row.loss_mask)[-1]) + 1
        assert sample.token_ids.tolist() == row.token_ids[:length].tolist()
        assert sample.loss_mask.tolist() == row.loss_mask[:length].tolist()
        assert sample.logprobs is None
        assert sample.advantages.tolist() == [weight] * int(row.loss_mask.sum())
        assert set(sample.weight_versions) == {7}


def test_steps_show_what_was_asked_and_said() -> None:
    ask, say = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
    conversation = ConversationRow.of({"messages": [ask, {**say, "weight": 0}, ask, say]})
    [step] = steps_of(conversation, ByteParser().tokenize_and_mask(conversation.messages))
    assert [message["content"] for message in step.messages] == ["ask", "say", "ask"]
    assert step.text == "say"
    assert bytes(step.completion_ids[:-1].tolist()) == b"say"
    assert step.weight_version is None
    assert step.logprobs is None


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    texts = ["x", "y" * 100]
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in texts]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def played(config: SFTConfig, index: int, engine: ScriptedEngine | None = None) -> Episode:
    workflow = SFTWorkflow(config)
    return asyncio.run(workflow.run(workflow.tasks("train")[index], Completer(engine or ScriptedEngine())))


def test_tasks_are_named_after_their_lines(rows: Path) -> None:
    workflow = SFTWorkflow(SFTConfig(train=str(rows)))
    assert [task.task_id for task in workflow.tasks("train")] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert [task.task_id for task in workflow.tasks("train")[1:]] == ["rows.jsonl:2"]
    assert workflow.tasks("validation") == []
    engine = ScriptedEngine()
    episode = played(SFTConfig(train=str(rows)), 0, engine)
    assert engine.requests == 0
    assert episode.trajectories[0].reward is None
    assert not episode.trajectories[0].has_reward


def test_rows_that_are_too_long(rows: Path) -> None:
    limited = SFTConfig(train=str(rows), max_tokens=40)
    assert played(limited, 0).trajectories[0].steps
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2 has \d+ tokens, but the limit is 40"):
        played(limited, 1)
    left_out = played(limited.model_copy(update={"too_long": "skip"}), 1)
    assert left_out.trajectories[0].steps == []
    assert left_out.termination_reason is TerminationReason.MAX_PROMPT_TOKENS

    class Short(ScriptedEngine):
        max_model_tokens = 30

    with pytest.raises(ConfigError, match="but the limit is 30"):
        played(SFTConfig(train=str(rows)), 1, Short())


def recorded_row(folder: Path, **changes: Any) -> SFTConfig:
    row = {
        "messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "input_ids": [*b"asked", *b"sa", *b"more", *b"y"],
        "assistant_masks": [0] * 5 + [1] * 2 + [0] * 4 + [1],
    }
    path = folder / "recorded.jsonl"
    path.write_text(json.dumps({key: value for key, value in (row | changes).items() if value is not None}) + "\n")
    return SFTConfig(train=str(path), method="recorded")


def test_recorded_tokens_are_trained_as_they_are(tmp_path: Path) -> None:
    [trajectory] = played(recorded_row(tmp_path), 0).trajectories
    assert [bytes(step.completion_ids.tolist()) for step in trajectory.steps] == [b"sa", b"y"]
    assert bytes(trajectory.steps[1].prompt_ids.tolist()) == b"askedsamore"
    assert trajectory.steps[0].tools == [{"type": "function", "function": {"name": "add"}}]


def test_rows_without_tokens_of_this_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recorded\.jsonl line 1: the row has no input_ids and assistant_masks"):
        played(recorded_row(tmp_path, input_ids=None, assistant_masks=None), 0)
    with pytest.raises(ConfigError, match="line 1: the tokenizer has no token 90000"):
        played(recorded_row(tmp_path, input_ids=[1, 90000], assistant_masks=[0, 1]), 0)


def test_what_the_parser_cannot_mask_names_its_line(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl line 1: parser 'bytes' supports 'cumulative' and 'stepwise'"):
        played(SFTConfig(train=str(rows), method="hf_template"), 0)


def test_a_conversation_that_leaves_its_sequence_says_why() -> None:
    class Forgetful(ByteParser):
        """Drops answers before the last question, as some templates do with reasoning."""

        def bridge_to_next_turn(self, *arguments: Any, **more: Any) -> None:
            return None

        def render(self, messages: Any, **more: Any) -> list[int]:
            last = max(at for at, message in enumerate(messages) if message["role"] == "user")
            dropped = [at < last and message["role"] == "assistant" for at, message in enumerate(messages)]
            kept = [{**m, "content": "..."} if drop else m for m, drop in zip(messages, dropped, strict=True)]
            return super().render(kept, **more)

    turn = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
    conversation = ConversationRow.of({"messages": turn * 3})
    steps = steps_of(conversation, Forgetful().tokenize_and_mask(conversation.messages, method="cumulative"))
    reasons = [step.break_reason for step in steps]
    assert reasons == [None, "bridge_none", "bridge_none"]
    assert [step.segment for step in steps] == sorted(step.segment for step in steps)
    assert len({step.segment for step in steps}) == 1 + sum(reason is not None for reason in reasons)
