"""``export``, then ``import``: no field is lost that the format holds, and documents follow the format's rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_of_others import RULES
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import TypeAdapter
from recorded_runs import failed, group, rollout, shown, sorting, step, with_tools, write_run
from travelers import exported, held, imported, rows_of, trained

from rllm_core.algorithms.samples import training_samples
from rllm_core.plugins import PluginManager
from rllm_core.types import Trajectory, TrajectoryGroup
from rllm_viewer.travel.fields import ALL, TEXT, TOKENS
from rllm_viewer.travel.formats import FORMATS
from rllm_viewer.travel.selection import Filters, picked

WORKFLOWS = ("calculator", "offered", "solver_judge", "agent")
TRAINED_ONLY = ("sft", "openai", "hf")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    plugins, known = PluginManager.from_environment(), dict[str, Path]()

    def run(workflow: str) -> Path:
        if workflow not in known:
            known[workflow] = trained(tmp_path_factory.mktemp("run") / workflow, plugins, workflow)
        return known[workflow]

    return run


def check(run: Path, name: str, folder: Path) -> dict[str, Any]:
    """Exports a run and imports it again; returns what was lost on the way out."""
    out = folder / f"{name}{FORMATS[name].suffixes[0]}"
    found = exported(run, out, name)
    for row in rows_of(out):
        RULES[name].model_validate_json(json.dumps(row))
    back = imported(out, folder / f"{name}-back", name)
    assert back["lost"] == {}
    assert back["rollouts"] == found["rollouts"] or name == "openai"
    before, after = held(run, name), held(folder / f"{name}-back", name)
    for field in FORMATS[name].holds:
        assert after.get(field) == before.get(field), field
    assert not any(field in found["lost"] for field in FORMATS[name].holds)
    lost = held_by_none(folder / f"{name}-back", name)
    assert not lost & (ALL - FORMATS[name].holds) - {"step.segment", "step.finish_reason"}, "nothing is invented"
    return dict(found["lost"])


def held_by_none(run: Path, name: str) -> set[str]:
    from rllm_viewer.travel.fields import values

    made = {"task.task_id", "group.step", "group.kept", "rollout.outcome", "rollout.reason", "episode.rollout_index"}
    return {field for one in picked(run, Filters()) for field, _ in values(one)} - FORMATS[name].holds - made


@pytest.mark.slow
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_real_runs_travel_in_every_format(runs: Callable[[str], Path], tmp_path: Path, workflow: str) -> None:
    run = runs(workflow)
    lost = {name: check(run, name, tmp_path) for name in FORMATS}
    assert lost["verifiers"] == lost["atif"] == {}
    for name in ("sft", "openai", "hf", "inspect"):
        assert lost[name]["step.logprobs"] > 0
    assert ("step.prompt_ids" in lost["sft"], "step.prompt_ids" in lost["inspect"]) == (False, True)
    rows = rows_of(tmp_path / "sft.jsonl")
    assert all(bool(row["tools"]) == (workflow == "offered") for row in rows)
    roles = {message["role"] for row in rows for message in row["messages"]}
    assert {"user", "assistant"} | ({"tool"} if workflow == "calculator" else set()) <= roles
    assert "reward" in shown(tmp_path / "inspect-back")


@pytest.mark.slow
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_rows_have_exactly_the_tokens_that_were_trained(
    runs: Callable[[str], Path], tmp_path: Path, workflow: str
) -> None:
    """The masks are those of the training samples: sampled tokens, each in one row."""
    run = runs(workflow)
    exported(run, tmp_path / "rows.jsonl", "sft")
    rows = [(row["input_ids"], row["assistant_masks"]) for row in rows_of(tmp_path / "rows.jsonl")]
    expected = []
    for one in picked(run, Filters()):
        for trajectory in one.rollout.episode.trajectories:
            samples = training_samples(
                TrajectoryGroup(
                    group_id=0, task_id="t", trajectories=[trajectory], rollout_ids=["r"], weight_version=0
                ),
                [np.zeros(len(trajectory.steps))],
            )
            expected += [(sample.token_ids.tolist(), sample.loss_mask.astype(int).tolist()) for sample in samples]
    assert sorted(rows) == sorted(expected)


@pytest.mark.slow
def test_what_openai_gets_is_what_its_library_sends(runs: Callable[[str], Path], tmp_path: Path) -> None:
    messages = TypeAdapter(list[ChatCompletionMessageParam])
    tools = TypeAdapter(list[ChatCompletionToolParam])
    for workflow in ("calculator", "offered"):
        exported(runs(workflow), tmp_path / f"{workflow}.jsonl", "openai")
        for row in rows_of(tmp_path / f"{workflow}.jsonl"):
            messages.validate_python([{k: v for k, v in each.items() if k != "weight"} for each in row["messages"]])
            tools.validate_python(row.get("tools", []))


@pytest.mark.parametrize("name", FORMATS)
def test_breaks_tools_and_advantages_travel(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [sorting(), with_tools(step=5, group=188)])
    check(run, name, tmp_path)


@pytest.mark.parametrize("name", ["verifiers", "inspect"])
def test_failed_rollouts_travel_where_they_can(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [sorting(), failed(step=6, group=189)])
    check(run, name, tmp_path)
    assert "RolloutTimeout" in shown(tmp_path / f"{name}-back", "--group", 189)


@pytest.mark.parametrize("name", ["sft", "openai", "hf", "atif"])
def test_failed_rollouts_are_counted_where_they_cannot(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [sorting(), failed(step=6, group=189)])
    found = exported(run, tmp_path / "out.jsonl", name)
    assert found["lost"]["rollout (without a model call)"] == 1
    assert found["rollouts"] == 3
    assert found["rows"] == 2


def odd(name: str) -> Any:
    """A conversation that no format but ours expresses in its own words."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,  "b": "\\u00e9"}'}}
    broken = {"type": "function", "function": {"name": "add", "arguments": "{not json"}}
    asked = [
        {"role": "system", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]},
        {"role": "user", "content": "3 plus 4", "name": "Ada"},
        {"role": "assistant", "content": "an example, not sampled"},
        {"role": "user", "content": "again"},
    ]
    answer = {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning_content": "hm"}
    answers = [
        {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "add"},
        {"role": "tool", "content": "no id"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "x": 1}}]
    first = step(asked, "calls", response=answer, tools=tools)
    ids = [*first.prompt_ids, *first.completion_ids, 7]
    second = step([*asked, answer, *answers], "7", tools=tools, prompt_ids=ids, metadata={"note": "ü"}, reward=0.5)
    judged = step([{"role": "user", "content": "judge"}], "good", weight_version=None, logprobs=None)
    trajectories = [
        Trajectory(role="solver", steps=[first, second], reward=None, metadata={"k": [1]}),
        Trajectory(role="judge", steps=[judged], reward=0.0, trainable=name not in TRAINED_ONLY),
    ]
    return group([rollout(0, [], None, trajectories=trajectories, metrics={"m": 2.5})], group=3)


@pytest.mark.parametrize("name", ["atif", "verifiers", "inspect"])
def test_messages_that_a_format_words_otherwise_come_back_exactly(tmp_path: Path, name: str) -> None:
    check(write_run(tmp_path / "run", [odd(name)]), name, tmp_path)


@pytest.mark.parametrize("name", ["sft", "openai", "hf"])
def test_examples_are_not_learned_and_untrained_roles_are_counted(tmp_path: Path, name: str) -> None:
    found = exported(write_run(tmp_path / "run", [odd(name)]), tmp_path / "out.jsonl", name)
    assert found["lost"]["trajectory (not trained, or without a model call)"] == 1
    rows = rows_of(tmp_path / "out.jsonl")
    if name == "hf":
        assert [len(row["prompt"]) for row in rows] == [4, 7]
    else:
        answers = [message for message in rows[0]["messages"] if message["role"] == "assistant"]
        assert [message.get("weight", 1) for message in answers] == [0, 1, 1]
    if name == "openai":
        assert found["lost"]["message of assistant.reasoning_content"] == 1
        assert found["lost"]["message of tool.name"] == 1


def test_answers_in_a_clients_words_stay_one_conversation(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "ask"}]
    first = step(asked, "said ")
    ids = [*first.prompt_ids, *first.completion_ids, 5]
    theirs = {"role": "assistant", "content": [{"type": "text", "text": "said"}]}
    second = step([*asked, theirs, {"role": "user", "content": "more"}], "done", prompt_ids=ids)
    run = write_run(tmp_path / "run", [group([rollout(0, [first, second], 1.0, 0.5)])])
    for name in ("openai", "verifiers"):
        found = exported(run, tmp_path / f"{name}.jsonl", name)
        assert found["lost"]["step.messages (answers that came back in a client's words)"] == 1
        assert found["rows"] == 1
    [row] = rows_of(tmp_path / "openai.jsonl")
    assert row["messages"][1] == {"role": "assistant", "content": "said "}


@pytest.mark.parametrize("name", ["sft", "hf"])
def test_parquet_holds_the_same(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [sorting(), with_tools(step=5, group=188)])
    exported(run, tmp_path / "rows.parquet", name)
    exported(run, tmp_path / "rows.jsonl", name)
    imported(tmp_path / "rows.parquet", tmp_path / "one", name)
    imported(tmp_path / "rows.jsonl", tmp_path / "other", name)
    assert held(tmp_path / "one", name) == held(tmp_path / "other", name) == held(run, name)


def test_every_format_declares_fields_that_exist() -> None:
    for each in FORMATS.values():
        assert each.holds <= ALL
        assert each.holds >= TEXT
    assert FORMATS["sft"].holds >= TOKENS
    assert set(RULES) == set(FORMATS)
