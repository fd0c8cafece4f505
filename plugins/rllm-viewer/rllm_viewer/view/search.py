"""Searches the texts of a run's recorded groups, as a process: ``python -m rllm_viewer.view.search RUN``.

A regular expression can take forever, but a process can be killed. It reads the query as JSON from standard input. It
writes one JSON line for each rollout that matches, and lines with the number of bytes searched so far.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.sandbox.in_child import die_with_parent

SNIPPET_CHARACTERS = 60
SAID_EVERY_SECONDS = 0.2


class Query(msgspec.Struct):
    """The query.

    Attributes:
        text: Text, or a regular expression.
        is_regex: Whether it is a regular expression.
        is_exact: Whether case matters.
    """

    text: str
    is_regex: bool = False
    is_exact: bool = False

    def pattern(self) -> re.Pattern[str]:
        """Returns the compiled query.

        Raises:
            ValueError: If the query is not a valid regular expression.
        """
        try:
            return re.compile(
                self.text if self.is_regex else re.escape(self.text), 0 if self.is_exact else re.IGNORECASE
            )
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{self.text!r} is not a regular expression: {error}") from error


class Hit(msgspec.Struct):
    """A rollout that matches the query.

    Attributes:
        id: Group of the rollout, as its position in ``groups.jsonl``.
        rollout: Position of the rollout in the group.
        where: ``task``, ``error`` or the message role.
        before: Text before the first match; ``after`` is the text after it.
        places: Number of matches in the rollout.
    """

    id: int
    rollout: int
    where: str
    before: str
    found: str
    after: str
    places: int


class _SearchedStep(msgspec.Struct):
    messages: Any = None
    response: Any = None
    prompt_ids: Any = None


class _SearchedTrajectory(msgspec.Struct):
    steps: list[_SearchedStep] = []


class _SearchedEpisode(msgspec.Struct):
    trajectories: list[_SearchedTrajectory] = []
    error: str | None = None


class _SearchedRollout(msgspec.Struct):
    episode: _SearchedEpisode


class _SearchedTask(msgspec.Struct):
    task_id: str = ""
    data: Any = None


class _SearchedLine(msgspec.Struct):
    task: _SearchedTask
    rollouts: list[_SearchedRollout]


_DECODER = msgspec.json.Decoder(_SearchedLine)


def hits(line: bytes, identity: int, pattern: re.Pattern[str]) -> Iterator[Hit]:
    """Yields the rollouts of a group that match the query.

    Raises:
        ValueError: If the line is damaged.
    """
    group = _DECODER.decode(line)
    of_task = [("task", group.task.task_id), *(("task", text) for text in _texts(group.task.data))]
    shared: dict[int, list[tuple[str, str]]] = {}
    for position, rollout in enumerate(group.rollouts):
        texts = [*of_task]
        for number, trajectory in enumerate(rollout.episode.trajectories):
            texts += _of_trajectory(trajectory, number, shared)
        if rollout.episode.error is not None:
            texts.append(("error", rollout.episode.error))
        first: tuple[str, str, re.Match[str]] | None = None
        places = 0
        for where, text in texts:
            for match in pattern.finditer(text):
                first = first or (where, text, match)
                places += 1
        if first is not None:
            where, text, match = first
            start, stop = match.span()
            yield Hit(
                identity,
                position,
                where,
                text[max(0, start - SNIPPET_CHARACTERS) : start],
                text[start : min(stop, start + 2 * SNIPPET_CHARACTERS)],
                text[stop : stop + SNIPPET_CHARACTERS],
                places,
            )


def _of_trajectory(
    trajectory: _SearchedTrajectory, number: int, shared: dict[int, list[tuple[str, str]]]
) -> Iterator[tuple[str, str]]:
    """Yields role and text of all messages; the first prompt may be shared with an earlier rollout."""
    for position, step in enumerate(trajectory.steps):
        if position == 0 and step.prompt_ids is None:
            yield from shared.get(number, ())
        elif isinstance(step.messages, dict):
            for message in [*step.messages.get("answered", ()), *step.messages.get("added", ())]:
                yield from _of_message(message)
        else:
            opening = [pair for message in step.messages or () for pair in _of_message(message)]
            if position == 0:
                shared.setdefault(number, opening)
            yield from opening
        if isinstance(step.response, dict):
            yield from _of_message({"role": "assistant", **step.response})


def _of_message(message: Any) -> Iterator[tuple[str, str]]:
    if isinstance(message, dict):
        role = str(message.get("role"))
        for name, value in message.items():
            if name != "role":
                yield from ((role, text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield str(value)


def main(path: Path) -> None:
    """Searches a file of groups, and writes the matches to standard output."""
    pattern = msgspec.json.decode(sys.stdin.buffer.read(), type=Query).pattern()
    output, said, position = sys.stdout.buffer, time.monotonic(), 0
    # A run without recorded groups has no such file, and a run may be deleted while it is viewed.
    with path.open("rb") if path.is_file() else nullcontext(()) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                found = list(hits(line, position, pattern))
            except ValueError:
                found = []  # The index reports unreadable lines.
            position += len(line)
            for hit in found:
                output.write(msgspec.json.encode(hit) + b"\n")
            if found or time.monotonic() - said > SAID_EVERY_SECONDS:
                said = time.monotonic()
                output.write(msgspec.json.encode({"searched": position}) + b"\n")
                output.flush()
    output.write(msgspec.json.encode({"searched": position, "done": True}) + b"\n")
    output.flush()


if __name__ == "__main__":
    die_with_parent()  # a killed server cannot end its search
    main(Path(sys.argv[1]))
