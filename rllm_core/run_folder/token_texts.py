"""Text of every token id that the recorded groups of a run have, so that a reader needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from rllm_core.algorithms.samples import segments
from rllm_core.parser import BaseParser
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.recorded import TOKENS
from rllm_core.types import Episode

Spell = Callable[[int], bytes]


class TokenTexts:
    """Writes ``tokens.jsonl``: each id once, with its text, and its bytes if they are not a whole text of their own.

    Args:
        parser: Parser that knows the tokens, or None.
        note: Called with the reason if it cannot spell them; the run goes on without the file.
    """

    def __init__(self, run_dir: RunDir, parser: BaseParser | None, note: Callable[[str], None]) -> None:
        self._lines = run_dir.lines[TOKENS]
        self._parser = parser
        self._note = note
        self._known = {line["id"] for line in read_json_lines(self._lines.path)}

    def write(self, episodes: Iterable[Episode]) -> None:
        """Writes the ids of these episodes that are new."""
        if self._spell is None:
            return
        for number in sorted(_ids(episodes) - self._known):
            spelling = self._spell(number)
            text = spelling.decode(errors="replace")
            line = {"id": number, "text": text}
            self._lines.write(line if text.encode() == spelling else {**line, "bytes": spelling.hex()})
            self._known.add(number)

    @cached_property
    def _spell(self) -> Spell | None:
        if self._parser is None:
            return None
        try:
            vocabulary = self._parser.vocabulary()
        except Exception as error:  # any code of a third party; only the texts of tokens are lost
            self._note(f"no tokens.jsonl: {error}")
            return None
        names = {number: name.encode() for name, number in vocabulary.control_ids.items()}
        return lambda number: vocabulary.spelling(number) or names.get(number, b"")


def _ids(episodes: Iterable[Episode]) -> set[int]:
    """Returns the ids of all tokens; the last step of an unbroken sequence contains those before it."""
    ends = [
        trajectory.steps[positions[-1]]
        for episode in episodes
        for trajectory in episode.trajectories
        for positions in segments(trajectory.steps)
    ]
    arrays = [array for step in ends for array in (step.prompt_ids, step.completion_ids) if len(array)]
    return set(np.unique(np.concatenate(arrays)).tolist()) if arrays else set()
