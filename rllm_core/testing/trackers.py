"""The contract of `Tracker` as checks that any tracker can be put through; see `check_tracker`."""

from __future__ import annotations

import asyncio
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
from rllm_core.testing.disk import InterceptedDisk, Operation
from rllm_core.testing.parsers import Broken, CheckResult, NotApplicable
from rllm_core.training.trackers import Status, Tracker, Trackers

Recorded = Mapping[str, Sequence[tuple[int, float]]]
Logged = list[tuple[int, dict[str, float]]]

SECRET = "sk-check-9f27c1d0a4b84e6f"
# Single precision is enough for a curve.
VALUE_TOLERANCE = 1e-6


class _Secrets(Section):
    key: SecretStr


@dataclass
class _Subject:
    """The tracker under test, as its author describes it."""

    make: Callable[[], Tracker]
    folder: Path
    read: Callable[[Path], Recorded] | None
    local: bool
    deadline_seconds: float

    def run_dir(self, name: str) -> Path:
        """A run folder of its own."""
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
    """Hold a tracker to the contract of `Tracker`, called from a thread of its own as the core does it.

    For the tests of a tracker, with a store on this machine behind it:
    ``assert not [r for r in check_tracker(make, tmp_path) if r.outcome == "failed"]``. Not to be called where an event
    loop is running.

    Args:
        make: Constructs one, as the core does with its section of the run file.
        folder: Where run folders are made; empty, or not there yet.
        read: What a run has recorded, ``(step, value)`` in the order of logging by the metric's name, given the run
            folder. Without it nobody looks whether metrics arrive. The metric ``step`` may be missing: it says nothing
            that its step does not say.
        local: Whether it promises to write nowhere but below ``folder``. Files that C code opens are not seen.
        deadline_seconds: A call that takes longer is a failure.

    Returns:
        A result per check; whatever the tracker raises is a failure of the check that met it.
    """
    subject = _Subject(make, folder, read, local, deadline_seconds)
    folder.mkdir(parents=True, exist_ok=True)
    return [_result(name, check, subject) for name, check in TRACKER_CHECKS.items()]


def _result(name: str, check: Callable[[_Subject], str], subject: _Subject) -> CheckResult:
    try:
        return CheckResult(name, "passed", check(subject))
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Broken as problem:
        return CheckResult(name, "failed", str(problem))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit of a constructor, too
        return CheckResult(name, "failed", " ".join(f"raised {type(error).__name__}: {error}".split()))


# --------------------------------------------------------------------------------------------------------------------
# One run, as the core does it


@dataclass
class _Watched(Tracker):
    """Passes calls on and notes what became of them."""

    name = "watched"

    inner: Tracker
    calling: str = "start"
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, config: RunConfig, run_dir: str) -> None:
        before = config.model_dump_json()
        self._pass_on("start", lambda: self.inner.start(config, run_dir))
        if config.model_dump_json() != before:
            raise Broken("start changed the run file it was given")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        before = dict(metrics)
        self._pass_on(f"log({step}, ...)", lambda: self.inner.log(step, metrics))
        if dict(metrics) != before:
            raise Broken("log changed the metrics it was given")

    def finish(self, status: Status) -> None:
        self._pass_on(f"finish({status!r})", lambda: self.inner.finish(status))

    def _pass_on(self, what: str, call: Callable[[], object]) -> None:
        self.calling, began = what, time.monotonic()
        call()
        self.seconds[what] = time.monotonic() - began
        self.calling = ""


class _Killed(_Watched):
    """Is never finished."""

    def finish(self, status: Status) -> None:
        pass


def _play(
    subject: _Subject,
    run_dir: Path,
    logged: Logged,
    status: Status = "completed",
    watched_class: type[_Watched] = _Watched,
) -> _Watched:
    """Start, log and finish a tracker."""
    watched = watched_class(subject.make())
    trackers = Trackers({"it": watched}, note=lambda text: None, deadline_seconds=subject.deadline_seconds)
    trackers.start(_run_config(), str(run_dir))
    for step, metrics in logged:
        trackers.log(step, metrics)
    asyncio.run(trackers.finish(status))
    if "it" in trackers.failed:
        where = f"{watched.calling}: " if watched.calling else ""
        raise Broken(f"{where}{trackers.failed['it'].removeprefix('Broken: ')}")
    return watched


def _run_config() -> RunConfig:
    section = _Secrets(key=SecretStr(SECRET))
    return RunConfig(workflow="say_yes", backend="scripted", parser="bytes", plugins={"vault": section})


def _steps(first: int, last: int, scale: float = 1.0) -> Logged:
    """Steps as a run logs them: training metrics of each, those of a validation after some."""
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


def _compare(subject: _Subject, run_dir: Path, expected: Recorded, *, whole: bool = True) -> bool:
    """Whether anybody could look. With ``whole`` false, values of steps that were logged again may be gone."""
    if subject.read is None:
        return False
    recorded = subject.read(run_dir)
    for name, points in expected.items():
        found = list(recorded.get(name, ()))
        if not found:
            raise Broken(f"{name!r} was logged and is not recorded; recorded are {sorted(recorded) or 'none'}")
        wanted = points if whole else _last_of_each_step(points)
        found = found if whole else _last_of_each_step(found)
        if len(found) != len(wanted) or not all(_same(one, other) for one, other in zip(found, wanted, strict=True)):
            raise Broken(f"{name!r} was logged as {wanted}, and is recorded as {found}")
    return True


def _last_of_each_step(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(dict(points).items())


def _same(one: tuple[int, float], other: tuple[int, float]) -> bool:
    return one[0] == other[0] and math.isclose(one[1], other[1], rel_tol=VALUE_TOLERANCE)


# --------------------------------------------------------------------------------------------------------------------
# The checks: each returns what it saw


def _construction(subject: _Subject) -> str:
    before = sorted(subject.folder.rglob("*"))
    first, second = subject.make(), subject.make()
    if not isinstance(first, Tracker):
        raise Broken(f"{first!r:.80} is no Tracker")
    if first is second:
        raise Broken("constructing it twice gave one object")
    name = getattr(first, "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise Broken(f"its name {name!r} must match {NAME_PATTERN.pattern}")
    made = sorted(set(subject.folder.rglob("*")) - set(before))
    if made:
        raise Broken(f"constructing it, which a dry run does, wrote {made[0].relative_to(subject.folder)}")
    return name


def _arrival(subject: _Subject) -> str:
    run_dir, logged = subject.run_dir("arrival"), _steps(0, 5)
    watched = _play(subject, run_dir, logged)
    slowest = max(watched.seconds, key=lambda what: watched.seconds[what])
    seen = f"the longest call was {slowest}, {watched.seconds[slowest]:.2g} s"
    if _compare(subject, run_dir, _expected(logged)):
        return f"all {len(_expected(logged))} metrics arrived; {seen}"
    return f"{len(logged)} calls of log; {seen}"


def _names(subject: _Subject) -> str:
    odd = ["reward_mean/solver", "validation/pass@4", "reward_mean/a role: #1", "reward_mean/Prüfer", "x" * 200, "step"]
    _play(subject, subject.run_dir("names"), [(1, dict.fromkeys(odd, 0.5)), (2, dict.fromkeys(odd, 1e300))])
    return ", ".join(repr(name) if len(name) < 40 else f"one of {len(name)} characters" for name in odd)


def _statuses(subject: _Subject) -> str:
    for status in get_args(Status):
        _play(subject, subject.run_dir(f"status_{status}"), _steps(1, 2), status)
    return ", ".join(get_args(Status))


def _nothing_logged(subject: _Subject) -> str:
    for status in get_args(Status):
        _play(subject, subject.run_dir(f"nothing_{status}"), [], status)
    return "start and finish without a log between them"


def _resume(subject: _Subject) -> str:
    run_dir, before, after = subject.run_dir("resume"), _steps(0, 5), _steps(4, 7, scale=2.0)
    _play(subject, run_dir, before, "interrupted")
    _play(subject, run_dir, after)
    if _compare(subject, run_dir, _expected(before, after), whole=False):
        return "steps 4 and 5 were logged again, and what was logged last is recorded in the same run"
    return "steps 4 and 5 were logged again"


def _killed(subject: _Subject) -> str:
    run_dir = subject.run_dir("killed")
    again = _steps(0, 4, scale=2.0)
    _play(subject, run_dir, _steps(0, 3), watched_class=_Killed)
    _play(subject, run_dir, again)
    _compare(subject, run_dir, _expected(again), whole=False)
    return "another one went on where the first was never finished"


def _side_by_side(subject: _Subject) -> str:
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
            await asyncio.sleep(0.001)  # a run that takes the place of another has to be there before anybody logs
        for entries in zip(*logged, strict=True):
            for each, (step, metrics) in zip(trackers, entries, strict=True):
                each.log(step, metrics)
        for each in trackers:
            await each.finish("completed")

    asyncio.run(play())
    refused = [name for each in trackers for name in each.failed if watched[name].calling == "start"]
    for each in trackers:
        for name, failure in each.failed.items():
            if refused != [name]:
                raise Broken(f"two runs in one process: {watched[name].calling}: {failure}")
    for folder, entries in zip(folders, logged, strict=True):
        if folder.name not in refused:
            _compare(subject, folder, _expected(entries))
    return "it refuses a second run in one process" if refused else "two runs in one process"


def _secrets(subject: _Subject) -> str:
    run_dir = subject.run_dir("secrets")
    _play(subject, run_dir, _steps(1, 2))
    files = [path for path in subject.folder.rglob("*") if path.is_file()]
    for path in files:
        if SECRET.encode() in path.read_bytes():
            raise Broken(f"a SecretStr of the run file stands in {path.relative_to(subject.folder)}")
    return f"{len(files)} files hold none"


def _locality(subject: _Subject) -> str:
    if not subject.local:
        raise NotApplicable("it does not promise to write only below the given folder")
    with _written_outside(subject.folder) as outside:
        _play(subject, subject.run_dir("locality"), _steps(0, 3))
    if outside:
        raise Broken(f"it wrote {sorted(outside)[0]}, outside {subject.folder}")
    return "nothing was written outside"


@contextmanager
def _written_outside(folder: Path) -> Iterator[set[Path]]:
    """Collects what is written elsewhere; temporary files and compiled modules are nobody's concern."""
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


TRACKER_CHECKS: dict[str, Callable[[_Subject], str]] = {
    "construction": _construction,
    "arrival": _arrival,
    "names": _names,
    "statuses": _statuses,
    "nothing logged": _nothing_logged,
    "resume": _resume,
    "killed": _killed,
    "side by side": _side_by_side,
    "secrets": _secrets,
    "locality": _locality,
}
