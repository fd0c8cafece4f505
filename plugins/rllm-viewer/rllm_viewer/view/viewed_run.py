"""One run folder in the viewer: JSON data for each view of the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.errors import DamagedFile, UserError
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.recorded import GROUPS
from rllm_core.run_folder.run import summary_of
from rllm_viewer import diagnosis, recordings, results
from rllm_viewer.view import details, facts, token_details
from rllm_viewer.view.files import SpelledTokens, Timings, Waits, added
from rllm_viewer.view.index import RunIndex

Json = dict[str, Any]

MISSING = {
    "settings": "The run file cannot be read",
    "summary": "The summary cannot be read",
    "findings": "What went wrong cannot be told",
    "where": "Where its rollouts ran cannot be told",
}
VALIDATION = b'{"event":"validation"'


class NotFound(Exception):
    """The run, group or rollout does not exist."""


class ViewedRun:
    """One run folder, finished or running.

    Args:
        path: Run folder.
        cache: Folder in which its index is kept, or None.

    Attributes:
        problem: Why its index cannot be updated, or None.
    """

    def __init__(self, path: Path, cache: Path | None) -> None:
        self.path = path
        self.name = path.name or path.resolve().name
        self.index = RunIndex(path, cache)
        self.problem: str | None = None
        self._epoch = self.index.epoch
        self._follow()

    def _follow(self) -> None:
        self._spelled = SpelledTokens(self.path)
        self._timings = Timings(self.path)
        self._waits = Waits(self.path)

    def update(self) -> None:
        """Reads the lines that the run has added.

        Raises:
            OSError: If a file cannot be read.
        """
        self.index.update()
        if self.index.epoch != self._epoch:
            self._epoch = self.index.epoch
            self._follow()
        self._spelled.update()

    def summary(self) -> Json:
        """Returns a short summary of the run."""
        result = results.result_of(self.path)
        return asdict(result) | {"path": str(self.path), "name": self.name, "curve": list(result.curve)}

    def about(self) -> Json:
        """Returns the facts about the whole run; for a damaged run, those that can be read."""
        about: Json = {"settings": None, "summary": None, "findings": [], "problems": [], "empty": None}
        if self.problem is not None:
            about["problems"].append(self.problem)
        for name, read in (
            ("settings", lambda: results.tables_of(self.path)),
            ("summary", lambda: summary_of(self.path)),
            ("findings", self._findings),
            ("where", lambda: results.where_rollouts_ran(self.path)),
        ):
            try:
                about[name] = read()
            except (UserError, *results.DAMAGED) as error:
                shown = results.result_of(self.path).error  # The page has this error from the run's summary.
                why = str(error.__cause__ if isinstance(error, DamagedFile) else error)
                if not why or shown is None or why not in shown:
                    about["problems"].append(f"{MISSING[name]}: {error}")
        if not len(self.index):
            try:
                recordings.index_of(self.path)
            except UserError as error:
                about["empty"] = str(error)
        return about

    def steps(self, metrics: int, timings: int, events: int) -> Json:
        """Returns the metrics, timings and validations of all steps after given positions in their files."""
        of_files = {
            "metrics": added(self.path / "metrics.jsonl", metrics),
            "timings": added(self.path / "timings.jsonl", timings),
            "validations": added(self.path / "events.jsonl", events, VALIDATION),
        }
        for row in of_files["validations"].rows:
            row.pop("episodes", None)
        return {name: msgspec.structs.asdict(found) for name, found in of_files.items()}

    def group(self, identity: int) -> Json:
        """Returns a group with its rollouts.

        Raises:
            NotFound: If the run has no such group, or it cannot be read.
        """
        group = self._read(identity)
        timings = self._timings.of([rollout.episode.rollout_id for rollout in group.rollouts])
        self._spelled.update()
        shown = details.of_group(identity, group, timings, self._spelled.texts)
        shown["waited"] = self._waits.of(group.group) if group.outcome == "trained" else None
        return shown

    def tokens(self, identity: int, position: int) -> Json:
        """Returns the tokens of a rollout.

        Raises:
            NotFound: If there is no such rollout.
        """
        group = self._read(identity)
        if not 0 <= position < len(group.rollouts):
            raise NotFound(f"the group has no rollout at position {position}; it has {len(group.rollouts)}")
        self._spelled.update()
        return token_details.of_rollout(group, position, self._spelled.texts, self._spelled.bytes)

    def episode(self, identity: int, position: int) -> Json:
        """Returns a rollout as the data from which `rllm_core.types.Episode` can restore it.

        Raises:
            NotFound: If there is no such rollout.
        """
        group = self._read(identity)
        if not 0 <= position < len(group.rollouts):
            raise NotFound(f"the group has no rollout at position {position}; it has {len(group.rollouts)}")
        return group.rollouts[position].episode.model_dump(mode="json")

    def timing(self, step: int) -> Json:
        """Returns the calls of all recorded rollouts of a step, and the step's timings."""
        rows = [row for row in self.index.rows() if row.step == step]
        groups = []
        for row in rows:
            owners = self._owners(row)
            timings = self._timings.of(owners)
            lines = [timings.get(owner, {}) for owner in owners]
            groups.append(
                {
                    "id": row.id,
                    "group": row.group,
                    "task": row.task,
                    "outcome": row.outcome,
                    "rollouts": [{"seconds": line.get("seconds"), "calls": line.get("calls")} for line in lines],
                }
            )
        seconds = [row for row in added(self.path / "timings.jsonl", 0).rows if row.get("step") == step]
        return {"step": step, "groups": groups, "seconds": seconds[-1] if seconds else None}

    def _findings(self) -> list[Json]:
        return [finding.to_json(self.path) for finding in diagnosis.of_folder(self.path).findings]

    def _owners(self, row: facts.ListedGroup) -> list[str]:
        try:
            return facts.rollout_ids(self._line(row))
        except ValueError:
            return []  # The list of groups reports unreadable lines.

    def _read(self, identity: int) -> RecordedGroup:
        row = self.index.row(identity)
        if row is None:
            raise NotFound(
                f"{self.path} has no recorded group at byte {identity}: the link is of another run, or the run went "
                "back to a checkpoint; choose a group from the list of the run"
            )
        try:
            return RecordedGroup.from_json(self._line(row))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotFound(f"{self.path / GROUPS}.jsonl has no readable group at byte {identity}: {reason}") from error

    def _line(self, row: facts.ListedGroup) -> bytes:
        with (self.path / f"{GROUPS}.jsonl").open("rb") as file:
            file.seek(row.id)
            return file.read(row.length)


def encoded(data: Any) -> bytes:
    """Returns JSON, with sequences of messages as lists and non-finite numbers as null."""
    return msgspec.json.encode(data, enc_hook=list)
