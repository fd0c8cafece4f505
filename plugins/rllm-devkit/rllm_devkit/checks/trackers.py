"""Contract checks for trackers; see `check_tracker`."""

from __future__ import annotations

import asyncio
import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from pydantic import SecretStr

from rllm_core.config import RunConfig, Section
from rllm_core.providers import NAME_PATTERN
from rllm_core.run_folder.tracking import Trackers
from rllm_core.tracker import Cell, Status, Tracker
from rllm_devkit.checks.results import CheckResult, NotApplicable, Violation
from rllm_devkit.disk import InterceptedDisk, Operation

Recorded = Mapping[str, Sequence[tuple[int, float]]]
Logged = list[tuple[int, dict[str, float]]]
Table = tuple[list[str], list[list[Cell]]]

SECRET = "sk-check-9f27c1d0a4b84e6f"
# Single precision is enough for a curve.
VALUE_TOLERANCE = 1e-6


class _Secrets(Section):
    key: SecretStr


@dataclass
class _TrackerSubject:
    """Tracker under test, as described by its author."""

    make: Callable[[], Tracker]
    folder: Path
    read: Callable[[Path], Recorded] | None
    local: bool
    deadline_seconds: float

    def run_dir(self, name: str) -> Path:
        """Creates a new run folder."""
        path = self.folder / name
        path.mkdir(parents=True)
        return path


def check_tracker(
    make: Callable[[], Tracker],
    folder: Path,
    *,
    read: Callable[[Path], Recorded] | None = None,
    local: bool = False,
    deadline_seconds: float = 30.0,
) -> list[CheckResult]:
    """Checks a tracker against the contract of `Tracker`, calling it from a separate thread as the core does.

    In a test, with a store on this machine:
    ``assert not [r for r in check_tracker(make, tmp_path) if r.outcome == "failed"]``. Do not call it from a running
    event loop.

    Args:
        make: Constructs a tracker, as the core does with its section of the run file.
        folder: Folder for run folders; empty or missing.
        read: Reads the metrics recorded for a run folder: ``(step, value)`` pairs by metric name, in logging order.
            Without it, recorded metrics are not checked. The metric ``step`` may be missing, because it repeats the
            step number.
        local: Whether the tracker promises to write only below ``folder``. Files opened by C code are not seen.
        deadline_seconds: Timeout of a call, in seconds.

    Returns:
        One result per check. An exception raised by the tracker fails the check that called it.
    """
    subject = _TrackerSubject(make, folder, read, local, deadline_seconds)
    folder.mkdir(parents=True, exist_ok=True)
    return [_result(name, check, subject) for name, check in TRACKER_CHECKS.items()]


def _result(name: str, check: Callable[[_TrackerSubject], str], subject: _TrackerSubject) -> CheckResult:
    try:
        return CheckResult(name, "passed", check(subject))
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Violation as problem:
        return CheckResult(name, "failed", str(problem))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including SystemExit from a constructor
        return CheckResult(name, "failed", " ".join(f"raised {type(error).__name__}: {error}".split()))


# --------------------------------------------------------------------------------------------------------------------
# One run, with the calls the core makes


@dataclass
class _Watched(Tracker):
    """Forwards calls and records their durations."""

    name = "watched"

    inner: Tracker
    calling: str = "start"
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, config: RunConfig, run_dir: str) -> None:
        before = config.model_dump_json()
        self._pass_on("start", lambda: self.inner.start(config, run_dir))
        if config.model_dump_json() != before:
            raise Violation("start modifies the run file passed to it")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        before = dict(metrics)
        self._pass_on(f"log({step}, ...)", lambda: self.inner.log(step, metrics))
        if dict(metrics) != before:
            raise Violation("log modifies the metrics passed to it")

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        before = copy.deepcopy((columns, rows))
        self._pass_on(f"log_table({name!r}, {step}, ...)", lambda: self.inner.log_table(name, step, columns, rows))
        if (columns, rows) != before:
            raise Violation("log_table modifies the table passed to it")

    def finish(self, status: Status) -> None:
        self._pass_on(f"finish({status!r})", lambda: self.inner.finish(status))

    def _pass_on(self, what: str, call: Callable[[], object]) -> None:
        self.calling, began = what, time.monotonic()
        call()
        self.seconds[what] = time.monotonic() - began
        self.calling = ""


class _Killed(_Watched):
    """A tracker that is never finished."""

    def finish(self, status: Status) -> None:
        pass


def _play(
    subject: _TrackerSubject,
    run_dir: Path,
    logged: Logged,
    status: Status = "completed",
    watched_class: type[_Watched] = _Watched,
    table: Table | None = None,
) -> _Watched:
    """Starts a tracker, logs to it, a table after each entry if there is one, and finishes it."""
    watched = watched_class(subject.make())
    trackers = Trackers({"it": watched}, note=lambda text: None, deadline_seconds=subject.deadline_seconds)
    trackers.start(_run_config(), str(run_dir))
    for step, metrics in logged:
        trackers.log(step, metrics)
        if table is not None:
            trackers.log_table("answers", step, *table)
    asyncio.run(trackers.finish(status))
    if "it" in trackers.failed:
        where = f"{watched.calling}: " if watched.calling else ""
        raise Violation(f"{where}{trackers.failed['it'].removeprefix('Broken: ')}")
    return watched


def _run_config() -> RunConfig:
    section = _Secrets(key=SecretStr(SECRET))
    return RunConfig(workflow="say_yes", backend="scripted", parser="bytes", plugins={"vault": section})


def _steps(first: int, last: int, scale: float = 1.0) -> Logged:
    """Returns metrics as a run logs them: training metrics per step, and validation metrics after some steps."""
    logged: Logged = [(0, {"validation/reward_mean": 0.25 * scale, "validation/step": 0.0})] if first == 0 else []
    for step in range(max(first, 1), last + 1):
        logged.append((step, {"step": step, "reward_mean": scale / step, "loss": -1e-7 * scale * step}))
        if step % 2 == 0:
            logged.append((step, {"validation/reward_mean": scale / (step + 1), "validation/step": float(step)}))
    return logged


def _expected(*logged: Logged) -> dict[str, list[tuple[int, float]]]:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in (entry for part in logged for entry in part):
        for name, value in metrics.items():
            if name != "step":
                by_name.setdefault(name, []).append((step, value))
    return by_name


def _compare(subject: _TrackerSubject, run_dir: Path, expected: Recorded, *, whole: bool = True) -> bool:
    """Returns whether recorded metrics could be checked. Unless ``whole``, values logged again may be replaced."""
    if subject.read is None:
        return False
    recorded = subject.read(run_dir)
    for name, points in expected.items():
        found = list(recorded.get(name, ()))
        if not found:
            raise Violation(f"{name!r} was logged but not recorded; recorded: {sorted(recorded) or 'none'}")
        wanted = points if whole else _last_of_each_step(points)
        found = found if whole else _last_of_each_step(found)
        if len(found) != len(wanted) or not all(_same(one, other) for one, other in zip(found, wanted, strict=True)):
            raise Violation(f"{name!r} was logged as {wanted}, but recorded as {found}")
    return True


def _last_of_each_step(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(dict(points).items())


def _same(one: tuple[int, float], other: tuple[int, float]) -> bool:
    return one[0] == other[0] and math.isclose(one[1], other[1], rel_tol=VALUE_TOLERANCE)


# --------------------------------------------------------------------------------------------------------------------
# The checks; each returns its findings


def _construction(subject: _TrackerSubject) -> str:
    before = sorted(subject.folder.rglob("*"))
    first, second = subject.make(), subject.make()
    if not isinstance(first, Tracker):
        raise Violation(f"{first!r:.80} is not a Tracker")
    if first is second:
        raise Violation("constructing it twice returned the same object")
    name = getattr(first, "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise Violation(f"the name {name!r} must match {NAME_PATTERN.pattern}")
    made = sorted(set(subject.folder.rglob("*")) - set(before))
    if made:
        raise Violation(
            f"the constructor wrote {made[0].relative_to(subject.folder)}; write in start() instead, because dry runs "
            "construct trackers too"
        )
    return name


def _arrival(subject: _TrackerSubject) -> str:
    run_dir, logged = subject.run_dir("arrival"), _steps(0, 5)
    watched = _play(subject, run_dir, logged)
    slowest = max(watched.seconds, key=lambda what: watched.seconds[what])
    seen = f"the longest call was {slowest}, {watched.seconds[slowest]:.2g} s"
    if _compare(subject, run_dir, _expected(logged)):
        return f"all {len(_expected(logged))} metrics arrived; {seen}"
    return f"log was called {len(logged)} times; {seen}"


def _names(subject: _TrackerSubject) -> str:
    odd = ["reward_mean/solver", "validation/pass@4", "reward_mean/a role: #1", "reward_mean/Prüfer", "x" * 200, "step"]
    _play(subject, subject.run_dir("names"), [(1, dict.fromkeys(odd, 0.5)), (2, dict.fromkeys(odd, 1e300))])
    return ", ".join(repr(name) if len(name) < 40 else f"one of {len(name)} characters" for name in odd)


def _tables(subject: _TrackerSubject) -> str:
    if type(subject.make()).log_table is Tracker.log_table:
        raise NotApplicable("it shows no tables (log_table)")
    odd = ["", "a|b\n| c", "<script>alert(1)</script>", "\x1b[2J\u202e\x00", "Prüfer 日本 \U0001f600", "x" * 20_000]
    rows: list[list[Cell]] = [["1", text, 0.5] for text in odd]
    table: Table = (["task", "text", "reward"], [*rows, ["2", None, None]])
    for name, one in (("tables", table), ("empty_tables", (table[0], []))):
        run_dir, logged = subject.run_dir(name), _steps(1, 3)
        _play(subject, run_dir, logged, table=one)
        _compare(subject, run_dir, _expected(logged))
    return f"texts of a model, among them one of {len(odd[-1]):,} characters, and a table without rows"


def _statuses(subject: _TrackerSubject) -> str:
    for status in get_args(Status):
        _play(subject, subject.run_dir(f"status_{status}"), _steps(1, 2), status)
    return ", ".join(get_args(Status))


def _nothing_logged(subject: _TrackerSubject) -> str:
    for status in get_args(Status):
        _play(subject, subject.run_dir(f"nothing_{status}"), [], status)
    return "start and finish without a log between them"


def _resume(subject: _TrackerSubject) -> str:
    run_dir, before, after = subject.run_dir("resume"), _steps(0, 5), _steps(4, 7, scale=2.0)
    _play(subject, run_dir, before, "interrupted")
    _play(subject, run_dir, after)
    if _compare(subject, run_dir, _expected(before, after), whole=False):
        return "steps 4 and 5 were logged again; the last values are recorded in the same run"
    return "steps 4 and 5 were logged again"


def _killed(subject: _TrackerSubject) -> str:
    run_dir = subject.run_dir("killed")
    again = _steps(0, 4, scale=2.0)
    _play(subject, run_dir, _steps(0, 3), watched_class=_Killed)
    _play(subject, run_dir, again)
    _compare(subject, run_dir, _expected(again), whole=False)
    return "a second tracker continued after one that was never finished"


def _side_by_side(subject: _TrackerSubject) -> str:
    folders = [subject.run_dir(f"side_{number}") for number in range(2)]
    watched = {folder.name: _Watched(subject.make()) for folder in folders}
    trackers = [
        Trackers({name: tracker}, note=lambda text: None, deadline_seconds=subject.deadline_seconds)
        for name, tracker in watched.items()
    ]
    logged = [_steps(1, 3, scale=1.0), _steps(1, 3, scale=3.0)]

    async def play() -> None:
        for each, folder in zip(trackers, folders, strict=True):
            each.start(_run_config(), str(folder))
        end = time.monotonic() + subject.deadline_seconds
        while time.monotonic() < end and any(
            tracker.calling == "start" and not each.failed
            for tracker, each in zip(watched.values(), trackers, strict=True)
        ):
            await asyncio.sleep(0.001)  # if one run replaces another, both must have started before anything is logged
        for entries in zip(*logged, strict=True):
            for each, (step, metrics) in zip(trackers, entries, strict=True):
                each.log(step, metrics)
        for each in trackers:
            await each.finish("completed")

    asyncio.run(play())
    rejected = [name for each in trackers for name in each.failed if watched[name].calling == "start"]
    for each in trackers:
        for name, failure in each.failed.items():
            if rejected != [name]:
                raise Violation(f"two runs in one process: {watched[name].calling}: {failure}")
    for folder, entries in zip(folders, logged, strict=True):
        if folder.name not in rejected:
            _compare(subject, folder, _expected(entries))
    return "it rejects a second run in one process" if rejected else "two runs in one process"


def _secrets(subject: _TrackerSubject) -> str:
    run_dir = subject.run_dir("secrets")
    _play(subject, run_dir, _steps(1, 2))
    files = [path for path in subject.folder.rglob("*") if path.is_file()]
    for path in files:
        if SECRET.encode() in path.read_bytes():
            raise Violation(f"{path.relative_to(subject.folder)} contains a SecretStr of the run file in plain text")
    return f"no secrets in {len(files)} files"


def _locality(subject: _TrackerSubject) -> str:
    if not subject.local:
        raise NotApplicable("it does not promise to write only below the run folder (local)")
    with _written_outside(subject.folder) as outside:
        _play(subject, subject.run_dir("locality"), _steps(0, 3))
    if outside:
        raise Violation(f"it wrote {sorted(outside)[0]}, outside {subject.folder}")
    return "nothing was written outside"


@contextmanager
def _written_outside(folder: Path) -> Iterator[set[Path]]:
    """Collects files written elsewhere, except temporary files and compiled modules."""
    outside: set[Path] = set()
    temporary = Path(tempfile.gettempdir())

    def see(operation: Operation, path: Path) -> None:
        if path.is_relative_to(folder) or "__pycache__" in path.parts or path.is_relative_to("/dev"):
            return
        if path.is_relative_to(temporary) and path.relative_to(temporary).parts[0].startswith(tempfile.gettempprefix()):
            return
        outside.add(path)

    with InterceptedDisk(Path("/"), see):
        yield outside


TRACKER_CHECKS: dict[str, Callable[[_TrackerSubject], str]] = {
    "construction": _construction,
    "arrival": _arrival,
    "names": _names,
    "tables": _tables,
    "statuses": _statuses,
    "nothing logged": _nothing_logged,
    "resume": _resume,
    "killed": _killed,
    "side by side": _side_by_side,
    "secrets": _secrets,
    "locality": _locality,
}
