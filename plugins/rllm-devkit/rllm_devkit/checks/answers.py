"""Model answers for checking workflows: answers that fit the task and its tools, and hostile ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_core.parser import ToolSpec
from rllm_core.types import Task

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

# Formats in which workflows look for the answer.
PLACES = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "```\n{}\n```", "The answer is {}.")

_DEEP = 4_000

HOSTILE: tuple[str, ...] = (
    "",
    " \t\r\n",
    "\x00\x01\x07\x08\x1b[2J\x1b]0;title\x07\x7f\x85",
    "\ufffd\ufeff\u200b\u202e\u2066 321 ",
    "0",
    "-0.0",
    "-1",
    "nan",
    "inf",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    "9" * 5_000,  # more digits than int() accepts
    "9**9**9",
    "9**9**9**9",
    "2**(2**(2**(2**5)))",
    "10**10**8 % 7",
    "1/0",
    "0/0",
    "0**-1",
    "1<<999999999",
    "'a'*99999999999",
    "factorial(999999999)",
    "²³½",
    "١٢٣",
    "\uff11\uff12\uff13",  # full-width digits
    "一二三",
    "ответ: сорок два",
    "الجواب ٤٢",
    "答えは四十二です。",
    "e\u0301\u0301\u0301" * 50,
    "👩‍👩‍👧‍👦🏳️‍🌈" * 50,
    "()",
    ")(",
    "((1)",
    "1 +",
    "+ - * /",
    ",,,",
    "a" * 40 + "!",
    "{}{0}{x!r}%s%n%d${HOME}`id`",
    "__import__('sys').exit(3)",
    "(lambda: 0).__class__.__mro__",
    "exit()",
    "'; DROP TABLE tasks; --",
    "../../../../etc/passwd",
    "<answer>",
    "</answer>",
    "</answer>1<answer>",
    "<answer><answer></answer></answer>",
    "\\boxed{",
    "\\boxed{\\boxed{}",
    "\\frac{1}{0}",
    "```",
    "```python\n",
    "</think>",
    "<think>",
    "null",
    "[]",
    "{}",
    '{"answer": null}',
    '{"answer": NaN}',
    '"\\ud800"',
    CALL_OPEN,
    CALL_CLOSE,
    f"{CALL_OPEN}{{}}{CALL_CLOSE}",
)
"""Short hostile answers; each is given in every format of `PLACES`."""

OVERLONG: tuple[str, ...] = (
    "9" * 100_000,
    "(" * _DEEP,
    "(" * _DEEP + "1" + ")" * _DEEP,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "-" * _DEEP + "1",
    "1" + "+1" * _DEEP,
    "**".join(["9"] * 2_000),
    "\\boxed{" * _DEEP,
    "<answer>" * _DEEP,
    "<answer>" * _DEEP + "</answer>" * _DEEP,
    " " * 100_000 + "x",
    "a" * 100_000 + "!",
    "\n" * 50_000,
    "```\n" * _DEEP,
)
"""Long hostile answers, to find code that takes quadratic time or recurses deeply."""

_NONSENSE: tuple[Any, ...] = (
    None,
    True,
    "",
    "nonsense",
    -1,
    1.5,
    1e308,
    10**400,
    [],
    [1, [2, [3]]],
    {},
    {"a": {"b": None}},
    "9**9**9",
    "../../etc/passwd",
    "\x00\x1b[2J",
    "١٢٣",
    "x" * 10_000,
)

_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "integer": (0, 1, 3, 7),
    "number": (0.5, 2, 3.25),
    "boolean": (True, False),
    "string": ("yes", "7", "a b"),
    "array": ([], [1]),
    "object": ({},),
    "null": (None,),
}


def called(name: str, arguments: Any) -> str:
    """Formats a tool call for `rllm_devkit.checks.workflow_probe.ToolParser`."""
    return f"{CALL_OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CALL_CLOSE}"


def hostile() -> Iterator[str]:
    """Yields every hostile answer."""
    for text in HOSTILE:
        for place in PLACES:
            yield place.format(text)
    yield from OVERLONG


def values_in(data: Any) -> Iterator[str]:
    """Yields the texts and numbers in a task's data, which often include its solution."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from values_in(value)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            yield from values_in(value)
    elif data is not None:
        yield str(data)


def fitting(task: Task, tools: Sequence[ToolSpec], rng: random.Random, answers: Sequence[str] = ()) -> str:
    """Draws a plausible answer: a tool call, an author's answer, a value from the task, or a small number.

    Args:
        task: Task to answer.
        tools: Tools offered to the model.
        rng: Random generator.
        answers: Answers given by the workflow's author.
    """
    if tools and rng.random() < 0.6:
        name, parameters = _described(rng.choice(tools))
        wanted: Mapping[str, Any] = parameters.get("properties") or {}
        return called(name, {key: _fitting_value(schema, rng) for key, schema in wanted.items()})
    texts = [*answers, *list(values_in(task.data))[:50], str(rng.randint(0, 9))]
    return rng.choice(PLACES if rng.random() < 0.5 else PLACES[:1]).format(rng.choice(texts))


def nonsensical_calls(tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Yields tool calls with invalid arguments, calls of unknown tools, and several calls at once."""
    some: Any = {}
    for tool in tools:
        name, parameters = _described(tool)
        keys = list(parameters.get("properties") or {"argument": {}})
        yield called(name, {})
        yield called(name, {"no_such_argument": 1})
        for value in _NONSENSE:
            some = dict.fromkeys(keys, value)
            yield called(name, some)
        yield called(name, {**some, "no_such_argument": 1})
        yield called(name, some) * 3
        yield called(name, some) * 100
        yield called(name.upper(), some)
        yield called(f"{name}.__class__", some)
        yield f"{CALL_OPEN}{{'name': {name}}}{CALL_CLOSE}"
    for name in ("", "no_such_tool", "__init__", "../tool", "\x00", "x" * 10_000):
        yield called(name, some)


def _described(tool: ToolSpec) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and parameters of a tool in OpenAI's format."""
    function = tool["function"]
    return function["name"], function.get("parameters") or {}


def _fitting_value(schema: Mapping[str, Any], rng: random.Random) -> Any:
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type")
    return rng.choice(_BY_TYPE.get(kind if isinstance(kind, str) else "string", ("yes",)))
