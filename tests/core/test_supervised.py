"""Tests supervised data: rows and masks of example conversations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.errors import ConfigError
from rllm_core.parser import MaskedTokens
from rllm_core.types import PlacedMedia
from rllm_devkit.scripted import ByteParser

ASK = {"role": "user", "content": "ask"}
AGAIN = {"role": "user", "content": "again"}
RESULT = {"role": "tool", "content": "result"}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def learned(row: MaskedTokens) -> list[int]:
    return row.token_ids[row.loss_mask].tolist()


def test_cumulative_is_one_row_whose_mask_is_what_was_said(toys: SimpleNamespace) -> None:
    for parser in (toys.BridgingParser(), toys.LetterParser()):
        conversation = [ASK, says("one"), RESULT, says("two"), AGAIN, says("three")]
        [row] = parser.tokenize_and_mask(conversation)
        assert row.token_ids.tolist() == parser.render(conversation, add_generation_prompt=False)
        assert learned(row) == [token for text in ("one", "two", "three") for token in toys.letters(text)]
        assert row.token_ids.dtype == np.int32
        assert row.loss_mask.dtype == np.bool_
        assert not row.token_ids.flags.writeable
        assert not row.loss_mask.flags.writeable


def test_stepwise_is_a_row_per_assistant_message(toys: SimpleNamespace) -> None:
    parser = toys.LetterParser()
    conversation = [ASK, says("one"), RESULT, says("two")]
    rows = parser.tokenize_and_mask(conversation, tools=[{"name": "f"}], method="stepwise")
    assert [learned(row) for row in rows] == [toys.letters("one"), toys.letters("two")]
    for row, before in zip(rows, ([ASK], conversation[:3]), strict=True):
        prompt = parser.render(before, tools=[{"name": "f"}])
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert not row.loss_mask[: len(prompt)].any()
        assert row.loss_mask[len(prompt) :].all()


def test_where_a_rollout_would_leave_its_sequence_a_row_begins(toys: SimpleNamespace) -> None:
    conversation = [ASK, says("one"), RESULT, says("two"), AGAIN, says("three")]
    first, second = toys.MergingParser().tokenize_and_mask(conversation)
    assert learned(first) == toys.letters("one") + toys.letters("two")
    assert learned(second) == toys.letters("three")
    assert second.loss_mask.sum() == len(toys.letters("three"))


@given(
    roles=st.lists(st.sampled_from(["user", "tool", "assistant", "system"]), max_size=8).map(lambda r: ["user", *r]),
    parser=st.sampled_from(["LetterParser", "BridgingParser", "NoncompliantParser"]),
)
def test_whatever_the_order_of_roles_every_answer_is_learned_once(
    toys: SimpleNamespace, roles: list[str], parser: str
) -> None:
    conversation = [{"role": role, "content": chr(97 + number)} for number, role in enumerate([*roles, "assistant"])]
    rows = getattr(toys, parser)().tokenize_and_mask(conversation)
    said = [m["content"] for m in conversation if m["role"] == "assistant"]
    assert [t for row in rows for t in learned(row)] == [t for text in said for t in toys.letters(text)]
    assert all(row.loss_mask.any() for row in rows)


def test_the_conversation_goes_on_with_the_message_and_not_with_what_is_read_from_its_tokens(
    toys: SimpleNamespace,
) -> None:
    class Forgetful(toys.LetterParser):  # type: ignore[name-defined, misc]
        def parse_completion(self, completion_ids: Any, **more: Any) -> Any:
            return super().parse_completion([])

    [row] = Forgetful().tokenize_and_mask([ASK, says("one"), AGAIN, says("two")])
    assert learned(row) == toys.letters("one") + toys.letters("two")


def test_messages_of_weight_0_are_shown_and_not_learned(toys: SimpleNamespace) -> None:
    parser = toys.BridgingParser()
    conversation = [ASK, says("one", weight=0), AGAIN, says("two", weight=1)]
    plain = [ASK, says("one"), AGAIN, says("two")]
    [row] = parser.tokenize_and_mask(conversation)
    assert row.token_ids.tolist() == parser.render(plain, add_generation_prompt=False)
    assert learned(row) == toys.letters("two")
    [alone] = parser.tokenize_and_mask(conversation, method="stepwise")
    assert learned(alone) == toys.letters("two")
    merged = toys.MergingParser().tokenize_and_mask(conversation)
    assert [learned(row) for row in merged] == [toys.letters("two")]
    assert "weight" in conversation[1]


def test_only_the_first_of_two_stop_tokens_is_learned(toys: SimpleNamespace) -> None:
    class Twice(toys.LetterParser):  # type: ignore[name-defined, misc]
        def body(self, message: Any) -> list[int]:
            return [*super().body(message), *[toys.PAD] * (message["role"] == "assistant")]

    [row] = Twice().tokenize_and_mask([ASK, says("one")])
    assert learned(row) == toys.letters("one")
    assert row.token_ids[-1] == toys.END


def test_the_opener_of_the_next_turn_may_be_the_stop_token(toys: SimpleNamespace) -> None:
    """In some model families a turn ends with the token that opens the user's or the tool's turn."""
    openers = {"user": 4, "tool": 6}

    class Openers(toys.BridgingParser):  # type: ignore[name-defined, misc]
        def get_stop_token_ids(self) -> tuple[int, ...]:
            return tuple(openers.values())

        def body(self, message: Any) -> list[int]:
            return super().body(message)[:-1]

        def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **_: Any) -> list[int]:
            return [*map(int, prompt_ids), *map(int, completion_ids), *self.render(new_messages)[1:]]

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [ASK, says("one"), AGAIN, says("two", tool_calls=[call]), RESULT, says("three")]
    one, two, three = (toys.letters(text, end=False) for text in ("one", "two", "three"))
    [row] = Openers().tokenize_and_mask(conversation)
    assert learned(row) == [*one, openers["user"], *two, openers["tool"], *three, openers["user"]]
    assert row.token_ids[:-1].tolist() == Openers().render(conversation, add_generation_prompt=False)
    [asking] = Openers().tokenize_and_mask(conversation[:4])
    assert learned(asking)[-1] == openers["tool"]


def test_a_row_tells_where_its_media_stand() -> None:
    class Seeing(ByteParser):
        supports_media = True

        def place_media(self, prompt_ids: Any, messages: Any, *, start: int = 0) -> tuple[PlacedMedia, ...]:
            at = [i for i, token in enumerate(prompt_ids) if i >= start and token == ord("#")]
            return tuple(PlacedMedia(sha256="0" * 64, kind="image", length_tokens=1, start=i) for i in at)

    conversation = [{"role": "user", "content": "a#"}, says("one"), {"role": "user", "content": "##"}, says("two")]
    [row] = Seeing().tokenize_and_mask(conversation)
    assert [int(row.token_ids[m.start]) for m in row.media] == [ord("#")] * 3
    first, second = Seeing().tokenize_and_mask(conversation, method="stepwise")
    assert (len(first.media), len(second.media)) == (1, 3)


@pytest.mark.parametrize("method", ["cumulative", "stepwise"])
@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        ([ASK], ["no message of role 'assistant'"]),
        ([ASK, says("one", weight=0)], ["with a weight of 1"]),
        ([ASK, says("one"), says("two", weight=0.5)], ["message 2", "weight = 0.5", "0 or 1"]),
    ],
)
def test_conversations_to_learn_nothing_from(method: Any, conversation: list[Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ByteParser().tokenize_and_mask(conversation, method=method)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["cumulative", "stepwise"])
def test_an_answer_whose_tokens_cannot_be_told_is_named(toys: SimpleNamespace, method: Any) -> None:
    class Sulking(toys.LetterParser):  # type: ignore[name-defined, misc]
        """Renders as ``text`` specifies."""

        def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
            ids = super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return [99, *ids] if messages[-1]["content"] == "elsewhere" else ids

        def body(self, message: Any) -> list[int]:
            body = [toys.END if token == 100 + ord("!") else token for token in super().body(message)]
            return body[:-1] if message["content"] == "endless" else body

    for text, words in (
        ("endless", "no stop token"),
        ("elsewhere", "does not start with the prompt(?!.*chat_template_kwargs)"),
        ("stop! now", "spells a stop token"),
    ):
        with pytest.raises(ConfigError, match=f"message 3: .*{words}"):
            Sulking().tokenize_and_mask([ASK, says("one"), AGAIN, says(text)], method=method)


def test_a_prompt_that_opens_reasoning_which_answers_lack_names_the_option(toys: SimpleNamespace) -> None:
    class Reasoning(toys.LetterParser):  # type: ignore[name-defined, misc]
        def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
            ids = super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return [*ids, 99] if add_generation_prompt else ids

    with pytest.raises(ConfigError, match=r"message 1: .*chat_template\.chat_template_kwargs"):
        Reasoning().tokenize_and_mask([ASK, says("one")])


def test_methods_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parser 'bytes'.*'hf_template' requires parser 'chat_template'"):
        ByteParser().tokenize_and_mask([ASK, says("one")], method="hf_template")
    with pytest.raises(ConfigError, match=r"'cumulativ' is not a method"):
        ByteParser().tokenize_and_mask([ASK, says("one")], method="cumulativ")  # type: ignore[arg-type]


def test_a_row_checks_its_lengths() -> None:
    with pytest.raises(ValueError, match="a loss mask of 1 for 2 tokens"):
        MaskedTokens(np.array([1, 2], np.int32), np.array([True]))
