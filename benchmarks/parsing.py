"""Cost of a turn in a long conversation with a session, and the share of turns that re-rendering would lose.

    python -m benchmarks.parsing

Figures: ``turn100_over_turn5``, ``rerender_over_bridge_20_turns``, ``identity_lost_share`` and
``identity_lost_share_rerendered``. First trains a tokenizer on this repository's text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.imports import alternating
from benchmarks.peer_environments import SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

TURNS = 100
EARLY, LATE = range(3, 8), range(96, 101)
SHORT_TURNS = 20
SYSTEM_TOKENS, COMPLETION_TOKENS, RESULT_TOKENS = 1000, 250, 350
NGRAM_TOKENS = (64, 256)
PARTS = ("time", "identity")
BACK_OFF = 0.1


class Script:
    """Draws growing tool conversations from the repository's text; equal seeds give equal conversations.

    Args:
        tokenizer: Tokenizer of the parsers.
        corpus_ids: ``(tokens,)`` of the text.
        seed: Seed of the excerpts.
    """

    def __init__(self, tokenizer: Any, corpus_ids: Sequence[int], seed: int) -> None:
        self._tokenizer = tokenizer
        self._ids = corpus_ids
        self._rng = random.Random(seed)

    def excerpt(self, tokens: int) -> list[int]:
        """Returns some text in its original tokens."""
        start = self._rng.randrange(len(self._ids) - tokens)
        return list(self._ids[start : start + tokens])

    def opening(self) -> list[dict[str, Any]]:
        """Returns the first messages of a rollout; instructions are always the same."""
        from rllm_devkit.checks.completions import QUESTION

        instructions: str = self._tokenizer.decode(self._ids[:SYSTEM_TOKENS])
        return [{"role": "system", "content": instructions}, QUESTION]

    def completion(self) -> list[int]:
        """Returns a completion: some text and a tool call."""
        arguments = {"city": "Zürich", "days": self._rng.randint(1, 9), "hourly": True}
        call = {"name": "get_weather", "arguments": arguments}
        text = f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call><|im_end|>"
        end = self._tokenizer.encode(text, add_special_tokens=False)
        return [*self.excerpt(COMPLETION_TOKENS - len(end)), *end]

    def result(self) -> str:
        """Returns a tool result."""
        text: str = self._tokenizer.decode(self.excerpt(RESULT_TOKENS))
        return text


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Times both sides in turn, then counts the lost turns."""
    os.environ.update(SETTINGS)
    from benchmarks.parsing_model import corpus, make_parsers

    texts = corpus()
    with tempfile.TemporaryDirectory() as folder:
        parsers = make_parsers(Path(folder), texts, options.vocabulary)
    tokenizer = parsers["chat_template"].tokenizer
    encoded = tokenizer.encode("\n".join(texts), add_special_tokens=False)
    for parser in parsers.values():  # fill all tokenizer caches with the same text
        parser.render([{"role": "user", "content": "\n".join(texts)}])
    chat_tokens = frozenset(tokenizer.get_added_vocab().values())  # spelled in the sources, but not text here
    ids = [token for token in encoded if token not in chat_tokens]
    trials.add(
        {
            "kind": "tokenizer",
            "vocabulary": len(tokenizer),
            "corpus_tokens": len(ids),
            "corpus_characters_per_token": round(sum(map(len, texts)) / len(ids), 2),
        }
    )
    if "time" in options.parts:
        for trial in range(options.trials):
            for name, parser in alternating(parsers, trial):
                for turn, seconds in enumerate(session_seconds(parser, Script(tokenizer, ids, trial), TURNS), start=1):
                    trials.add({"kind": "turn", "parser": name, "trial": trial, "turn": turn, **seconds})
        sides = {**dict.fromkeys(parsers, session_seconds), "rerender": rerender_seconds}
        for trial in range(-1, options.trials):  # the first one warms up
            for side, seconds_of in alternating(sides, trial):
                # Use new seeds, because earlier renderings may come from a cache.
                script = Script(tokenizer, ids, 1000 + trial)
                turns = seconds_of(parsers.get(side, parsers["chat_template"]), script, SHORT_TURNS)
                sums = {key: sum(turn[key] for turn in turns) for key in turns[0]}
                if trial >= 0:
                    trials.add({"kind": "conversation", "side": side, "trial": trial, **sums})
    if "identity" in options.parts:
        identity(parsers, ids, options, trials)


def _timed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    value = work(*args, **kwargs)
    return value, {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def session_seconds(parser: Any, script: Script, turns: int) -> list[Row]:
    """Times every turn with a session: building its prompt and parsing its completion."""
    from rllm_core.types import Messages
    from rllm_devkit.checks.completions import TOOL

    session, conversation, rows = parser.session(tools=[TOOL], on_break="raise"), Messages(script.opening()), []
    for _ in range(turns):
        completion, result = script.completion(), script.result()
        turn, prompt_seconds = _timed(session.next_prompt, conversation)
        _, reading = _timed(session.record, completion)
        reading_seconds = {f"reading_{key}": seconds for key, seconds in reading.items()}
        rows.append({"prompt_tokens": len(turn.prompt_ids), **prompt_seconds, **reading_seconds})
        conversation.append(session.answer)
        conversation.append(_result_message(session.answer, result))
    return rows


def rerender_seconds(parser: Any, script: Script, turns: int) -> list[Row]:
    """Times every turn of the same conversation when transformers renders it again."""
    from rllm_devkit.checks.completions import TOOL

    conversation, rows = script.opening(), []
    for number in range(turns):
        completion, result = script.completion(), script.result()
        answer = dict(parser.parse_completion(completion, tools=[TOOL]).to_message(turn=number))
        render = parser.tokenizer.apply_chat_template
        ids, seconds = _timed(render, conversation, tools=[TOOL], add_generation_prompt=True, return_dict=False)
        rows.append({"prompt_tokens": len(ids), **seconds})
        conversation += [_with_data(answer), _result_message(answer, result)]
    return rows


def _result_message(answer: Mapping[str, Any], result: str) -> dict[str, Any]:
    [call] = answer["tool_calls"]
    return {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": result}


def _with_data(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer in the form templates expect."""
    [call] = answer["tool_calls"]
    function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return {**answer, "tool_calls": [{**call, "function": function}]}


# --------------------------------------------------------------------------------------------------------------------
# Identity


class Ngrams:
    """Samples text like the repository's from a trigram model, token by token, as a language model does.

    Args:
        corpus_ids: ``(tokens,)`` of the text.
        openers: Tokens that may start an answer.
    """

    def __init__(self, corpus_ids: Sequence[int], openers: Collection[int]) -> None:
        self._ids = corpus_ids
        self._starts = [at for at, token in enumerate(corpus_ids[:-2]) if token in openers]
        self._after_one: dict[int, list[int]] = defaultdict(list)
        self._after_two: dict[tuple[int, int], list[int]] = defaultdict(list)
        for first, second, third in zip(corpus_ids, corpus_ids[1:], corpus_ids[2:], strict=False):
            self._after_one[second].append(third)
            self._after_two[first, second].append(third)

    def draw(self, rng: random.Random, tokens: int) -> list[int]:
        """Draws a sequence; sometimes the next token depends on the previous one only."""
        start = rng.choice(self._starts)
        drawn = list(self._ids[start : start + 2])
        while len(drawn) < tokens:
            following = self._after_two[drawn[-2], drawn[-1]]
            drawn.append(rng.choice(following if rng.random() >= BACK_OFF else self._after_one[drawn[-1]]))
        return drawn


def identity(parsers: Mapping[str, Any], ids: Sequence[int], options: argparse.Namespace, trials: RawTrials) -> None:
    """Counts turns whose tokens the next prompt does not start with, per kind of completion."""
    from rllm_devkit.checks.drift import KINDS, probe_drift

    tokenizer = parsers["chat_template"].tokenizer
    words = frozenset(token for token in set(ids) if tokenizer.decode([token])[:1].isalpha())
    ngrams = Ngrams(ids, words)  # leading white space is a separate kind
    kinds = {**KINDS, **{f"n-grams, {tokens} tokens": partial(_sampled, ngrams, tokens) for tokens in NGRAM_TOKENS}}
    for name, parser in parsers.items():
        for drift in probe_drift(parser, kinds=kinds, conversations=options.conversations, turns=options.turns):
            trials.add(
                {
                    "kind": "drift",
                    "parser": name,
                    "completions": drift.completions,
                    "turns": drift.turns,
                    "completion_tokens": drift.completion_tokens,
                    "lost": drift.lost,
                    "lost_rerendered": drift.lost_rerendered,
                    "reasons": dict(drift.reasons),
                }
            )


def _sampled(ngrams: Ngrams, tokens: int, completions: Any) -> list[int]:
    return [*ngrams.draw(completions.rng, tokens), completions.text()[-1]]


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the measured parts."""
    found: Figures = {}
    for row in of_kind(rows, "tokenizer"):
        found["vocabulary"] = row["vocabulary"]
    if turns := of_kind(rows, "turn"):
        ratios = {parser: late_over_early(turns, parser, "wall_seconds") for parser in _values(turns, "parser")}
        found["turn100_over_turn5"] = max(ratios.values())
        found["turn100_over_turn5_cpu"] = max(late_over_early(turns, parser, "cpu_seconds") for parser in ratios)
        found["turn100_over_turn5_by_parser"] = ratios
        late = {parser: _window(turns, parser, LATE, "wall_seconds").values() for parser in ratios}
        found["turn100_ms"] = {parser: round(1e3 * statistics.median(late[parser]), 2) for parser in ratios}
    if conversations := of_kind(rows, "conversation"):
        sides = [side for side in _values(conversations, "side") if side != "rerender"]
        ratios = {side: over_bridge(conversations, side, ["wall_seconds"]) for side in sides}
        with_reading = [over_bridge(conversations, side, ["wall_seconds", "reading_wall_seconds"]) for side in sides]
        found["rerender_over_bridge_20_turns"] = min(ratios.values())
        found["rerender_over_bridge_20_turns_cpu"] = min(
            over_bridge(conversations, side, ["cpu_seconds"]) for side in sides
        )
        found["rerender_over_bridge_20_turns_by_parser"] = ratios
        found["rerender_over_bridge_and_reading_20_turns"] = min(with_reading)
    if drifts := of_kind(rows, "drift"):
        for key, what in (("identity_lost_share", "lost"), ("identity_lost_share_rerendered", "lost_rerendered")):
            found[key] = share(drifts, what)
            found[f"{key}_by_completions"] = {
                completions: share(of_kind(drifts, "drift", completions=completions), what)
                for completions in _values(drifts, "completions")
            }
        found["identity_turns"] = sum(row["turns"] for row in drifts)
    return found


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _window(rows: Sequence[Row], parser: str, turns: range, clock: str) -> dict[int, float]:
    """By trial, the median seconds of the turns in a window: prompt and reading together."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for row in of_kind(rows, "turn", parser=parser):
        if row["turn"] in turns:
            seconds[row["trial"]].append(row[clock] + row[f"reading_{clock}"])
    return {trial: statistics.median(several) for trial, several in seconds.items()}


def late_over_early(rows: Sequence[Row], parser: str, clock: str) -> float:
    """Returns the cost of turns around the 100th relative to turns around the 5th of the same conversation."""
    early, late = (_window(rows, parser, turns, clock) for turns in (EARLY, LATE))
    return round(paired_ratio((early[trial], late[trial]) for trial in early), 2)


def over_bridge(rows: Sequence[Row], side: str, clocks: Sequence[str]) -> float:
    """Returns the cost of rendering again at every turn relative to a session, counting ``clocks``."""
    ours = {row["trial"]: sum(row[clock] for clock in clocks) for row in of_kind(rows, "conversation", side=side)}
    theirs = {row["trial"]: row[clocks[0]] for row in of_kind(rows, "conversation", side="rerender")}
    return round(paired_ratio((ours[trial], theirs[trial]) for trial in ours.keys() & theirs.keys()), 1)


def share(rows: Sequence[Row], what: str) -> float:
    """Returns the share of lost turns."""
    return round(sum(row[what] for row in rows) / sum(row["turns"] for row in rows), 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parsing", description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=8192, help="entries of the trained vocabulary (default 8192)")
    parser.add_argument("--trials", type=int, default=9, help="timed conversations per side (default 9)")
    parser.add_argument("--conversations", type=int, default=25, help="conversations per kind and parser (default 25)")
    parser.add_argument("--turns", type=int, default=8, help="turns per conversation (default 8)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default all)")
    run("parsing", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
