"""Tests kill -9 at any moment: there is always a complete checkpoint, and the resumed run is equal."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import pytest

from rllm_core.run_folder import checkpoint
from rllm_viewer.verify import Verification, verify

pytestmark = pytest.mark.slow

STEPS, GROUPS, ROLLOUTS = 12, 3, 2
SMALL = (f"training.steps={STEPS}", f"training.groups_per_step={GROUPS}", f"training.rollouts_per_group={ROLLOUTS}",
         "training.validation_rollouts=2", "training.checkpoint_every_steps=2", "say_yes.tasks=7")  # fmt: skip
IN_FLIGHT = ("training.staleness_threshold=2", "training.partial_rollout=true")
GO_WITHOUT = ("algorithm.filter_uniform_groups=true", "algorithm.refill_filtered_groups=false")
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "colocated": ("scripted_colocated", ()),
    "synchronous": ("scripted", ()),
    "drained": ("scripted", ("training.staleness_threshold=1", "training.trigger_parameter_sync_step=2")),
    "in flight": ("scripted", IN_FLIGHT),
    "strict": ("scripted", (*IN_FLIGHT, 'training.staleness="strict"')),
    "streamed": ("scripted", (*IN_FLIGHT, "training.groups_per_forward_backward=1")),
    "going without": ("scripted_colocated", GO_WITHOUT),
    "going without in flight": ("scripted", (*IN_FLIGHT, *GO_WITHOUT)),
}
SYNCHRONOUS = ("colocated", "synchronous", "going without")
KILLS = 10  # per mode; `make test-exhaustive` runs the others


class Server:
    """Warm `killable` process, and one uninterrupted run for each of its settings."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("killable.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder
        self._uninterrupted: dict[tuple[str, ...], Path] = {}

    def uninterrupted(self, mode: str, *more: str) -> Path:
        """Returns the folder of a run with these settings that nothing interrupted."""
        if (mode, *more) not in self._uninterrupted:
            run_dir = self._folder / str(len(self._uninterrupted))
            assert self.train(run_dir, mode, *more) == 0
            self._uninterrupted[mode, *more] = run_dir
        return self._uninterrupted[mode, *more]

    def train(self, run_dir: Path, mode: str, *more: str, **kill: Any) -> int:
        """Starts or resumes a run and returns its exit code.

        ``kill`` holds seconds, lines, operations or signals, or the file that records the operations.
        """
        backend, overrides = MODES[mode]
        request = {
            "run_dir": str(run_dir), "backend": backend, "overrides": [*SMALL, *overrides, *more],
            "resume": (run_dir / "run.toml").exists(), **kill,
        }  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("uninterrupted"))
    yield server
    server.process.communicate(timeout=600)
    assert server.process.returncode == 0


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def lines_of(run_dir: Path) -> int:
    """Returns the number of lines in all files, which is what ``lines`` of `Server.train` counts."""
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("*.jsonl"))


def assert_sound(run_dir: Path) -> Verification | None:
    """Checks the files of a killed process; returns None if it was killed before writing its event log."""
    for folder in checkpoint.complete(run_dir / "checkpoints"):
        checkpoint.read(folder)
    if not (run_dir / "events.jsonl").exists():
        return None
    found = verify(run_dir)
    assert found.problems == []
    return found


def assert_whole(run_dir: Path, mode: str, uninterrupted: Path) -> None:
    """Checks a run that was killed and then resumed to its end."""
    found = assert_sound(run_dir)
    assert found is not None
    assert found.steps == STEPS
    trained = [ordinal for event in events(run_dir) if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(trained) == list(range(STEPS * GROUPS)), "every task of the stream once, trained or gone without"
    versions = [event["version"] for event in events(run_dir) if event["event"] == "sync" and event["reason"] == "step"]
    assert versions == sorted(set(versions)), "no version twice"
    if mode in SYNCHRONOUS:
        assert (run_dir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    if mode == "strict":
        assert found.max_staleness <= 2
    books = json.loads((run_dir / "summary.json").read_text())["books"]
    assert books["dispatched"] == books["trained"] + books["filtered"] + books["cancelled"]
    assert books["trained"] + books["filtered"] == STEPS * GROUPS * ROLLOUTS
    assert (books["filtered"] > 0) == mode.startswith("going without")


@pytest.mark.parametrize("least", [KILLS, pytest.param(36, marks=pytest.mark.by_hand)])
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_again_and_again(server: Server, tmp_path: Path, mode: str, least: int) -> None:
    whole = server.uninterrupted(mode)
    seconds = json.loads((whole / "summary.json").read_text())["seconds"]
    lines = lines_of(whole)
    generator = random.Random(f"kills {mode}")
    kills, runs = 0, 0
    while kills < least:
        run_dir = tmp_path / f"run-{runs}"
        runs += 1
        last_step = 0
        while True:
            how: dict[str, float] = generator.choice(
                [{"seconds": generator.uniform(0, seconds)}, {"lines": generator.randint(1, lines)}]
            )
            if kills == least:
                how = {}
            code = server.train(run_dir, mode, **how)
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"{how}: exit {code}"
            kills += 1
            assert_sound(run_dir)
            complete = checkpoint.complete(run_dir / "checkpoints")
            step = checkpoint.read(complete[-1])["step"] if complete else 0
            assert step >= last_step, "a checkpoint was lost"
            last_step = step
        assert_whole(run_dir, mode, whole)


def of_each_kind(operations: list[str], least: int) -> list[int]:
    """Returns the numbers, from 1, of at least ``least`` operations: one of each kind, the others spread evenly.

    Operations on files whose names differ only in numbers are of one kind.
    """
    kinds: dict[str, list[int]] = {}
    for number, operation in enumerate(operations, 1):
        kinds.setdefault(re.sub(r"\d+", "#", operation), []).append(number)
    chosen = {numbers[len(numbers) // 2] for numbers in kinds.values()}
    remaining = [number for number in range(1, len(operations) + 1) if number not in chosen]
    missing = max(0, least - len(chosen))
    return sorted(chosen | {remaining[place * len(remaining) // missing] for place in range(missing)})


def test_operations_of_each_kind_are_chosen() -> None:
    operations = ["mkdir run", *["write a"] * 6, "rename step-1", "write b", "write b", "rename step-2", "unlink a"]
    assert of_each_kind(operations, 1) == [1, 5, 10, 11, 12]
    assert of_each_kind(operations, 8) == [1, 2, 4, 5, 7, 10, 11, 12]
    assert of_each_kind(operations, 12) == list(range(1, 13))


def recorded(server: Server, folder: Path, mode: str, *more: str, **kill: Any) -> list[str]:
    """Returns the operations of a run in ``folder / "run"``, in order."""
    record = folder / "operations"
    assert server.train(folder / "run", mode, *more, record=str(record), **kill) == 0
    return record.read_text().splitlines()


SAVING = ("training.checkpoint_every_steps=1", "training.keep_checkpoints=1", "training.steps=2",
          "training.trajectories_per_step=0")  # fmt: skip
at_operations = pytest.mark.parametrize("writes", [True, False])
of_saving = pytest.mark.parametrize("mode", ["colocated", "streamed"])


@at_operations
@of_saving
def test_killed_at_an_operation_of_each_kind_on_the_disk(
    server: Server, tmp_path: Path, mode: str, writes: bool
) -> None:
    (tmp_path / "recorded").mkdir()
    operations = recorded(server, tmp_path / "recorded", mode, *SAVING, writes=writes)
    assert len(operations) > 40
    killed_at(server, tmp_path, mode, writes, of_each_kind(operations, KILLS))


@pytest.mark.by_hand
@at_operations
@of_saving
def test_killed_at_every_operation_on_the_disk(server: Server, tmp_path: Path, mode: str, writes: bool) -> None:
    assert killed_at(server, tmp_path, mode, writes, count(1)) > 40


def killed_at(server: Server, tmp_path: Path, mode: str, writes: bool, operations: Iterable[int]) -> int:
    """Kills at writes (also halfway), or at fsyncs, renames, unlinks and mkdirs; the run saves and prunes each step.

    Writes are numbered separately from all other operations, because their number varies between runs. So does the
    timing of the loop's writes while a thread saves a checkpoint.

    Returns:
        The number of kills; it ends with an operation after the last one of a run.
    """
    whole = server.uninterrupted(mode, *SAVING)
    last_step, kills = 0, 0
    is_fixed = mode in SYNCHRONOUS and not writes  # two runs do the same things in the same order
    for operation in operations:
        run_dir = tmp_path / f"run-{operation}"
        code = server.train(run_dir, mode, *SAVING, operations=operation, writes=writes)
        if code == 0:
            break
        kills += 1
        assert code == -signal.SIGKILL
        assert_sound(run_dir)
        complete = [checkpoint.read(folder)["step"] for folder in checkpoint.complete(run_dir / "checkpoints")]
        if is_fixed:
            assert max(complete, default=0) >= last_step, "there was a checkpoint, and an operation later there is none"
        last_step = max(complete, default=0)
        assert server.train(run_dir, mode, *SAVING) == 0, f"cannot go on after operation {operation}"
        assert_sound(run_dir)
        if mode in SYNCHRONOUS:
            assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000002"]
    assert last_step == 2 or not is_fixed
    return kills


PLACES = {
    "the first validation": ("workflow.run", 1),
    "generation": ("workflow.run", 20),
    "a pass": ("backend.process_backend_batch", 5),
    "the optimizer step": ("backend.update_policy", 5),
    "the synchronisation": ("backend.on_policy_updated", 5),
    "saving": ("backend.save_checkpoint", 2),
    "the start": ("backend.init_rollout_engine", 1),
}


def signals_in_pairs() -> list[tuple[str, str, str]]:
    """Returns cases in which each two values of place, signal and mode meet."""
    return [
        (place, ("SIGTERM", "SIGINT")[(row + column) % 2], mode)
        for row, place in enumerate(PLACES)
        for column, mode in enumerate(("colocated", "in flight"))
    ]


def test_each_two_settings_of_a_signal_meet() -> None:
    settings = (PLACES, ("SIGTERM", "SIGINT"), ("colocated", "in flight"))
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in signals_in_pairs()} == set(product(settings[one], settings[other]))


@pytest.mark.parametrize(
    ("place", "name", "mode"),
    [
        case if case in signals_in_pairs() else pytest.param(*case, marks=pytest.mark.by_hand)
        for case in product(PLACES, ("SIGTERM", "SIGINT"), ("colocated", "in flight"))
    ],
)
def test_one_signal_saves_and_a_second_one_ends_at_once(
    server: Server, tmp_path: Path, place: str, name: str, mode: str
) -> None:
    seam, number = PLACES[place]
    whole, code = server.uninterrupted(mode), 128 + signal.Signals[name]
    for names in ([name], [name, name]):
        run_dir = tmp_path / str(len(names))
        assert server.train(run_dir, mode, signals={"seam": seam, "number": number, "names": names}) == code
        found = assert_sound(run_dir)
        is_saved = len(names) == 1 and place not in ("the start", "the first validation")
        assert (run_dir / "summary.json").exists() == (len(names) == 1)
        if is_saved:
            [*_, newest] = checkpoint.complete(run_dir / "checkpoints")
            assert found is not None
            assert checkpoint.read(newest)["step"] == found.steps, "nothing that was trained is lost"
            summary = json.loads((run_dir / "summary.json").read_text())
            assert summary["status"] == "interrupted"
            assert summary["books"]["dispatched"] == summary["books"]["trained"] + summary["books"]["cancelled"]
        assert server.train(run_dir, mode) == 0
        assert_whole(run_dir, mode, whole)


RESUMED = ("training.checkpoint_every_steps=3", "training.steps=6")


@pytest.fixture
def cut_short(server: Server, tmp_path: Path) -> Path:
    """A run that was killed far behind its last checkpoint, so that its files must be cut back to that."""
    base, whole = tmp_path / "base", server.uninterrupted("colocated", *RESUMED)
    assert server.train(base, "colocated", *RESUMED, lines=int(0.8 * lines_of(whole))) == -signal.SIGKILL
    assert len((base / "metrics.jsonl").read_text().splitlines()) > 3, "there is something to cut"
    assert [path.name for path in checkpoint.complete(base / "checkpoints")] == ["step-000003"]
    return base


def test_killed_at_an_operation_of_each_kind_of_a_resumption(server: Server, tmp_path: Path, cut_short: Path) -> None:
    shutil.copytree(cut_short, tmp_path / "recorded" / "run")
    operations = recorded(server, tmp_path / "recorded", "colocated", *RESUMED)
    assert len(operations) > 20
    killed_while_resuming(server, tmp_path, cut_short, of_each_kind(operations, KILLS))


@pytest.mark.by_hand
def test_killed_at_every_operation_of_a_resumption(server: Server, tmp_path: Path, cut_short: Path) -> None:
    assert killed_while_resuming(server, tmp_path, cut_short, count(1)) > 20


def killed_while_resuming(server: Server, tmp_path: Path, cut_short: Path, operations: Iterable[int]) -> int:
    """Kills a resumption: cutting files back takes several operations; the next launch completes an interrupted cut.

    Returns:
        The number of kills; it ends with an operation after the last one of a resumption.
    """
    whole = server.uninterrupted("colocated", *RESUMED)
    kills = 0
    for operation in operations:
        run_dir = tmp_path / str(operation)
        shutil.copytree(cut_short, run_dir)
        code = server.train(run_dir, "colocated", *RESUMED, operations=operation)
        assert_sound(run_dir)
        if code == 0:
            break
        kills += 1
        assert server.train(run_dir, "colocated", *RESUMED) == 0
        assert_sound(run_dir)
        assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    return kills
