"""Answers the page's requests, for the server and for a page written to a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm_core.errors import UserError
from rllm_viewer import comparing, results
from rllm_viewer.view.viewed_run import NotFound, ViewedRun, encoded

_NUMBER = r"(\d{1,15})"


class RequestHandler:
    """Answers requests about some runs.

    Args:
        runs: Runs, in the order of the command line.
    """

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self.runs = runs
        self._routes: dict[str, Callable[..., Any]] = {
            r"/api/runs": lambda query: [run.summary() for run in runs],
            r"/api/compare": self._compared,
            rf"/api/run/{_NUMBER}": lambda query, run: self._run(run).about(),
            rf"/api/run/{_NUMBER}/steps": self._steps,
            rf"/api/run/{_NUMBER}/groups": self._groups,
            rf"/api/run/{_NUMBER}/group/{_NUMBER}": lambda query, run, group: self._run(run).group(group),
            rf"/api/run/{_NUMBER}/tokens/{_NUMBER}/{_NUMBER}": lambda query, run, *place: self._run(run).tokens(*place),
            rf"/api/run/{_NUMBER}/episode/{_NUMBER}/{_NUMBER}": lambda query, run, *place: self._run(run).episode(
                *place
            ),
            rf"/api/run/{_NUMBER}/timing/{_NUMBER}": lambda query, run, step: self._run(run).timing(step),
        }

    def answer(self, path: str, query: Mapping[str, str]) -> bytes:
        """Returns the answer to a request as JSON.

        Raises:
            NotFound: If the path does not exist.
        """
        for pattern, route in self._routes.items():
            if match := re.fullmatch(pattern, path, re.ASCII):
                return encoded(route(query, *map(int, match.groups())))
        raise NotFound(f"there is nothing at {path}")

    def searched(self, path: str) -> ViewedRun | None:
        """Returns the run that a request searches; None if the request is not a search."""
        match = re.fullmatch(rf"/api/run/{_NUMBER}/search", path, re.ASCII)
        return self._run(int(match[1])) if match else None

    def _run(self, number: int) -> ViewedRun:
        if number >= len(self.runs):
            raise NotFound(f"there is no run {number}; {len(self.runs)} are shown")
        return self.runs[number]

    def _steps(self, query: Mapping[str, str], run: int) -> Any:
        return self._run(run).steps(*(_number(query, name) for name in ("metrics", "timings", "events")))

    def _groups(self, query: Mapping[str, str], run: int) -> Any:
        return self._run(run).index.changes(_number(query, "epoch"), _number(query, "since"))

    def _compared(self, query: Mapping[str, str]) -> Any:
        numbers = query.get("runs", "").split(",")
        chosen = [self._run(int(number)) for number in numbers if re.fullmatch(_NUMBER, number, re.ASCII)]
        try:
            found = [comparing.read(run.path) for run in chosen]
        except UserError as error:
            raise NotFound(str(error)) from error
        return {
            "settings": comparing.differing([run.settings for run in found]),
            "versions": comparing.differing([run.versions for run in found]),
            "validations": {
                measure: sorted(rows.items())
                for measure in results.VALIDATION_MEASURES
                if (rows := comparing.by_step(found, measure))
            },
            "metrics": comparing.last_metrics(found),
            "curve": (curve := comparing.curve_of(found)),
            "curves": [[[row["step"], row.get(curve)] for row in run.metrics] for run in found] if curve else [],
        }


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    return int(text) if re.fullmatch(_NUMBER, text, re.ASCII) else 0
