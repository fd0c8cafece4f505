"""Tests that records the core builds without validation equal validated ones."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from rllm_core.engine import TITOCompleter
from rllm_core.records import Record
from rllm_core.types import (
    FinishReason,
    FrozenDict,
    Messages,
    MessageView,
    Step,
    Trajectory,
    freeze,
    logprobs,
    token_ids,
)


def checked_fields() -> dict[str, Any]:
    """Returns the fields of a step, as `Step` stores them."""
    return {
        "step_id": "s",
        "messages": MessageView([{"role": "user", "content": "ask"}]),
        "response": freeze({"role": "assistant", "content": "yes"}),
        "prompt_ids": token_ids([1, 2]),
        "prompt_media": (),
        "completion_ids": token_ids([3, 4]),
        "logprobs": logprobs([-0.5, -1.0]),
        "finish_reason": FinishReason.STOP,
        "weight_version": 3,
        "segment": 1,
        "break_reason": "shrunk",
        "control_tokens": 2,
    }


def pair() -> tuple[Step, Step]:
    """Returns the same step, trusted and validated."""
    return Step._trusted(**checked_fields()), Step(**checked_fields())


def test_a_trusted_record_is_the_validated_one() -> None:
    trusted, validated = pair()
    assert trusted == validated
    assert list(trusted.__dict__) == list(validated.__dict__) == list(Step.model_fields)
    assert {name: type(value) for name, value in trusted} == {name: type(value) for name, value in validated}
    assert trusted.model_fields_set == validated.model_fields_set
    assert (trusted.model_extra, trusted.__pydantic_private__) == (
        validated.model_extra,
        validated.__pydantic_private__,
    )
    assert repr(trusted) == repr(validated)
    assert trusted.to_json() == validated.to_json()
    for options in ({}, {"mode": "json"}, {"exclude_unset": True}):
        assert str(trusted.model_dump(**options)) == str(validated.model_dump(**options))


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda step: pickle.loads(pickle.dumps(step)),  # noqa: S301 - written here
        lambda step: Step.from_json(step.to_json()),
        lambda step: Step.model_validate(step.model_dump()),
        lambda step: step.model_copy(update={"reward": 1.0}),
        lambda step: step.model_copy(deep=True),
        lambda step: pickle.loads(pickle.dumps(Trajectory(steps=[step, step]))).steps[1],  # noqa: S301
    ],
)
def test_copies_of_a_trusted_record_are_those_of_the_validated_one(again: Callable[[Step], Step]) -> None:
    trusted, validated = pair()
    copied = again(trusted)
    assert copied == again(validated)
    assert copied.model_fields_set == again(validated).model_fields_set
    assert trusted == validated, "and leave the original as it was"


def test_assignments_to_a_trusted_record_are_validated_and_its_own() -> None:
    first, other = Step._trusted(**checked_fields()), Step._trusted(**checked_fields())
    fields_set = set(other.model_fields_set)
    first.reward = 1
    assert type(first.reward) is float
    assert first.model_fields_set == {*fields_set, "reward"}
    for name, wrong in (("reward", float("nan")), ("logprobs", [-1.0]), ("weight_version", -1), ("unknown", 1)):
        before = first.to_json()
        with pytest.raises((ValidationError, ValueError)):
            setattr(first, name, wrong)
        assert first.to_json() == before
    for copied in (other.model_copy(), other._copied()):
        assert copied == other
        copied.reward = 2.0
        assert copied.model_fields_set == {*fields_set, "reward"}
        assert other.reward is None
        assert other.model_fields_set == fields_set
    assert Step._trusted(**checked_fields()).model_fields_set == fields_set
    assert Step._trusted(**checked_fields()).reward is None


def test_a_trusted_record_needs_what_has_no_common_default() -> None:
    fields = checked_fields()
    for missing in ("step_id", "prompt_ids", "completion_ids"):
        with pytest.raises(TypeError, match=f"needs {missing}"):
            Step._trusted(**{name: value for name, value in fields.items() if name != missing})
    with pytest.raises(TypeError, match="Step has no other"):
        Step._trusted(**fields, other=1)
    bare = Step._trusted(step_id="s", prompt_ids=fields["prompt_ids"], completion_ids=fields["completion_ids"])
    assert bare == Step(step_id="s", prompt_ids=[1, 2], completion_ids=[3, 4])
    assert type(bare.metadata) is FrozenDict


def test_a_trusted_step_takes_less_memory() -> None:
    trusted, validated = pair()
    assert sys.getsizeof(trusted.__dict__) < 0.7 * sys.getsizeof(validated.__dict__)
    assert Step._trusted(**checked_fields()).model_fields_set is trusted.model_fields_set


def test_trusted_records_of_every_class_take_less_memory() -> None:
    for name in ("one", "two"):
        fields: dict[str, Any] = {f"{name}_{number}": (int, number) for number in range(20)}
        record = create_model(name, __base__=Record, **fields)
        assert sys.getsizeof(record._trusted().__dict__) < 0.7 * sys.getsizeof(record().__dict__)


def test_what_a_completer_returns_is_what_validation_makes_of_it(toys: SimpleNamespace) -> None:
    """Compares values and types of all fields, in continued and broken conversations."""
    parser = toys.BridgingParser()
    engine = toys.ListEngine(parser, [toys.letters(text) for text in ("one", "two", "three")])

    async def play() -> list[Step]:
        completer = TITOCompleter(engine)
        messages = Messages([{"role": "user", "content": "ask"}])
        steps = [await completer.complete(messages)]
        steps.append(await completer.complete([*messages, steps[0].response, {"role": "user", "content": "more"}]))
        steps.append(await completer.complete([{"role": "user", "content": "something else"}]))
        return steps

    steps = asyncio.run(play())
    assert [step.break_reason for step in steps] == [None, None, "shrunk"]
    for step in steps:
        validated = Step(**step.__dict__)
        assert step == validated
        assert {name: type(value) for name, value in step} == {name: type(value) for name, value in validated}
        assert json.loads(step.to_json()) == json.loads(validated.to_json())
        assert not any(getattr(step, name).flags.writeable for name in ("prompt_ids", "completion_ids", "logprobs"))
