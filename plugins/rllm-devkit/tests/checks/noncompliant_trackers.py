"""Trackers that break one rule each, with the check that must fail."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rllm_core.config import RunConfig, to_toml
from rllm_core.tracker import Cell, Status, Tracker

LIMIT_SECONDS = 1.0


class Notebook(Tracker):
    """Compliant tracker: writes one line per metric to the run folder."""

    name: ClassVar[str] = "notebook"

    def start(self, config: RunConfig, run_dir: str) -> None:
        self.path = Path(run_dir) / "trackers" / "notebook.jsonl"
        self.path.parent.mkdir(exist_ok=True)
        self.write({"config": config.to_tables()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.write({"step": step, "name": name, "value": value})

    def finish(self, status: Status) -> None:
        self.write({"status": status})

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for text in (run_dir / "trackers" / "notebook.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "name" in line:
            by_name.setdefault(line["name"], []).append((line["step"], line["value"]))
    return by_name


class OneAtATime(Notebook):
    """Compliant as well: rejects a second run that starts before the first has ended."""

    runs: ClassVar[list[Path]] = []

    def start(self, config: RunConfig, run_dir: str) -> None:
        if self.runs and self.runs[0] != Path(run_dir):
            raise RuntimeError("there is a run already")
        self.runs[:] = [Path(run_dir)]
        super().start(config, run_dir)

    def finish(self, status: Status) -> None:
        super().finish(status)
        self.runs.clear()


class Nameless(Notebook):
    name = "Not A Name"


class WritingEarly(Notebook):
    folder: ClassVar[Path]

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        (self.folder / "early.txt").write_text("", encoding="utf-8")


class Exiting(Notebook):
    def __init__(self, config: Any = None) -> None:
        raise SystemExit(2)


class Losing(Notebook):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: value for name, value in metrics.items() if not name.startswith("validation/")})


class Rounding(Notebook):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: round(value, 2) for name, value in metrics.items()})


class CountingItsOwnSteps(Notebook):
    calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        super().log(self.calls, metrics)


class ChangingMetrics(Notebook):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics.pop("loss", None)  # type: ignore[attr-defined]


class Picky(Notebook):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if any(not name.replace("_", "").replace("/", "").isascii() for name in metrics):
            raise ValueError("that is no name for a metric")


class Hanging(Notebook):
    """Hangs in one check only, to keep the others fast."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "arrival" in self.path.parts:
            time.sleep(2 * LIMIT_SECONDS)


class HangingAtTheEnd(Notebook):
    def finish(self, status: Status) -> None:
        if "arrival" in self.path.parts:
            time.sleep(2 * LIMIT_SECONDS)


class KnowingOneStatus(Notebook):
    def finish(self, status: Status) -> None:
        super().finish({"completed": "completed"}[status])  # type: ignore[arg-type]


class NeedingMetrics(Notebook):
    last: int

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self.last = step

    def finish(self, status: Status) -> None:
        super().write({"status": status, "last": self.last})


class StartingAgain(Notebook):
    def start(self, config: RunConfig, run_dir: str) -> None:
        (Path(run_dir) / "trackers" / "notebook.jsonl").unlink(missing_ok=True)
        super().start(config, run_dir)


class RefusingEarlierSteps(Notebook):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step < max((at for points in read(self.path.parent.parent).values() for at, _ in points), default=0):
            raise ValueError(f"step {step} is in the past")
        super().log(step, metrics)


class Locking(Notebook):
    def start(self, config: RunConfig, run_dir: str) -> None:
        super().start(config, run_dir)
        self.path.with_suffix(".lock").touch(exist_ok=False)

    def finish(self, status: Status) -> None:
        self.path.with_suffix(".lock").unlink()


class Sharing(Notebook):
    """Keeps the run on the class, like libraries with one global run."""

    current: ClassVar[Path]

    def start(self, config: RunConfig, run_dir: str) -> None:
        super().start(config, run_dir)
        Sharing.current = self.path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.path = Sharing.current
        super().log(step, metrics)


class TellingSecrets(Notebook):
    def start(self, config: RunConfig, run_dir: str) -> None:
        super().start(config, run_dir)
        key = config.plugins["vault"].key.get_secret_value()
        self.write({"config": to_toml({"key": key})})


class WritingElsewhere(Notebook):
    def finish(self, status: Status) -> None:
        super().finish(status)
        (self.path.parents[3] / "elsewhere.txt").write_text("", encoding="utf-8")


class WithTables(Notebook):
    """Compliant tracker that shows tables."""

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.write({"table": name, "step": step, "rows": [dict(zip(columns, row, strict=True)) for row in rows]})


class NeedingNumbers(WithTables):
    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.write({"table": name, "last": [float(row[-1]) for row in rows]})  # type: ignore[arg-type]


class LosingMetricsAfterTables(WithTables):
    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.path = self.path.with_suffix(".tables")


NONCOMPLIANT: dict[str, tuple[type[Notebook] | Callable[[], Any], str, str]] = {
    "nameless": (Nameless, "construction", "must match"),
    "writing early": (WritingEarly, "construction", "the constructor wrote early.txt"),
    "exiting": (Exiting, "construction", "raised SystemExit"),
    "no tracker": (dict, "construction", "is not a Tracker"),
    "losing": (Losing, "arrival", "'validation/reward_mean' was logged but not recorded"),
    "rounding": (Rounding, "arrival", "reward_mean' was logged as"),
    "own steps": (CountingItsOwnSteps, "arrival", "was logged as [(0, "),
    "changing": (ChangingMetrics, "arrival", "log modifies the metrics"),
    "picky": (Picky, "names", "noncompliant_trackers.py:107: ValueError: that is no name"),
    "hanging": (Hanging, "arrival", "log(0, ...): it did not finish within 1 s after the end"),
    "hanging at the end": (HangingAtTheEnd, "arrival", "finish('completed'): it did not finish"),
    "needing numbers": (NeedingNumbers, "tables", "TypeError: float() argument"),
    "losing after tables": (LosingMetricsAfterTables, "tables", "was logged as"),
    "one status": (KnowingOneStatus, "statuses", "noncompliant_trackers.py:126: KeyError: 'interrupted'"),
    "needing metrics": (NeedingMetrics, "nothing logged", "noncompliant_trackers.py:137: AttributeError"),
    "starting again": (StartingAgain, "resume", "was logged as"),
    "refusing": (RefusingEarlierSteps, "resume", "noncompliant_trackers.py:149: ValueError: step 4 is in the past"),
    "locking": (Locking, "killed", "noncompliant_trackers.py:156: FileExistsError"),
    "sharing": (Sharing, "side by side", "was logged"),
    "telling secrets": (TellingSecrets, "secrets", "contains a SecretStr of the run file"),
    "writing elsewhere": (WritingElsewhere, "locality", "elsewhere.txt, outside"),
}
