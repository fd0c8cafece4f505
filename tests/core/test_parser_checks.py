"""Tests the public parser checks: compliant parsers pass, and each kind of noncompliant one fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rllm_core.parser import BaseParser, ParsedCompletion, Termination
from rllm_devkit.checks import Drift, check_parser, probe_drift
from rllm_devkit.checks.completions import TOOL, Completions, tail
from rllm_devkit.checks.parsers import CHECKS, bridged_tails
from rllm_devkit.scripted import ByteParser


class Alphabet:
    """Tokenizer of single characters, plus an end token that text can spell and one two-character token."""

    END, PAIR, SIZE = 257, 258, 259
    all_special_ids = (END,)

    def __len__(self) -> int:
        return self.SIZE

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            token, width = (self.END, 5) if text.startswith("</e/>") else (ord(text[0]) % 256, 1)
            token, width = (self.PAIR, 2) if text.startswith("ll") else (token, width)
            ids, text = [*ids, token], text[width:]
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        spelt = {self.END: "</e/>", self.PAIR: "ll", 256: "<s>"}
        return "".join(spelt.get(token) or chr(token % 256) for token in ids)


class Reader(ByteParser):
    """Byte parser with a tokenizer; `protects` decides whether outside text can end a turn."""

    name = "reader"
    protects = True
    counts = True

    @property
    def tokenizer(self) -> Any:
        return Alphabet()

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for message in messages:
            text = message.get("content") or ""
            if message["role"] == "assistant" or not self.protects:
                body = Alphabet().encode(text)
            else:
                body = [ord(letter) % 256 for letter in text]
            ids += [self.START, *message["role"].encode(), 10, *body, self.END]
        return [*ids, self.START, *b"assistant\n"] if add_generation_prompt else ids

    def parse_completion(self, completion_ids: Any, *, prompt_ids: Any = None, tools: Any = None) -> ParsedCompletion:
        ids = [int(token) for token in completion_ids]
        stopped = self.END in ids
        body = ids[: ids.index(self.END)] if stopped else ids
        termination = Termination.STOP if stopped else Termination.TRUNCATED
        return ParsedCompletion(Alphabet().decode(body), termination=termination)

    def count_control_tokens(self, messages: Any) -> int:
        return sum((m.get("content") or "").count("</e/>") for m in messages) if self.counts else 0


def outcomes(parser: BaseParser, **options: Any) -> dict[str, str]:
    return {result.name: result.outcome for result in check_parser(parser, **options)}


def failures(parser: BaseParser, **options: Any) -> dict[str, str]:
    return {r.name: r.detail for r in check_parser(parser, **options) if r.outcome == "failed"}


@pytest.mark.parametrize("parser", ["LetterParser", "BridgingParser", "MergingParser", "ByteParser", "Reader"])
def test_honest_parsers_pass(toys: SimpleNamespace, parser: str) -> None:
    honest = {"ByteParser": ByteParser, "Reader": Reader}.get(parser) or getattr(toys, parser)
    results = check_parser(honest())
    assert [r for r in results if r.outcome == "failed"] == []
    assert [result.name for result in results] == list(CHECKS)
    skipped = [result.name for result in results if result.outcome == "skipped"]
    assert skipped == ([] if parser == "Reader" else ["control tokens"])


def test_checks_of_one_seed_see_the_same() -> None:
    assert check_parser(ByteParser(), seed=3) == check_parser(ByteParser(), seed=3)
    assert check_parser(ByteParser(), seed=3) != check_parser(ByteParser(), seed=4)


def test_results_tell_what_was_seen() -> None:
    seen = {result.name: result.detail for result in check_parser(ByteParser(), examples=20)}
    assert seen["stop tokens"] == "257"
    assert (
        seen["bridging"]
        == "20 of 20 bridged; tails after a finished answer: [user], [tool], [tool, tool], [tool, user]"
    )
    assert "stop" in seen["reading completions"]
    assert seen["sessions"].startswith("20 turns")


# --------------------------------------------------------------------------------------------------------------------
# Noncompliant parsers: each overrides one method


class NoStop(ByteParser):
    def get_stop_token_ids(self) -> tuple[int, ...]:
        return ()


class TwiceTheSameStop(ByteParser):
    def get_stop_token_ids(self) -> tuple[int, ...]:
        return (self.END, self.END)


class Moody(ByteParser):
    """Renders the same messages differently each time."""

    calls = 0

    def render(self, messages: Any, **more: Any) -> list[int]:
        self.calls += 1
        return [*super().render(messages, **more), self.calls]


class ChangesMessages(ByteParser):
    def render(self, messages: Any, **more: Any) -> list[int]:
        if isinstance(messages, list):
            messages[0] = {**messages[0], "content": messages[0]["content"].strip("?")}
        return super().render(messages, **more)


class Raises(ByteParser):
    """Cannot read completions that are not UTF-8."""

    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        bytes(token for token in completion_ids if token < 256).decode()
        return super().parse_completion(completion_ids, **more)


class AlwaysStops(ByteParser):
    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        return ParsedCompletion(super().parse_completion(completion_ids, **more).content)


class NeverStops(ByteParser):
    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        content = super().parse_completion(completion_ids, **more).content
        return ParsedCompletion(content, termination=Termination.TRUNCATED)


class PopsTheStop(ByteParser):
    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        parsed = super().parse_completion(completion_ids, **more)
        if isinstance(completion_ids, list) and self.END in completion_ids:
            completion_ids.remove(self.END)
        return parsed


class CutsAfterStop(ByteParser):
    """Bridges from the first stop token, dropping the tokens sampled after it."""

    def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **more: Any) -> Any:
        sampled = [int(token) for token in completion_ids]
        kept = sampled[: sampled.index(self.END) + 1] if self.END in sampled else sampled
        return super().bridge_to_next_turn(prompt_ids, kept, new_messages, **more)


class BoastsOfBridging(ByteParser):
    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


class HidesBridging(ByteParser):
    supports_bridge = False


class ExtendsThePrompt(ByteParser):
    """Appends to the list passed in."""

    def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **more: Any) -> Any:
        ids = super().bridge_to_next_turn(prompt_ids, completion_ids, new_messages, **more)
        if isinstance(prompt_ids, list):
            prompt_ids += completion_ids
        return ids


class Open(Reader):
    """Lets a tool message end its own turn."""

    protects = False


class Uncounted(Reader):
    counts = False


class Refuses(ByteParser):
    """Rejects conversations that contain an answer."""

    supports_bridge = False
    supports_tools = True

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        if add_generation_prompt and len(messages) > 1 and tools:
            raise ValueError("a conversation has one message")
        return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


class HoldsALock(ByteParser):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class CopiesForget(ByteParser):
    """Changes its start token when copied."""

    def __getstate__(self) -> dict[str, int]:
        return {"START": 250}


class SharesABuffer(ByteParser):
    """Renders into one list, as a shared tokenizer does."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def render(self, messages: Any, **more: Any) -> list[int]:
        self.ids.clear()
        for message in messages:
            self.ids += super().render([message], add_generation_prompt=False)
            threading.Event().wait(1e-5)
        return list(self.ids)


NONCOMPLIANT: list[tuple[type[BaseParser], str, str]] = [
    (NoStop, "stop tokens", "returned no token"),
    (TwiceTheSameStop, "stop tokens", "distinct token ids, got"),
    (Moody, "rendering", "returns different tokens"),
    (ChangesMessages, "rendering", "modifies the messages"),
    (Raises, "reading completions", "raised UnicodeDecodeError"),
    (AlwaysStops, "reading completions", "has no stop token, but is parsed as stop"),
    (NeverStops, "reading completions", "has a stop token, but is parsed as truncated"),
    (PopsTheStop, "reading completions", "modifies the completion"),
    (CutsAfterStop, "bridging", "does not start with the prompt and the completion"),
    (BoastsOfBridging, "bridging", "returns None for every finished answer"),
    (HidesBridging, "bridging", "supports_bridge is False, but"),
    (ExtendsThePrompt, "bridging", "modifies the arguments"),
    (Open, "control tokens", "</e/> in the text of a user becomes control token 257"),
    (Uncounted, "control tokens", "count_control_tokens misses"),
    (Refuses, "sessions", "no conversation reached its second turn: ValueError: a conversation has one message"),
    (HoldsALock, "copies", "raised TypeError"),
    (CopiesForget, "copies", "a copy renders different tokens"),
    (SharesABuffer, "threads", "several threads"),
]


@pytest.mark.parametrize(
    ("noncompliant", "check", "words"), NONCOMPLIANT, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_parser_that_breaks_a_rule_is_caught(noncompliant: type[BaseParser], check: str, words: str) -> None:
    found = failures(noncompliant())
    assert check in found
    assert words in found[check]


def test_a_bridge_that_changes_a_sampled_token_is_caught_twice(toys: SimpleNamespace) -> None:
    found = failures(toys.NoncompliantParser())
    assert set(found) == {"bridging", "sessions"}
    assert "does not start with the tokens before it" in found["sessions"]


def test_a_parser_that_cannot_render_fails_and_does_not_raise() -> None:
    class Broken(ByteParser):
        def render(self, *_: Any, **__: Any) -> list[int]:
            raise RuntimeError("no\nrendering")

    found = failures(Broken())
    assert found["rendering"] == "raised RuntimeError: no rendering"
    assert "stop tokens" not in found


# --------------------------------------------------------------------------------------------------------------------
# Drift


def by_kind(parser: BaseParser, **options: Any) -> dict[str, Drift]:
    return {drift.completions: drift for drift in probe_drift(parser, **options)}


def test_drift_of_a_parser_that_bridges_is_in_rendering_again_only() -> None:
    found = by_kind(ByteParser(), conversations=3, turns=5)
    assert set(found) == {"text", "random tokens", "cut off"}
    assert all(drift.turns == 15 and drift.lost == 0 for drift in found.values())
    assert found["text"].lost_rerendered == 0
    assert found["random tokens"].lost_rerendered > 0, "bytes that are no UTF-8 are not written again"


def test_drift_of_other_spellings_white_space_and_merges() -> None:
    class Trimming(Reader):
        def render(self, messages: Any, **more: Any) -> list[int]:
            return super().render([{**m, "content": (m.get("content") or "").strip()} for m in messages], **more)

    found = by_kind(Reader())
    assert found["text in other tokens"].lost == 0
    assert found["text in other tokens"].lost_rerendered == found["text in other tokens"].turns > 0
    assert found["white space at the edges"].lost_rerendered == 0
    trimmed = by_kind(Trimming())["white space at the edges"]
    assert (trimmed.lost, trimmed.lost_rerendered) == (0, trimmed.turns)


def test_breaks_are_lost_turns_with_their_reasons(toys: SimpleNamespace) -> None:
    merging = by_kind(toys.MergingParser())["text"]
    assert merging.lost == merging.lost_rerendered == merging.turns == merging.reasons["bridge_none"]
    noncompliant = by_kind(toys.NoncompliantParser())["text"]
    assert noncompliant.lost == noncompliant.turns == noncompliant.reasons["prefix_mismatch"]
    assert noncompliant.lost_rerendered == 0


def test_a_refused_conversation_is_a_lost_turn_and_is_told() -> None:
    refused = by_kind(Refuses(), conversations=2)["text"]
    assert (refused.turns, refused.lost, refused.lost_rerendered) == (2, 2, 2)
    assert refused.reasons["ValueError: a conversation has one message"] == 2


def test_kinds_of_completions_can_be_added() -> None:
    drifts = probe_drift(ByteParser(), kinds={"full stops": lambda completions: [46] * 3}, conversations=1, turns=2)
    assert [(drift.completions, drift.turns, drift.completion_tokens) for drift in drifts] == [("full stops", 2, 9)]


# --------------------------------------------------------------------------------------------------------------------
# Completions


def test_completions_are_what_they_say() -> None:
    completions = Completions(Reader(), seed=5)
    for _ in range(20):
        answer = completions.text()
        other = completions.split(answer, pieces=1)
        if Alphabet.PAIR in answer:
            assert other is not None
            assert len(other) == len(answer) + 1
            assert completions.decode(other) == completions.decode(answer)
        else:
            assert other is None
        assert answer[-1] == Alphabet.END
        edges = completions.with_edges()
        assert edges is not None
        assert completions.decode(edges[:-1]) != completions.decode(edges[:-1]).strip()
        assert not completions.control_ids & set(completions.noise(30))
    assert completions.reasoning() is None
    assert completions.tool_call() is None
    assert completions.respaced_tool_call(indent=2) is None


def test_tails_answer_the_calls() -> None:
    calls = [{"id": "a"}]
    assert [(m["role"], m.get("tool_call_id")) for m in tail("tool, tool, user", calls)] == [
        ("tool", "a"),
        ("tool", "call00002"),
        ("user", None),
    ]
    assert bridged_tails(ByteParser()) == ["user", "tool", "tool, tool", "tool, user"]
    assert TOOL["function"]["name"] == tail("tool")[0]["name"]
