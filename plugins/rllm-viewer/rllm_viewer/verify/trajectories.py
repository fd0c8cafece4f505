"""Checks ``trajectories.jsonl``: its episodes, their order and their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm_viewer.verify.episodes import Told, check_episode, metric_means, of_step
from rllm_viewer.verify.findings import Verification
from rllm_viewer.verify.lines import Lines
from rllm_viewer.verify.records import Block, RolloutRecord

Kept = list[tuple[dict[str, Any], list[Told]]]


class Trajectories:
    """Reads the file block by block, in the order in which steps and validations ended.

    Attributes:
        lines: The lines of the file.
        ends: Number of lines up to the end of each block.
        missing: Number of missing or incomplete blocks.
    """

    def __init__(self, path: Path, blocks: Sequence[Block], found: Verification) -> None:
        self.found = found
        self.lines = Lines(path.name)
        self.ends: list[int] = []
        self._blocks = iter(blocks)
        self._block: Block | None = next(self._blocks, None)
        self._kept: Kept = []
        self._in_block = 0
        self._in_order = True
        for number, line in self.lines.raw(path):
            try:
                written = json.loads(line)
                self._line(number, written["step"], written["episode"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                found.problem(f"{path.name} line {number} cannot be read ({type(error).__name__}: {error})")
                self._in_block += 1
        while self._block is not None and self._is_over(None):
            self._next_block()
        self.missing = len(blocks) - len(self.ends)

    def _line(self, number: int, step: int, episode: dict[str, Any]) -> None:
        key = (step, episode["is_validation"])
        while self._block is not None and self._is_over(key):
            self._next_block()
        place = f"{self.lines.name} line {number}"
        block = self._block
        if block is None:
            self._surplus(place, step)
        elif key != (block.step, block.is_validation):
            self._out_of_order(f"{place} has step {step}, expected {block.step} from events.jsonl")
        elif block.episodes is not None:
            self._compare(place, block, episode)
        self._in_block += 1

    def _surplus(self, place: str, step: int) -> None:
        # A kill may lose events whose episodes are already in this file: one step, or the last validation.
        if self.found.status != "interrupted" or step not in (self.found.steps, self.found.steps + 1):
            self._out_of_order(f"{place} has step {step}, but events.jsonl has no more steps or validations")

    def _compare(self, place: str, block: Block, episode: dict[str, Any]) -> None:
        assert block.episodes is not None
        by_id = {rollout.outcome.rollout: rollout for rollout in block.episodes}
        rollout = by_id.get(episode["rollout_id"])
        due = self._due(block)
        if due is not None and due.outcome.rollout != episode["rollout_id"]:
            self._out_of_order(
                f"{place} has rollout_id {episode['rollout_id']}, expected {due.outcome.rollout} from events.jsonl"
            )
        if rollout is None:
            if due is None:
                self._out_of_order(
                    f"{place} has rollout_id {episode['rollout_id']}, which does not belong to step {block.step}"
                )
            return
        self._kept.append((episode, check_episode(self.found, place, episode, rollout)))

    def _due(self, block: Block) -> RolloutRecord | None:
        """Returns the next expected episode; None if no event records how many of the block are kept."""
        if block.wanted is None or block.episodes is None:
            return None
        wanted = min(block.wanted, block.total)
        return block.episodes[self._in_block * block.total // wanted]

    def _is_over(self, key: tuple[int, bool] | None) -> bool:
        assert self._block is not None
        if self._block.wanted is not None:
            return self._in_block >= min(self._block.wanted, self._block.total)
        return key != (self._block.step, self._block.is_validation)

    def _next_block(self) -> None:
        block = self._block
        assert block is not None
        self.ends.append((self.ends[-1] if self.ends else 0) + self._in_block)
        if len(self._kept) == block.total:  # some metrics need all episodes
            if block.counted is not None:
                block.of_episodes = of_step(self._kept, block.counted)
            elif block.is_validation:
                ended_well = [episode for episode, _ in self._kept if episode["trajectories"]]
                block.of_episodes = {"metrics": metric_means(ended_well)}
        self._block, self._in_block, self._kept = next(self._blocks, None), 0, []

    def _out_of_order(self, what: str) -> None:
        if self._in_order:  # every line after the first missing or extra one is out of order, too
            self.found.problem(what)
        self._in_order = False
