"""Contract checks for parsers; see `check_parser`."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from rllm_core.parser import BaseParser, Termination
from rllm_core.types import MessageLike, Messages, starts_with, token_ids
from rllm_devkit.checks.completions import QUESTION, SENTENCES, TAILS, TOOL, Completions, tail
from rllm_devkit.checks.results import CheckResult, NotApplicable, Violation

ANSWER = {"role": "assistant", "content": SENTENCES[0]}
THREADS = 4
TURNS = 5


def check_parser(parser: BaseParser, *, seed: int = 0, examples: int = 100) -> list[CheckResult]:
    """Checks a parser against the equations of `BaseParser`, on randomly drawn completions.

    In a test: ``assert not [r for r in check_parser(parser) if r.outcome == "failed"]``.

    Args:
        parser: Parser to check.
        seed: Seed of the completions; equal seeds draw equal completions.
        examples: Number of completions per check.

    Returns:
        One result per check. An exception raised by the parser fails the check that called it.
    """
    return [_result(name, check, parser, seed, examples) for name, check in CHECKS.items()]


def _result(name: str, check: Check, parser: BaseParser, seed: int, examples: int) -> CheckResult:
    try:
        return CheckResult(name, "passed", check(Completions(parser, seed), examples))
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Violation as problem:
        return CheckResult(name, "failed", str(problem))
    except Exception as error:  # an error in one check must not stop the others
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return CheckResult(name, "failed", f"raised {what}")


# --------------------------------------------------------------------------------------------------------------------
# The checks; each returns its findings


def _stop_tokens(completions: Completions, examples: int) -> str:
    stops = completions.parser.get_stop_token_ids()
    if not stops:
        raise Violation("get_stop_token_ids() returned no token, but some token must end a turn")
    if len(set(stops)) != len(stops) or any(type(stop) is not int or stop < 0 for stop in stops):
        raise Violation(f"get_stop_token_ids() must return distinct token ids, got {stops!r}")
    return ", ".join(map(str, stops))


def _conversations() -> list[list[dict[str, Any]]]:
    answers = [{"role": "assistant", "content": sentence} for sentence in SENTENCES]
    return [[QUESTION], *([QUESTION, answer, {**QUESTION, "content": "And then?"}] for answer in answers)]


def _rendering(completions: Completions, examples: int) -> str:
    parser = completions.parser
    for conversation in _conversations():
        for tools in (None, [TOOL]):
            for prompt in (True, False):
                before = copy.deepcopy((conversation, tools))
                ids = parser.render(conversation, tools=tools, add_generation_prompt=prompt)
                again = parser.render(Messages(conversation), tools=tools, add_generation_prompt=prompt)
                if (conversation, tools) != before:
                    raise Violation("render() modifies the messages or tools passed to it")
                if token_ids(ids).tolist() != token_ids(again).tolist():
                    raise Violation("a second render() of the same messages returns different tokens")
    return f"{len(_conversations())} conversations, with and without tools and prompt"


def _reading(completions: Completions, examples: int) -> str:
    parser, ends = completions.parser, Counter[str]()
    prompts = [parser.render([QUESTION]), parser.render([QUESTION], tools=[TOOL])]
    for _ in range(examples):
        sampled, prompt = completions.anything(), completions.rng.choice([None, *prompts])
        given = sampled.copy()
        try:
            parsed = parser.parse_completion(given, prompt_ids=prompt, tools=completions.rng.choice([None, [TOOL]]))
            json.dumps(parsed.to_message(turn=0))
        except Exception as error:  # parsing must not raise any exception
            raise Violation(f"parse_completion({sampled}) raised {type(error).__name__}: {error}") from error
        if given != sampled:
            raise Violation(f"parse_completion({sampled}) modifies the completion")
        has_stop = not set(completions.stops).isdisjoint(sampled)
        if has_stop is (parsed.termination is Termination.TRUNCATED):
            raise Violation(
                f"{sampled} has {'a' if has_stop else 'no'} stop token, but is parsed as {parsed.termination}"
            )
        ends[parsed.termination.value] += 1
    return ", ".join(f"{count} {termination}" for termination, count in sorted(ends.items()))


def bridged_tails(parser: BaseParser) -> list[str]:
    """Returns the continuations (`rllm_devkit.checks.completions.TAILS`) the parser can bridge to."""
    completions = Completions(parser)
    tools, answer, call = completions.tools, completions.text(), completions.tool_call()
    prompt = parser.render([QUESTION], tools=tools)
    said = {kind: call if "tool" in kind and call else answer for kind in TAILS}
    return [
        kind for kind in TAILS if parser.bridge_to_next_turn(prompt, said[kind], tail(kind), tools=tools) is not None
    ]


def _bridging(completions: Completions, examples: int) -> str:
    parser, rng, bridged = completions.parser, completions.rng, 0
    prompts = [parser.render(conversation, tools=completions.tools) for conversation in _conversations()]
    for _ in range(examples):
        prompt, sampled, kind = rng.choice(prompts), completions.anything(), rng.choice(TAILS)
        arguments = (list(prompt), list(sampled), tail(kind), copy.deepcopy(completions.tools))
        before = copy.deepcopy(arguments)
        ids = parser.bridge_to_next_turn(*arguments[:3], tools=arguments[3])
        if arguments != before:
            raise Violation(f"bridging {sampled} to [{kind}] modifies the arguments")
        if ids is None:
            continue
        bridged += 1
        if not starts_with(ids, [*prompt, *sampled]):
            raise Violation(
                f"after {sampled}, the bridge to [{kind}] does not start with the prompt and the completion"
            )
    tails = bridged_tails(parser)
    if parser.supports_bridge and not tails and completions.written(ANSWER) is not None:
        raise Violation("supports_bridge is True, but bridge_to_next_turn returns None for every finished answer")
    if bridged and not parser.supports_bridge:
        raise Violation("supports_bridge is False, but bridge_to_next_turn returns a bridge; set it to True")
    listed = ", ".join(f"[{kind}]" for kind in tails) or "none"
    return f"{bridged} of {examples} bridged; tails after a finished answer: {listed}"


def _control_tokens(completions: Completions, examples: int) -> str:
    parser, plain = completions.parser, "The answer is 12."
    if completions.tokenizer is None:
        raise NotApplicable("the tokenizer cannot encode and decode text")
    special = [*completions.stops, *getattr(completions.tokenizer, "all_special_ids", ())]
    spellings = {token: completions.decode([token]) for token in dict.fromkeys(special)}
    spellings = {token: text for token, text in spellings.items() if completions.encode(text) == [token]}
    if not spellings:
        raise NotApplicable("no control token can be spelled as text")
    for role in ("user", "tool") if parser.supports_tools else ("user",):
        for token, spelling in spellings.items():
            honest, forged = ([_said_by(role, text)] for text in (plain, f"{plain} {spelling} {plain}"))
            if parser.count_control_tokens(forged) <= parser.count_control_tokens(honest):
                raise Violation(f"count_control_tokens misses {spelling} in the text of a {role}")
            for write in (_whole, _bridge):
                expected, found = (write(completions, [*said]) for said in (honest, forged))
                if expected is not None and found is not None and found.count(token) != expected.count(token):
                    raise Violation(
                        f"{spelling} in the text of a {role} becomes control token {token}; encode it as text"
                    )
    return f"{len(spellings)} spelled by users{' and tools' if parser.supports_tools else ''}, all kept as text"


def _said_by(role: str, text: str) -> dict[str, Any]:
    return {**tail(role)[0], "content": text}


def _whole(completions: Completions, said: list[MessageLike]) -> list[int]:
    function = {"name": "get_weather", "arguments": "{}"}
    calls = [{"id": m["tool_call_id"], "type": "function", "function": function} for m in said if m["role"] == "tool"]
    answer = {"role": "assistant", "content": "" if calls else "?", **({"tool_calls": calls} if calls else {})}
    ids: list[int] = token_ids(completions.parser.render([QUESTION, answer, *said], tools=completions.tools)).tolist()
    return ids


def _bridge(completions: Completions, said: list[MessageLike]) -> list[int] | None:
    prompt = completions.parser.render([QUESTION], tools=completions.tools)
    answer = completions.answer("?")
    bridged = completions.parser.bridge_to_next_turn(prompt, answer, said, tools=completions.tools)
    if bridged is None:
        return None
    ids: list[int] = token_ids(bridged).tolist()
    return ids


def _sessions(completions: Completions, examples: int) -> str:
    parser, rng, turns, breaks = completions.parser, completions.rng, 0, Counter[str]()
    rejections: list[str] = []
    for _ in range(max(1, examples // TURNS)):
        session = parser.session(tools=completions.tools)
        conversation: list[MessageLike] = [QUESTION]
        before: tuple[int, ...] = ()
        sampled: list[list[int]] = []
        for _ in range(TURNS):
            if rng.random() < 0.2:
                session = copy.deepcopy(session)
            try:
                turn = session.next_prompt(conversation)
            except Exception as error:  # a template may reject some messages, but not all
                rejections.append(f"{type(error).__name__}: {error}".partition("\n")[0])
                break
            if session.next_prompt(conversation) is not turn:
                raise Violation("next_prompt() with the same messages returns another turn")
            session.discard()
            if session.next_prompt(conversation).prompt_ids.tolist() != turn.prompt_ids.tolist():
                raise Violation("after discard(), next_prompt() with the same messages returns other tokens")
            if turn.break_reason is None and not starts_with(turn.prompt_ids, before):
                raise Violation("a prompt does not continue the token sequence, but has no break_reason")
            if turn.break_reason is not None:
                breaks[turn.break_reason.value] += 1
            sampled.append(completions.anything())
            session.record(sampled[-1])
            before = (*turn.prompt_ids.tolist(), *sampled[-1])
            turns += 1
            calls = session.answer.get("tool_calls") or ()
            conversation = [*conversation, session.answer, *tail(", ".join(["tool"] * len(calls)) or "user", calls)]
        recorded = [s.token_ids[start:end].tolist() for s in session.segments for start, end in s.completion_spans]
        if recorded != sampled:
            raise Violation("the segments of a session do not contain the sampled tokens")
        if sum(int(s.loss_mask.sum()) for s in session.segments) != sum(map(len, sampled)):
            raise Violation("the loss masks of a session do not mark the sampled tokens")
    if turns <= len(rejections):
        raise Violation(f"no conversation reached its second turn: {rejections[0]}")
    if "prefix_mismatch" in breaks:
        raise Violation("a bridge does not start with the tokens before it")
    counted = ", ".join(f"{count} {reason}" for reason, count in sorted(breaks.items()))
    return f"{turns} turns, breaks: {counted or 'none'}" + (f"; {len(rejections)} rejected" if rejections else "")


def _copies(completions: Completions, examples: int) -> str:
    parser = completions.parser
    ForkingPickler.dumps(parser)  # what a process pool does
    copied = copy.deepcopy(parser)  # the same protocol, within this process
    for conversation in _conversations():
        if copied.render(conversation) != parser.render(conversation):
            raise Violation("a copy renders different tokens")
    answer = completions.text()
    if copied.parse_completion(answer) != parser.parse_completion(answer):
        raise Violation("a copy parses a different message")
    return "can be sent to another process"


def _threads(completions: Completions, examples: int) -> str:
    parser, conversations, sampled = completions.parser, _conversations(), completions.text()

    def use(number: int) -> tuple[Any, Any, Any]:
        conversation = conversations[number % len(conversations)]
        prompt = parser.render(conversation)
        bridged = parser.bridge_to_next_turn(prompt, sampled, tail("user"))
        return prompt, parser.parse_completion(sampled, prompt_ids=prompt), bridged

    alone = [use(number) for number in range(len(conversations))]
    with ThreadPoolExecutor(THREADS) as pool:
        for number, together in enumerate(pool.map(use, range(max(examples, len(conversations))))):
            if not all(map(_same, together, alone[number % len(alone)])):
                raise Violation("results differ when several threads use the parser at once")
    return f"{THREADS} at once"


def _same(left: Any, right: Any) -> bool:
    return bool(np.array_equal(left, right)) if isinstance(left, np.ndarray) else bool(left == right)


Check = Callable[[Completions, int], str]

CHECKS: dict[str, Check] = {
    "stop tokens": _stop_tokens,
    "rendering": _rendering,
    "reading completions": _reading,
    "bridging": _bridging,
    "control tokens": _control_tokens,
    "sessions": _sessions,
    "copies": _copies,
    "threads": _threads,
}
"""Checks by name; each takes completions and the number to check, and returns its findings."""
