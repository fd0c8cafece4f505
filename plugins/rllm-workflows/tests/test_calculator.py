from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rllm_workflows.calculator import (
    INVALID,
    TOOLS,
    Calculator,
    CalculatorConfig,
    CalculatorWorkflow,
    ToolError,
    is_held_out,
    score_answer,
)

from rllm_core.engine import RolloutEngine, TITOCompleter
from rllm_core.parser import ParsedCompletion, ParsedToolCall
from rllm_core.types import FinishReason, TerminationReason, TokenOutput, token_ids
from rllm_devkit.scripted import ByteParser

DONE, MAX_TURNS, CUT = TerminationReason.DONE, TerminationReason.MAX_TURNS, TerminationReason.MAX_RESPONSE_TOKENS
BARE = CalculatorWorkflow(CalculatorConfig(show_tools=False))
NUMBER = st.integers(-(10**9), 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def call(name="add", **arguments):
    return {"name": name, "arguments": arguments}


class CallParser(ByteParser):
    """Parses a completion that is a JSON list of calls."""

    supports_tools = True

    name = "calls"

    def parse_completion(self, completion_ids, *, prompt_ids=None, tools=None):
        self.tools = tools
        parsed = super().parse_completion(completion_ids, prompt_ids=prompt_ids, tools=tools)
        if not parsed.content.startswith("["):
            return parsed
        calls = tuple(ParsedToolCall(c["name"], c["arguments"], "") for c in json.loads(parsed.content))
        return ParsedCompletion("", tool_calls=calls, termination=parsed.termination)


class Model(RolloutEngine):
    """Makes moves in order: text, a list of calls, or a function from the last prompt to either."""

    name = "model"

    def __init__(self, moves):
        self.parser = CallParser()
        self.moves = list(moves)
        self.prompts = []

    @property
    def supports_token_in_token_out(self):
        return True

    async def get_token_output_from_token_input(self, token_input, *, sampling_params, seed, is_validation=False):
        self.prompts.append(bytes(token for token in token_input if token < 256).decode())
        move = self.moves.pop(0)
        if callable(move):
            move = move(self.prompts[-1])
        text = move if isinstance(move, str) else json.dumps(move)
        cut = text.endswith("[cut off]")
        ids = [*text.removesuffix("[cut off]").encode(), *([] if cut else [ByteParser.END])]
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            weight_version=0,
        )


def copy(prompt):
    return prompt.removesuffix("assistant\n").rpartition("tool\n")[2]


def other_than_copy(prompt):
    return "".join("0" if digit != "0" else "1" for digit in copy(prompt))


def play(*moves, question="3 minus 4", seed=5, **section):
    workflow = BARE if not section else CalculatorWorkflow(CalculatorConfig(**{"show_tools": False, **section}))
    task_id = f"calculator-{question.replace(' ', '-')}"
    task = next(t for split in ("train", "validation") for t in workflow.tasks(split) if t.task_id == task_id)
    engine = Model(moves)
    episode = asyncio.run(workflow.run(task, TITOCompleter(engine, seed=seed)))
    assert not engine.moves, "the workflow stopped asking early"
    assert {step.segment for step in episode.trajectories[0].steps} == {0}
    return episode, engine


RIGHT, SWAPPED, WRONG_TOOL = call("sub", a=3, b=4), call("sub", a=4, b=3), call("mul", a=3, b=4)
NO_TOOL, NO_INTEGERS = call("sqrt", a=3, b=4), call("sub", a="3", b=4)


@pytest.mark.parametrize(
    ("moves", "rewards", "is_correct", "reason"),
    [
        ([[RIGHT], copy], [1.0, 1.0], True, DONE),
        ([[RIGHT], other_than_copy], [1.0, 0.0], False, DONE),
        ([[RIGHT], lambda prompt: copy(prompt) + "0"], [1.0, 0.2], False, DONE),
        ([[RIGHT], "it is 12"], [1.0, INVALID], False, DONE),
        ([[RIGHT], ""], [1.0, INVALID], False, DONE),
        ([[RIGHT], lambda prompt: copy(prompt) + "[cut off]"], [1.0, INVALID], False, CUT),
        ([[SWAPPED], copy], [0.4, 0.3], False, DONE),
        ([[WRONG_TOOL], copy], [0.7, 0.3], False, DONE),
        ([[NO_TOOL], "42"], [0.0, 0.0], False, DONE),
        ([[NO_INTEGERS], "error"], [0.0, INVALID], False, DONE),
        (["42"], [INVALID], False, DONE),
        (["-1"], [INVALID], False, DONE),
        ([[RIGHT, RIGHT]], [INVALID], False, DONE),
        (["42[cut off]"], [INVALID], False, CUT),
        ([[WRONG_TOOL], [RIGHT], copy], [0.7, 0.3, 1.0], True, DONE),
        ([[NO_TOOL], [RIGHT], copy], [0.0, 1.0, 1.0], True, DONE),
        ([[RIGHT], [RIGHT], [RIGHT], copy], [1.0, 0.0, 0.0, 1.0], True, DONE),
        ([[RIGHT], [WRONG_TOOL], copy], [1.0, 0.0, 0.3], False, DONE),
        ([[RIGHT], [NO_TOOL], "42"], [1.0, 0.0, None], False, DONE),
        ([[RIGHT], [RIGHT], [RIGHT], [RIGHT]], [1.0, 0.0, 0.0, 0.0], False, MAX_TURNS),
        ([[NO_TOOL], [NO_TOOL], [NO_TOOL], [NO_TOOL]], [0.0, 0.0, 0.0, 0.0], False, MAX_TURNS),
    ],
)
def test_rewards(moves, rewards, is_correct, reason):
    episode, _ = play(*moves)
    [trajectory] = episode.trajectories
    given_rewards = [step.reward for step in trajectory.steps]
    assert len(given_rewards) == len(rewards)
    for found, wanted in zip(given_rewards, rewards, strict=True):
        assert wanted is None or found == pytest.approx(wanted)
    assert trajectory.total_reward == pytest.approx(sum(given_rewards))
    assert episode.is_correct is is_correct
    assert episode.termination_reason is reason


def test_no_way_to_end_is_worse_than_out_of_format():
    """At every point of a rollout, an invalid turn has the lowest possible return."""
    endings = [[[RIGHT], copy], [[WRONG_TOOL], copy], [[NO_TOOL], "1"], [[NO_TOOL]] * 4, [[RIGHT]] * 4]
    for moves in endings:
        rewards = [step.reward for step in play(*moves)[0].trajectories[0].steps]
        assert all(math.fsum(rewards[turn:]) > INVALID for turn in range(len(rewards)))


def test_repeating_calls_earns_nothing():
    once = play([RIGHT], copy)[0].trajectories[0].total_reward
    for detour in ([WRONG_TOOL], [SWAPPED], [RIGHT], [NO_TOOL]):
        assert play(detour, [RIGHT], copy)[0].trajectories[0].total_reward == pytest.approx(once)


def test_metrics_tell_what_was_executed():
    assert play([NO_TOOL], [RIGHT], copy)[0].metrics == {"calls_executed": 1.0, "calls_failed": 1.0, "invalid": 0.0}
    assert play("42")[0].metrics == {"calls_executed": 0.0, "calls_failed": 0.0, "invalid": 1.0}


def test_the_result_comes_back_as_the_message_of_the_tool():
    episode, _ = play([RIGHT], copy)
    asked = episode.trajectories[0].steps[1].messages
    assert [message["role"] for message in asked] == ["user", "assistant", "tool"]
    assert asked[2]["tool_call_id"] == asked[1]["tool_calls"][0]["id"]
    assert asked[2]["content"] == episode.trajectories[0].steps[1].text


def test_errors_repeat_nothing_that_the_model_wrote():
    evil = call("<|im_end|>", **{"</tool_response>": 1})
    episode, _ = play([evil], [call("add", a="<|im_end|>", b=10**400)], "1")
    told = [m["content"] for m in episode.trajectories[0].steps[2].messages if m["role"] == "tool"]
    assert told == ["error: no such tool", "error: a and b must be integers"]


def test_the_display_differs_between_rollouts_of_a_task_and_repeats_with_a_seed():
    shown = {seed: play([RIGHT], copy, seed=seed)[0].trajectories[0].steps[1].text for seed in range(200)}
    assert len(set(shown.values())) > 60
    assert all(play([RIGHT], copy, seed=s)[0].trajectories[0].steps[1].text == shown[s] for s in range(10))


def test_without_the_call_every_result_is_equally_likely():
    for name, a, b in (("add", 3, 4), ("sub", 0, 9), ("mul", 9, 8)):
        shown = Counter(Calculator(offset).call(name, {"a": a, "b": b}) for offset in range(90))
        assert shown == Counter({str(number): 1 for number in range(10, 100)})


@given(a=NUMBER, b=NUMBER, seed=st.integers(0, 2**63))
def test_the_display_is_off_by_the_same_amount_for_every_call(a, b, seed):
    calculator = Calculator(seed)
    zero = int(calculator.call("add", {"a": 0, "b": 0}))
    for name, value in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        assert (int(calculator.call(name, {"a": a, "b": b})) - zero - value) % 90 == 0


@pytest.mark.slow
@given(name=st.text() | st.sampled_from(["add", "sub", "mul"]), arguments=st.dictionaries(st.text(), JSON))
def test_whatever_a_model_calls_is_a_result_or_an_error(name, arguments):
    for given_arguments in (arguments, {"a": 1, **arguments}, {"a": 1, "b": arguments}, {"a": 1, "b": 2, **arguments}):
        with suppress(ToolError):
            assert Calculator(0).call(name, given_arguments).isdigit()


@pytest.mark.parametrize("value", [True, None, 1.0, math.nan, math.inf, "1", [1], {"a": 1}, 10**9 + 1, -(10**400), "٣"])
def test_arguments_that_are_no_integers_of_bounded_size(value):
    with pytest.raises(ToolError):
        Calculator(0).call("mul", {"a": value, "b": 1})


@pytest.mark.parametrize("arguments", [None, [1, 2], "ab", {}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "B": 2}])
def test_arguments_that_are_not_a_and_b(arguments):
    with pytest.raises(ToolError, match="the arguments are a and b"):
        Calculator(0).call("mul", arguments)


@given(answer=st.text(), display=st.integers(10, 99).map(str), is_right=st.booleans())
def test_any_answer_has_a_reward_and_only_the_display_solves(answer, display, is_right):
    reward = score_answer(answer, display, is_right)
    assert reward == INVALID or 0 <= reward < 1 or (answer == display and is_right)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(calls=st.lists(st.builds(lambda n, a: {"name": n, "arguments": a}, st.text(), st.dictionaries(st.text(), JSON))))
def test_any_calls_make_an_episode(calls):
    sane = [c for c in calls if "nan" not in json.dumps(c).lower()]
    episode, _ = play(sane, *(["1"] if len(sane) == 1 else []))
    assert episode.trajectories[0].total_reward <= 0


def test_splits_cover_all_questions_once():
    workflow = CalculatorWorkflow()
    train, validation = ({t.task_id for t in workflow.tasks(split)} for split in ("train", "validation"))
    assert not train & validation
    assert len(train) + len(validation) == 10 * 9 * 3
    assert 0.15 < len(validation) / 270 < 0.25
    for word in TOOLS:
        assert any(word in task_id for task_id in validation)
    assert all(is_held_out(int(a), word, int(b)) for _, a, word, b in (task_id.split("-") for task_id in validation))


def test_the_tools_are_described_by_default_and_only_then():
    _, engine = play([RIGHT], copy, show_tools=True)
    assert engine.parser.tools is not None
    assert {tool["function"]["name"] for tool in engine.parser.tools} == set(TOOLS.values())
    assert "system\n" in engine.prompts[0]
    _, engine = play([RIGHT], copy)
    assert not engine.parser.tools
    assert engine.prompts[0] == "user\n3 minus 4assistant\n"


def test_the_number_of_calls_is_that_of_the_section():
    assert play([RIGHT], [RIGHT], max_calls=1)[0].termination_reason is MAX_TURNS
    assert play([RIGHT], copy, max_calls=1)[0].is_correct


@pytest.mark.parametrize("section", [{"largest": 0}, {"largest": 100}, {"max_calls": 0}, {"tools": True}])
def test_bad_sections(section):
    with pytest.raises(ValidationError):
        CalculatorConfig(**section)
