"""Completions for checking any parser: well-formed ones in its own format, and everything else a model may sample."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser
from rllm_core.types import MessageLike

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 3, "hourly": True}
QUESTION: dict[str, Any] = {"role": "user", "content": "What will the weather be like in Zürich?"}
REASONING = "The user asks for a forecast, so I need the number of days first."
SENTENCES = (
    "It will be sunny until noon, then cloudy.",
    "for day in range(3):\n    print(f'{day}: {high[day]:>4}')",
    "12 * 7 = 84, and 84 / 4 = 21.",
    "Überall wird es kälter: höchstens 7 °C, nachts unter null.",
    "1. Take an umbrella.\n2. Leave before 8:30.\n\nThat is all!",
    "天気は晴れです。 🌤",
)


class Completions:
    """Draws completions for one parser.

    Args:
        parser: Parser that reads the completions.
        seed: Seed; equal seeds draw equal completions.

    Attributes:
        rng: Random generator.
        stops: Stop tokens of the parser.
        tools: Tools offered to the model; None if the parser does not support tools.
        tokenizer: Tokenizer of the parser if it can encode and decode text, else None.
    """

    def __init__(self, parser: BaseParser, seed: int = 0) -> None:
        self.parser = parser
        self.rng = random.Random(seed)
        self.stops = tuple(parser.get_stop_token_ids())
        self.tools = [TOOL] if parser.supports_tools else None
        found = parser.tokenizer
        self.tokenizer = found if hasattr(found, "encode") and hasattr(found, "decode") else None

    # ----------------------------------------------------------------------------------------------------------------
    # Well-formed

    def written(self, message: Mapping[str, Any], tools: Sequence[Any] | None = None) -> list[int] | None:
        """Returns an assistant message as the parser renders it, with its stop token; None if that fails."""
        reasoned = {"reasoning_content": REASONING, **message}  # some prompts already open the reasoning
        for answer in (message, reasoned):
            try:
                [row] = self.parser.tokenize_and_mask([QUESTION, answer], tools=tools, method="stepwise")
            except ConfigError:
                continue
            completion: list[int] = row.token_ids[row.loss_mask].tolist()
            return completion
        return None

    def text(self) -> list[int]:
        """Draws an answer of a few sentences, in canonical tokens."""
        sentences = self.rng.sample(SENTENCES, self.rng.randint(1, 3))
        return self.answer(" ".join(sentences))

    def answer(self, content: str) -> list[int]:
        """Returns an answer with this text.

        Raises:
            ConfigError: If the parser renders no answer that starts at the end of its prompt, and cannot encode text.
        """
        completion = self.written({"role": "assistant", "content": content})
        if completion is not None:
            return completion
        if self.tokenizer is None:
            raise ConfigError(f"parser {self.parser.name!r} renders no answer that starts at the end of its prompt")
        plain = [*self.encode(content), self.stops[0]]
        if self._parsed(plain).content:
            return plain
        return [*self.encode(f"{REASONING}\n</think>\n\n{content}"), self.stops[0]]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Returns the tokens before and after the text of every answer, such as opened reasoning and the stop token."""
        one, other = self.answer("1 and 2"), self.answer("Yes!")
        before = [left for left, right in _agreeing(one, other)]
        after = [left for left, right in _agreeing(one[: len(before) - 1 : -1], other[: len(before) - 1 : -1])]
        return before, after[::-1]

    def reasoning(self) -> list[int] | None:
        """Draws an answer with reasoning; None if the parser does not separate reasoning from text."""
        answer = {"role": "assistant", "content": self.rng.choice(SENTENCES), "reasoning_content": REASONING}
        completion = self.written(answer)
        return completion if completion is not None and self._parsed(completion).reasoning else None

    def tool_call(self) -> list[int] | None:
        """Draws a call of `TOOL`; None if the parser does not parse it as a call."""
        arguments = {**ARGUMENTS, "days": self.rng.randint(1, 9)}
        function = {"name": "get_weather", "arguments": json.dumps(arguments)}
        call = {"id": "call00001", "type": "function", "function": function}
        completion = self.written({"role": "assistant", "content": "", "tool_calls": [call]}, self.tools)
        return completion if completion is not None and self._parsed(completion).ok_tool_calls else None

    def respaced_tool_call(self, **style: Any) -> list[int] | None:
        """Draws a call of `TOOL` with its arguments in the given ``json.dumps`` style; None if they are not JSON."""
        call = self.tool_call()
        if call is None or self.tokenizer is None:
            return None
        text = self.decode(call[:-1])
        [parsed] = self._parsed(call).ok_tool_calls
        for start, end, value in _objects(text):
            if value == parsed.arguments:
                return [*self.encode(text[:start] + json.dumps(value, **style) + text[end:]), call[-1]]
        return None

    def _parsed(self, completion: Sequence[int]) -> Any:
        prompt = self.parser.render([QUESTION], tools=self.tools)
        return self.parser.parse_completion(completion, prompt_ids=prompt, tools=self.tools)

    # ----------------------------------------------------------------------------------------------------------------
    # Completions the tokenizer would not produce

    def encode(self, text: str) -> list[int]:
        """Encodes text, reading the spelling of a control token as that token."""
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, including control tokens."""
        assert self.tokenizer is not None
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def with_edges(self) -> list[int] | None:
        """Draws an answer that starts or ends with white space."""
        if self.tokenizer is None:
            return None
        left, right = self.rng.choice([("\n", ""), (" ", " "), ("", "\n\n"), ("\n\n", " \n")])
        return self.enclosed(self.encode(left + self.rng.choice(SENTENCES) + right))

    def enclosed(self, ids: Sequence[int]) -> list[int]:
        """Returns an answer whose text is ``ids``."""
        before, after = self.around
        return [*before, *ids, *after]

    def cut_off(self) -> list[int]:
        """Draws a truncated answer: it ends within its text."""
        answer, (before, after) = self.text(), self.around
        return answer[: self.rng.randint(len(before) + 1, max(len(before) + 1, len(answer) - len(after)))]

    def split(self, completion: Sequence[int], pieces: int) -> list[int] | None:
        """Replaces up to ``pieces`` tokens by two others that spell the same text; None if impossible."""
        if self.tokenizer is None:
            return None
        ids, text = list(completion), self.decode(completion)
        for position in sorted(self.rng.sample(range(len(ids)), len(ids)), reverse=True):
            spelling = self.decode([ids[position]])
            if len(spelling) < 2 or ids[position] in self.control_ids:
                continue
            cut = self.rng.randint(1, len(spelling) - 1)
            halves = [*self.encode(spelling[:cut]), *self.encode(spelling[cut:])]
            other = [*ids[:position], *halves, *ids[position + 1 :]]
            if halves != [ids[position]] and self.decode(other) == text:
                ids, pieces = other, pieces - 1
            if not pieces:
                break
        return ids if len(ids) > len(completion) else None

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that do not spell text: stop tokens, and the tokenizer's special and added tokens."""
        list_added = getattr(self.tokenizer, "get_added_vocab", dict)
        return frozenset([*self.stops, *getattr(self.tokenizer, "all_special_ids", ()), *list_added().values()])

    @cached_property
    def size(self) -> int:
        """Upper bound (exclusive) of the ids the parser writes."""
        known = len(self.tokenizer) if isinstance(self.tokenizer, Sized) else 0
        return 1 + max([known - 1, *self.stops, *self.text(), *self.parser.render([QUESTION])])

    @cached_property
    def ordinary_ids(self) -> tuple[int, ...]:
        """Ids that are text."""
        written = range(self.size) if self.tokenizer is not None else sorted({t for _ in range(9) for t in self.text()})
        return tuple(token for token in written if token not in self.control_ids)

    def noise(self, length: int) -> list[int]:
        """Draws ids one by one; the tokenizer would not produce such text, and it may be invalid Unicode."""
        return self.rng.choices(self.ordinary_ids, k=length)

    def anything(self) -> list[int]:
        """Draws anything a model may sample: nothing, noise, control tokens, truncated text, stops anywhere."""
        rng, stop = self.rng, [self.rng.choice(self.stops)]
        written = rng.choice([self.text, self.reasoning, self.tool_call])() or self.text()
        cut = written[: rng.randrange(len(written))]
        noise = self.noise(rng.randint(0, 12))
        wild = [rng.randrange(self.size + 8) for _ in range(rng.randint(1, 12))]
        return rng.choice(
            [
                [],
                stop,
                noise,
                wild,
                cut,
                written,
                noise + stop,
                cut + stop,
                written + stop,
                wild + stop,
                written + noise,
            ]
        )


def _agreeing(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yields start, end and value of every JSON object in ``text``, including nested ones."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            pass  # this brace does not open an object
        else:
            yield start, end, value
        start = text.find("{", start + 1)


def tail(kind: str, calls: Sequence[Mapping[str, Any]] = ()) -> list[MessageLike]:
    """Returns messages that may follow an assistant message.

    Args:
        kind: Roles in order: ``"user"``, ``"tool"``, ``"tool, tool"``, ``"tool, user"``, ...
        calls: Tool calls to reply to, in the format of the message; missing ones are made up.
    """
    messages: list[MessageLike] = []
    for position, role in enumerate(kind.split(", ")):
        if role == "tool":
            call_id = calls[position]["id"] if position < len(calls) else f"call0000{position + 1}"
            messages.append({"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": '{"high": 21}'})
        else:
            messages.append({"role": "user", "content": "And the day after?"})
    return messages


TAILS = ("user", "tool", "tool, tool", "tool, user")
