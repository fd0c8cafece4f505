"""Runs conversations with a parser as a rollout does, and judges every prompt and parsed completion."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.templates_corpus import (
    Author,
    Completion,
    Play,
    Turn,
    plays,
    result_message,
    user_message,
)
from benchmarks.templates_reference import (
    SENTINEL,
    TOOL,
    Items,
    Message,
    Reference,
    Rejected,
    Written,
    sentinel_answer,
    stopped_clock,
)
from benchmarks.trials import Row

Load = Callable[[Path], Any]
"""Creates the parser of a model folder."""

COUNTED = (
    "exact_turns",
    "broken_turns",
    "wrong_turns",
    "silent_breaks",
    "vanished_texts",
    "leaked_controls",
    "malformed_accepted",
    "raw_errors",
    "unread_calls",
)
OUTCOMES = {
    "exact": "exact_turns",
    "broken": "broken_turns",
    "wrong": "wrong_turns",
    "silent break": "silent_breaks",
    "raw error": "raw_errors",
}
_SHOWN = 80
# Empty reasoning, with which some templates request an answer without reasoning.
_NO_REASONING = re.compile(r"(?i)<[^<>/]*think[^<>]*>\s*<[^<>]*think[^<>]*>\s*$")


def play_folder(folder: Path, parsers: Mapping[str, Load]) -> Iterator[Row]:
    """Loads the parsers of a model folder, and runs all conversations with each that accepts it."""
    with stopped_clock():
        yield from _play_folder(folder, parsers)


def _play_folder(folder: Path, parsers: Mapping[str, Load]) -> Iterator[Row]:
    from rllm_core.errors import UserError

    reference = Reference(folder)
    for name, load in parsers.items():
        about = {"model": folder.name, "parser": name}
        try:
            parser = load(folder)
        except Exception as error:  # rejections are one line; other errors are counted as raw errors
            line = f"{type(error).__name__}: {error}"
            rejection = isinstance(error, UserError) and "\n" not in str(error).strip()
            yield {"kind": "model", **about, "outcome": "refused" if rejection else "raw error", "line": line}
            continue
        supports = {key: getattr(parser, f"supports_{key}") for key in ("tools", "bridge")}
        yield {"kind": "model", **about, "outcome": "accepted", **supports}
        for play in plays(control_spellings(reference, parser)):
            yield play_row(Player(reference, parser).play(play), {**about, "play": play.name})


def play_row(events: Iterator[Row], about: Row) -> Row:
    """Counts the outcomes of a conversation, with the details of problems."""
    row: Row = {"kind": "play", **about, **dict.fromkeys(COUNTED, 0), "reasons": {}, "details": []}
    for event in events:
        if (counted := OUTCOMES.get(event["outcome"])) is not None:
            row[counted] += 1
        row["vanished_texts"] += len(event.get("vanished", ()))
        row["leaked_controls"] += event.get("leaked", 0)
        row["malformed_accepted"] += event.get("malformed_accepted", 0)
        row["unread_calls"] += event.get("unread", 0)
        if reason := event.get("reason"):
            row["reasons"][reason] = row["reasons"].get(reason, 0) + 1
        if "detail" in event or event.get("vanished") or event.get("leaked"):
            row["details"].append({key: value for key, value in event.items() if value != []})
    return row


def control_spellings(reference: Reference, parser: Any) -> list[str]:
    """Returns some control tokens: one that ends a turn, one that starts a turn, and tags of calls and reasoning."""
    stops = [reference.token(stop) for stop in parser.get_stop_token_ids()]
    rendered = reference.text_or_none([user_message("hello")]) or ""
    printed = [name for name in reference.control if name in rendered and name not in stops]
    tags = [name for name in reference.control if re.fullmatch(r"</(think|tool_call)>|\[/INST\]|\[TOOL_CALLS\]", name)]
    return list(dict.fromkeys([*stops[:1], *printed[-1:], *tags[:2]]))


class Player:
    """Runs conversations with a parser.

    Args:
        reference: Source of the expected results.
        parser: Parser to judge.
    """

    def __init__(self, reference: Reference, parser: Any) -> None:
        self._reference = reference
        self._parser = parser
        self._stops = [reference.token(stop) for stop in parser.get_stop_token_ids()]
        self._stop_pattern = re.compile("|".join(map(re.escape, sorted(self._stops, key=len, reverse=True))))

    def play(self, play: Play) -> Iterator[Row]:
        """Runs a conversation; yields a row per prompt and per completion."""
        tools = [TOOL] if play.tools and self._parser.supports_tools else None
        session = self._parser.session(tools=tools)
        messages: list[Message] = [dict(message) for message in play.opening]
        sampled: dict[int, frozenset[str]] = {}  # control tokens in answers, by message index
        before: list[int] = []
        said: Completion | None = None
        for number, turn in enumerate([*play.turns, None]):
            about = {"turn": number}
            try:
                right = self._reference.conversation(messages, tools, sampled)
            except Rejected as rejection:
                yield {"kind": "prompt", **about, **self._rejected(session, messages, tools, str(rejection))}
                return
            try:
                prompt = session.next_prompt(messages, tools=tools)
                ids = [int(token) for token in prompt.prompt_ids]
            except Exception as error:  # counted, because the template accepts this conversation
                yield {"kind": "prompt", **about, "outcome": "raw error", "detail": _line(error)}
                return
            reason = None if prompt.break_reason is None else str(prompt.break_reason)
            if said is None:
                outcome = self._judge_whole(ids, right, messages, "first")
            elif not said.faithful:
                outcome = {"outcome": "silent break" if reason is None and ids[: len(before)] != before else "noise"}
            elif reason is not None:
                outcome = {**self._judge_whole(ids, right, messages, "broken"), "reason": reason}
            else:
                outcome = self._judge_continued(ids, before, said, right, messages, sampled, tools)
            if said is None or said.faithful:
                outcome["vanished"] = self._vanished(ids, right, messages)
            yield {"kind": "prompt", **about, **outcome}
            if turn is None:
                return
            author = Author(self._reference, self._stops, messages, tools)
            said = turn.say(author)
            if said is None:
                return
            try:
                parsed = session.record(said.ids)
                read = self._judge_reading(parsed, said, tools is not None)
            except Exception as error:
                yield {"kind": "completion", **about, "outcome": "raw error", "detail": _line(error)}
                return
            yield {"kind": "completion", **about, **read}
            before = [*ids, *said.ids]
            # Spellings that the model also wrote with other tokens are text; the stop token is not part of the message.
            found, text = self._reference.controls(said.ids), self._reference.decode(said.ids)
            kept = {self._reference.token(token) for token in found}
            kept = {token for token in kept if text.count(token) == found[self._reference.number(token)]}
            sampled[len(messages)] = frozenset(kept.difference(self._stops))
            messages = self._continued(messages, dict(session.answer), turn, play)

    def _rejected(self, session: Any, messages: Sequence[Message], tools: Any, rejection: str) -> Row:
        """Returns the parser's reaction to a conversation that the template rejects."""
        from rllm_core.errors import UserError

        try:
            session.next_prompt(messages, tools=tools)
        except UserError as error:
            return {"outcome": "not taken", "detail": _line(error)}
        except Exception as error:
            return {"outcome": "raw error", "detail": _line(error)}
        return {"outcome": "not taken", "detail": rejection}

    def _continued(self, messages: list[Message], answer: Message, turn: Turn, play: Play) -> list[Message]:
        """Returns the conversation with the answer and the messages after it."""
        calls = list(answer.get("tool_calls") or ())
        if turn.rewrites:
            answer = json.loads(json.dumps(answer, default=dict))
            for call in answer.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            if not answer["content"]:
                answer["content"] = None
        following = [result_message(call, play.result) for call in calls]
        if turn.user or not following:
            following.append(user_message(turn.user or "Go on, please!"))
        goes_on = [*messages, answer, *following]
        if self._reference.text_or_none(goes_on, [TOOL] if calls else None) is None and calls:
            goes_on = [*messages, answer, user_message(turn.user or "Go on, please!")]
        if turn.edits:
            first = next(at for at, message in enumerate(goes_on) if message["role"] == "user")
            goes_on[first] = {**goes_on[first], "content": goes_on[first]["content"] + " (edited)"}
        return goes_on

    # Prompts

    def _judge_whole(self, ids: list[int], right: Sequence[Written], messages: Sequence[Message], outcome: str) -> Row:
        """Judges a prompt that must be a rendering of the whole conversation."""
        items = self._reference.items(ids)
        leaked = self._leaked(ids, [_controls_of(written.items) for written in right], messages)
        if any(self._is_same(ids, items, written) for written in right):
            return {"outcome": outcome, "leaked": leaked}
        other = any(items == written.items for written in right)
        spot = "same text, other tokens" if other else _difference(items, right[0].items)
        return {"outcome": "wrong", "leaked": leaked, "detail": f"{outcome}: {spot}"}

    def _judge_continued(
        self,
        ids: list[int],
        before: list[int],
        said: Completion,
        right: Sequence[Written],
        messages: Sequence[Message],
        sampled: Collection[int],
        tools: Any,
    ) -> Row:
        """Judges a prompt that must continue the previous prompt and its completion."""
        if ids[: len(before)] != before:
            return {"outcome": "silent break", "leaked": 0}
        added = ids[len(before) :]
        items = self._reference.items(ids)
        controls = [_controls_of(written.items) for written in right]
        suffix, why = self._suffix(said, messages, sampled, tools)
        if suffix is not None:
            controls.append(self._reference.controls(before) + _controls_of(suffix.items))
        leaked = self._leaked(ids, controls, messages)
        if any(self._is_same(ids, items, written) for written in right):
            return {"outcome": "exact", "leaked": leaked}
        if why or suffix is None:
            return {"outcome": "wrong", "leaked": leaked, "detail": f"continued: {why}"}
        added_items = self._reference.items(added)
        if self._is_same(added, added_items, suffix):
            return {"outcome": "exact", "leaked": leaked}
        other = added_items == suffix.items
        spot = "same text, other tokens" if other else _difference(added_items, suffix.items)
        return {"outcome": "wrong", "leaked": leaked, "detail": f"continued: {spot}"}

    def _suffix(
        self, said: Completion, messages: Sequence[Message], sampled: Collection[int], tools: Any
    ) -> tuple[Written | None, str]:
        """Returns the template's text after the last answer, and the reason if it cannot be appended to the tokens.

        The whole conversation is rendered with placeholder words for the model's answers. The text before an answer
        must equal the prompt for it, up to the header of the answer. This also applies to answers from the input, if
        the template shows where they end.
        """
        given = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        found = self._suffix_after(said, messages, given, tools)
        own = [at for at in given if at in sampled]
        return self._suffix_after(said, messages, own, tools) if found[1] and own != given else found

    def _suffix_after(
        self, said: Completion, messages: Sequence[Message], answers: Sequence[int], tools: Any
    ) -> tuple[Written | None, str]:
        told = [
            sentinel_answer(message, answers.index(at)) if at in answers else self._reference.protect(message)
            for at, message in enumerate(messages)
        ]
        rendered = self._reference.text_or_none(told, tools)
        parts = None if rendered is None else self._parts(rendered, len(answers))
        if parts is None or not parts[1]:
            return None, "the template rejects the conversation, or does not print its answers and their ends"
        pieces, stop = parts
        last = self._reference.token(said.ids[-1])
        is_stopped = last in self._stops
        written = self._reference.written(stop + pieces[-1])
        if is_stopped:
            ids = None if written.token_ids is None else written.token_ids[1:]
            written = Written(written.text, written.items[1:], ids)
        if is_stopped and last != stop:
            return written, f"{last} was sampled, but the template writes {stop}: a break is needed"
        if any(self._reference.token(token) in self._stops for token in said.ids[:-1]):
            return written, "there is text after a stop token: a break is needed"
        for number, at in enumerate(answers):
            asked = [self._reference.text_or_none(told[:at], tools, prompt=prompt) for prompt in (False, True)]
            ends = [found[0][-1] for text in asked if text is not None and (found := self._parts(text, number))]
            ends += [_NO_REASONING.sub("", end) for end in ends]
            if not any(_bare(pieces[number]).startswith(_bare(end)) for end in ends):
                return written, f"later messages change the text before answer {number}: a break is needed"
        return written, ""

    def _parts(self, text: str, answers: int) -> tuple[list[str], str] | None:
        """Returns the texts before, between and after the answers, and the token that ends the last one.

        None if the text lacks one of the answers. An answer without a stop token after it ends with its own text. This
        happens to calls if a result follows and only the start of a user turn ends an assistant turn.
        """
        pieces, position, stop = [], 0, ""
        begins = [text.find(SENTINEL.format(number)) for number in range(answers)]
        if -1 in begins:
            return None
        for number, begin in enumerate(begins):
            word = SENTINEL.format(number)
            end = text.rfind(word) + len(word)
            until = begins[number + 1] if number + 1 < answers else len(text)
            ended = self._stop_pattern.search(text, end, max(end, until))
            pieces.append(text[position:begin])
            position, stop = (ended.end(), ended[0]) if ended is not None else (end, "")
        return [*pieces, text[position:]], stop

    def _is_same(self, ids: Sequence[int], items: Items, written: Written) -> bool:
        return items == written.items if written.token_ids is None else tuple(ids) == written.token_ids

    def _leaked(self, ids: Sequence[int], right: Sequence[Counter[int]], messages: Sequence[Message]) -> int:
        """Counts control tokens that come from text, not from the template or the model."""
        texts = json.dumps(list(messages), default=dict, ensure_ascii=False)
        spelled = {number for name, number in self._reference.control.items() if json.dumps(name)[1:-1] in texts}
        found = self._reference.controls([token for token in ids if token in spelled])
        return min((found - counted).total() for counted in right)

    def _vanished(self, ids: list[int], right: Sequence[Written], messages: Sequence[Message]) -> list[str]:
        """Returns user, tool and system texts that a prompt lacks although the template prints them."""
        prompt = self._reference.decode(ids)
        missing = []
        for message in messages:
            text = message.get("content")
            if message["role"] == "assistant" or not isinstance(text, str):
                continue
            printed = any(_is_in(text, written.text) for written in right)
            if (printed or message["role"] == "user") and not _is_in(text, prompt):
                missing.append(text[:_SHOWN])
        return missing

    # Completions

    def _judge_reading(self, parsed: Any, said: Completion, offered: bool) -> Row:
        """Judges the message that was parsed from a completion."""
        calls = [
            f"{call.raw}\n{call.name}\n{json.dumps(call.arguments, default=dict, ensure_ascii=False)}"
            for call in parsed.tool_calls
        ]
        visible = "\n".join([parsed.content, parsed.reasoning or "", *calls])
        # Text that spells a tag may be parsed as one, so search for the pieces around it.
        texts = [piece.strip() for text in said.texts for piece in self._reference.between_controls(text)]
        row: Row = {"outcome": "read", "vanished": [text for text in texts if text not in visible]}
        ok = [(call.name, json.loads(json.dumps(call.arguments, default=dict))) for call in parsed.ok_tool_calls]
        if said.malformed:
            row["malformed_accepted"] = len(ok) if offered else 0
        if said.calls is not None and offered and ok != [(name, dict(values)) for name, values in said.calls]:
            row["unread"] = True
        if row["vanished"] or row.get("malformed_accepted") or row.get("unread"):
            row["detail"] = f"{self._reference.decode(said.ids)!r} was read as {parsed}"[: 6 * _SHOWN]
        return row


def _controls_of(items: Items) -> Counter[int]:
    return Counter(item for item in items if isinstance(item, int))


def _bare(text: str) -> str:
    """Removes white space: some templates add a line break after a result once a message follows."""
    return "".join(text.split())


def _is_in(text: str, rendered: str) -> bool:
    """Whether a rendered conversation contains a text, unchanged or as JSON."""
    bare = text.strip()
    spelled = (json.dumps(bare)[1:-1], json.dumps(bare, ensure_ascii=False)[1:-1])
    return any(form in rendered for form in (bare, *spelled))


def _difference(found: Items, right: Items) -> str:
    """Describes the first difference between two prompts."""
    at = next((n for n, (one, other) in enumerate(zip(found, right, strict=False)) if one != other), None)
    if at is None:
        at = min(len(found), len(right))
    one, other = (items[at] if at < len(items) else "(nothing)" for items in (found, right))
    if isinstance(one, str) and isinstance(other, str):
        same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        one, other = one[max(same - 20, 0) :], other[max(same - 20, 0) :]
    return f"{str(one)[:_SHOWN]!r} instead of {str(other)[:_SHOWN]!r} at piece {at}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
