"""Text of every token id in the recorded groups of a run, so that a reader needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from rllm_core.algorithms.samples import segments
from rllm_core.parser import BaseParser
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.recorded import TOKENS
from rllm_core.types import Episode, TokenIds

Spell = Callable[[int], bytes]


class TokenTexts:
    """Writes ``tokens.jsonl``: each id once, with its text, and its bytes if they are not valid text by themselves.

    Args:
        note: Called with the reason if the parser cannot spell them; the run continues without the file.
    """

    def __init__(self, run_dir: RunDir, parser: BaseParser | None, note: Callable[[str], None]) -> None:
        self._lines = run_dir.lines[TOKENS]
        self._parser = parser
        self._note = note
        self._is_known = np.zeros(0, bool)  # by id
        self._know([line["id"] for line in read_json_lines(self._lines.path)])

    def write(self, episodes: Iterable[Episode]) -> None:
        """Writes the ids in these episodes that are not in the file yet."""
        if self._spell is None:
            return
        ids = _ids(episodes)
        if ids.size and ids.item(ids.argmax()) < len(self._is_known):
            ids = ids[~self._is_known[ids]]
        if ids.size:
            self._lines.write_all(_line(number, self._spell(number)) for number in self._know(ids))

    def _know(self, ids: TokenIds | list[int]) -> list[int]:
        """Marks ids as known, and returns the newly marked ones, sorted."""
        new = [number for number in np.unique(ids).tolist() if not self._knows(number)]
        if new and new[-1] >= len(self._is_known):
            self._is_known = np.concatenate((self._is_known, np.zeros(new[-1] + 1 - len(self._is_known), bool)))
        self._is_known[new] = True
        return new

    def _knows(self, number: int) -> bool:
        return number < len(self._is_known) and bool(self._is_known[number])

    @cached_property
    def _spell(self) -> Spell | None:
        if self._parser is None:
            return None
        try:
            vocabulary = self._parser.vocabulary()
        except Exception as error:  # third-party code; a failure loses only the texts of tokens
            self._note(f"no tokens.jsonl: {error}")
            return None
        names = {number: name.encode() for name, number in vocabulary.control_ids.items()}
        return lambda number: vocabulary.spelling(number) or names.get(number, b"")


def _line(number: int, spelling: bytes) -> dict[str, Any]:
    text = spelling.decode(errors="replace")
    line = {"id": number, "text": text}
    return line if text.encode() == spelling else {**line, "bytes": spelling.hex()}


def _ids(episodes: Iterable[Episode]) -> TokenIds:
    """Returns the ids of all tokens; the last step of an unbroken sequence contains those before it."""
    ends = [
        trajectory.steps[positions[-1]]
        for episode in episodes
        for trajectory in episode.trajectories
        for positions in segments(trajectory.steps)
    ]
    return np.concatenate([np.zeros(0, np.int32), *(ids for s in ends for ids in (s.prompt_ids, s.completion_ids))])
