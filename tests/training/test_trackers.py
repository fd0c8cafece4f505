"""Tests that no tracker stops or delays training, and that the summary reports failures."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from rllm_core import hookimpl, providers
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig, Section
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import logging_again, tracking
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.tracking import Trackers
from rllm_core.runs import launch
from rllm_core.tracker import Cell, Status, Tracker

HANGS_SECONDS = 30.0
LIMIT_SECONDS = 1.0


class BoardConfig(Section):
    """``[board]``: a section with a secret."""

    colour: str = "green"
    key: SecretStr = SecretStr("")


class Board(Tracker):
    """Tracker that records its calls and runs ``misbehave`` in each."""

    name: ClassVar[str] = "board"
    boards: ClassVar[list[Board]]
    misbehave: ClassVar[Callable[[str], None] | None]

    def __init__(self, config: BoardConfig) -> None:
        super().__init__(config)
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.boards.append(self)
        self.meet("construct")

    def start(self, config: RunConfig, run_dir: str) -> None:
        self.calls.append(("start", config.to_tables(), run_dir))
        self.meet("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))
        self.meet("log")

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.calls.append(("log_table", name, step, columns, rows))
        self.meet("log_table")

    def finish(self, status: Status) -> None:
        self.calls.append(("finish", status))
        self.meet("finish")

    def meet(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if Board.misbehave is not None:
            Board.misbehave(method)

    def steps(self, prefix: str = "") -> list[int]:
        return [
            call[1]
            for call in self.calls
            if call[0] == "log" and all(name.startswith("validation/") for name in call[2]) == bool(prefix)
        ]


class Plugin:
    @hookimpl
    def trackers(self) -> list[providers.TrackerProvider]:
        record = providers.TrackerProvider(
            name="board", load=f"{__name__}:Board", config=f"{__name__}:BoardConfig", summary="A board."
        )
        return [record, providers.TrackerProvider(name="gone", load="rllm_nowhere:Gone", summary="Cannot be imported.")]


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Event that releases hanging tracker threads, so that none outlives its test."""
    event = threading.Event()
    Board.boards, Board.misbehave = [], None
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker-"):
            thread.join(HANGS_SECONDS)


@pytest.fixture
def play(run_scripted: Any, plugins: PluginManager, released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Any:
    plugins.register(Plugin(), "boards")
    monkeypatch.setattr(
        launch, "Trackers", lambda trackers, note: Trackers(trackers, note=note, deadline_seconds=LIMIT_SECONDS)
    )

    def run(*overrides: str, **options: Any) -> Any:
        notes = Notes()
        ended = run_scripted('training.trackers=["board"]', *overrides, progress=notes, **options)
        return ended, [note for note in notes.notes if "tracker" in note]

    return run


@pytest.mark.slow
def test_sampled_answers_are_logged_as_a_table(play: Any) -> None:
    run, notes = play("training.answers_table_every_steps=2", "training.groups_kept_per_step=2")
    assert (run.error, notes) == (None, [])
    [board] = Board.boards
    tables = [call for call in board.calls if call[0] == "log_table"]
    assert [(name, step) for _, name, step, _, _ in tables] == [("answers", 2), ("answers", 4), ("answers", 6)]
    entries = [line for line in run.lines("groups_index") if line["step"] == 4 and line["outcome"] == "trained"]
    _, _, _, columns, rows = tables[1]
    assert columns == ["task", "question", "expected", "answer", "reward"]
    wanted = [(entry["task"], reward) for entry in entries for reward in entry["rewards"]]
    assert len(entries) == 2
    assert [(row[0], row[-1]) for row in rows] == wanted
    assert all(row[1] and row[3] for row in rows)
    assert [call[0] for call in board.calls if call[:2] in [("log", 4), ("log_table", "answers")]][:2] == [
        "log_table",
        "log",
    ]


def test_a_table_needs_recorded_groups(plugins: PluginManager) -> None:
    overrides = ("training.answers_table_every_steps=2", "training.groups_kept_per_step=0")
    with pytest.raises(ConfigError, match="groups_kept_per_step = 0 records none"):
        load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")


def hanging(method: str, released: threading.Event) -> Callable[[str], None]:
    return lambda called: None if called != method else (released.wait(HANGS_SECONDS), None)[1]


def raising(method: str, error: BaseException) -> Callable[[str], None]:
    def misbehave(called: str) -> None:
        if called == method:
            raise error

    return misbehave


def test_a_second_signal_while_a_tracker_finishes_loses_no_result(play: Any) -> None:
    found: list[dict[str, Any]] = []

    def misbehave(called: str) -> None:
        if called == "finish":  # which may take a minute; a second signal ends the process at once
            found.append(json.loads((Path(Board.boards[0].calls[0][2]) / "summary.json").read_text()))

    Board.misbehave = misbehave
    run, notes = play("training.steps=2")
    assert (run.error, notes) == (None, [])
    assert found == [run.summary]


@pytest.mark.slow
def test_a_tracker_hears_everything_in_order_in_one_thread_that_is_not_the_main_one(play: Any) -> None:
    run, notes = play("training.validate_every_steps=3", "board.colour=red")
    [board] = Board.boards
    assert board.config == BoardConfig(colour="red")
    assert [call[0] for call in board.calls] == ["start", *["log"] * 9, "finish"]
    assert board.calls[0][2] == str(run.path)
    assert board.steps() == [1, 2, 3, 4, 5, 6]
    assert board.steps("validation/") == [0, 3, 6]
    assert board.calls[-1] == ("finish", "completed")
    assert board.threads == {threading.main_thread().name, "tracker-board"}, "constructed in the main thread"
    logged = board.calls[2][2]
    assert {name: logged[name] for name in run.lines("metrics")[0]} == run.lines("metrics")[0]
    assert run.summary["tracker_failures"] == {}
    assert notes == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_a_tracker_raises_ends_the_tracker_and_not_the_run(play: Any, method: str, error: BaseException) -> None:
    Board.misbehave = raising(method, error)
    run, notes = play()
    assert run.error is None
    assert run.summary["status"] == "completed"
    [board] = Board.boards
    assert [call[0] for call in board.calls].count(method) == 1
    assert board.calls[-1][0] == method, "and it is not called again"
    [(name, failure)] = run.summary["tracker_failures"].items()
    assert name == "board"
    assert re.match(rf"\S+test_trackers\.py:\d+: {type(error).__name__}", failure)
    assert notes == [f"tracker 'board' is switched off for the rest of the run: {failure}"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_hangs_does_not_keep_the_run(play: Any, method: str, released: threading.Event) -> None:
    Board.misbehave = hanging(method, released)
    run, notes = play()
    assert run.error is None
    assert run.summary["status"] == "completed"
    assert run.summary["optimizer_steps"] == 6
    [board] = Board.boards
    assert board.calls[-1][0] == method
    assert "1 s" in run.summary["tracker_failures"]["board"]
    assert len(notes) == 1
    assert run.assembly.left_running, "its thread is left behind"


@pytest.mark.slow
def test_nobody_waits_for_a_slow_tracker(play: Any, released: threading.Event) -> None:
    """Training continues while the tracker's first call hangs."""
    Board.misbehave = hanging("start", released)
    passed: list[int] = []

    class Observer:
        @hookimpl
        def on_batch_end(self, step: int) -> None:
            [board] = Board.boards
            passed.append(len(board.calls))

    play(observers=Observer())
    assert passed == [1] * 6


@pytest.mark.slow
def test_a_failed_run_tells_its_tracker_so(play: Any) -> None:
    def break_it(assembly: Parts) -> None:
        async def update(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("out of memory")

        assembly.backend.update_policy = update  # type: ignore[method-assign]

    run, _ = play(prepare=break_it)
    assert isinstance(run.error, RuntimeError)
    [board] = Board.boards
    assert board.calls[-1] == ("finish", "failed")


@pytest.mark.slow
def test_a_resumed_run_repeats_the_steps_after_its_checkpoint(play: Any, tmp_path: Path) -> None:
    every_two = "training.checkpoint_every_steps=2"

    def prepare(assembly: Parts) -> None:
        original = assembly.backend.update_policy
        calls = 0

        async def update(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise ConnectionError("killed")
            return await original(*arguments, **options)

        assembly.backend.update_policy = update  # type: ignore[method-assign]

    first, _ = play(every_two, prepare=prepare)
    assert isinstance(first.error, ConnectionError)
    play_again, _ = play(every_two, resume=True)
    before, after = Board.boards
    assert before.steps() == [1, 2, 3]
    assert after.steps() == [3, 4, 5, 6]
    assert before.calls[0][2] == after.calls[0][2] == str(play_again.path)


@pytest.mark.slow
@pytest.mark.parametrize("steps_again", [100, 2])
def test_the_last_steps_before_the_checkpoint_of_a_killed_launch_are_logged_again(
    play: Any, monkeypatch: pytest.MonkeyPatch, steps_again: int
) -> None:
    options = (
        "training.checkpoint_every_steps=4",
        "training.validate_every_steps=2",
        "training.answers_table_every_steps=4",
    )
    first, _ = play(*options)
    shutil.rmtree(first.path / "checkpoints" / "step-000006")
    (first.path / "summary.json").unlink()  # as after a kill
    monkeypatch.setattr(logging_again, "STEPS", steps_again)
    play(*options, resume=True)
    before, after = ([call for call in board.calls if "log" in call[0]] for board in Board.boards)
    first_step = 5 - min(4, steps_again)
    again = [call for call in before if steps_again == 100 or first_step <= (call[1] if call[0] == "log" else call[2])]
    count = next(number for number, call in enumerate(after) if call[1] == 5)
    assert after[:count] == again[:count]
    assert after[count - 1][1] == 4
    assert Board.boards[1].steps() == list(range(first_step, 7))


@pytest.mark.slow
def test_a_tracker_may_keep_its_files_in_the_run_folder(play: Any) -> None:
    def keep(method: str) -> None:
        if method == "start":
            folder = Path(Board.boards[-1].calls[0][2]) / "trackers"
            folder.mkdir(exist_ok=True)
            (folder / "board.json").write_text(json.dumps({"id": len(Board.boards)}))

    Board.misbehave = keep
    play()
    resumed, _ = play("training.steps=6", resume=True)
    assert (resumed.path / "trackers" / "board.json").exists()


@pytest.mark.slow
def test_secrets_reach_a_tracker_masked(play: Any) -> None:
    play('board.key="sk-very-secret"')
    [board] = Board.boards
    assert board.config.key.get_secret_value() == "sk-very-secret", "its own section it has as it is"
    assert board.calls[0][1]["board"]["key"] == "**********"
    assert "sk-very-secret" not in str(board.calls)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit("no licence"), "SystemExit: no licence; fix it"),
        (OSError("no access"), "OSError: no access; fix it, or remove it from training.trackers"),
    ],
    ids=["exit", "error"],
)
def test_a_tracker_that_cannot_be_constructed_ends_the_run_before_it_begins(
    plugins: PluginManager, released: threading.Event, error: BaseException, says: str
) -> None:
    Board.misbehave = raising("construct", error)
    with pytest.raises(PluginError) as caught:
        assembled(plugins, '["board"]')
    assert says in str(caught.value)
    assert caught.value.__cause__ is error


def test_what_a_constructor_says_about_the_run_file_is_said_as_it_is(
    plugins: PluginManager, released: threading.Event
) -> None:
    Board.misbehave = raising("construct", ConfigError("board.colour: there is no paint"))
    with pytest.raises(ConfigError, match=r"^board\.colour: there is no paint$"):
        assembled(plugins, '["board"]')


def test_a_tracker_that_cannot_be_imported_or_is_named_twice_is_an_error_at_the_start(
    plugins: PluginManager, released: threading.Event
) -> None:
    with pytest.raises(PluginError, match="rllm_nowhere"):
        assembled(plugins, '["gone"]')
    with pytest.raises(ConfigError, match=r"training\.trackers names 'board' twice"):
        assembled(plugins, '["board", "board"]')


def assembled(plugins: PluginManager, names: str) -> None:
    if "boards" not in {info.name for info in plugins.plugins()}:
        plugins.register(Plugin(), "boards")
    config = load_run_config("say_yes", plugins, overrides=[f"training.trackers={names}"], backend="scripted")
    assemble(config, plugins)


# --------------------------------------------------------------------------------------------------------------------
# `Trackers` in isolation


class Slow(Tracker):
    name = "slow"

    def __init__(self, released: threading.Event) -> None:
        super().__init__()
        self.released = released
        self.logged: list[dict[str, float]] = []

    def start(self, config: RunConfig, run_dir: str) -> None:
        self.released.wait(HANGS_SECONDS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append(dict(metrics))

    def finish(self, status: Status) -> None:
        pass


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_tracker_far_behind_is_switched_off_and_its_calls_are_dropped(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "MAX_WAITING_CALLS", 10)
    notes: list[str] = []
    slow, other = Slow(released), Slow(threading.Event())
    other.released.set()
    trackers = Trackers({"slow": slow, "other": other}, note=notes.append)
    trackers.start(RunConfig(workflow="say_yes"), "runs/x")
    for step in range(20):
        trackers.log(step, {"step": float(step)})
        wait_until(lambda logged=step + 1: len(other.logged) == logged)
    assert trackers.failed == {"slow": "it is 10 calls behind"}
    assert trackers.hung == ["slow"]
    released.set()
    asyncio.run(trackers.finish("completed"))
    assert slow.logged == []
    assert len(other.logged) == 20
    assert len(notes) == 1


def test_each_tracker_gets_metrics_of_its_own_that_do_not_change(released: threading.Event) -> None:
    slow = Slow(released)
    trackers = Trackers({"slow": slow})
    trackers.start(RunConfig(workflow="say_yes"), "runs/x")
    metrics = {"a": 1.0}
    trackers.log(1, metrics)
    metrics["a"] = 2.0
    released.set()
    asyncio.run(trackers.finish("completed"))
    assert slow.logged == [{"a": 1.0}]


def test_a_call_that_overruns_is_noticed_at_the_next_one(released: threading.Event) -> None:
    slow = Slow(released)
    trackers = Trackers({"slow": slow}, note=lambda text: None, deadline_seconds=0.01)
    trackers.start(RunConfig(workflow="say_yes"), "runs/x")

    def is_noticed() -> bool:
        trackers.log(1, {})
        return bool(trackers.failed)

    wait_until(is_noticed)
    assert trackers.failed == {"slow": "a call took longer than 0.01 s"}
    released.set()
    asyncio.run(trackers.finish("completed"))
    assert slow.logged == []


def test_a_run_that_never_began_calls_nobody(released: threading.Event) -> None:
    trackers = Trackers({"slow": Slow(released)})
    asyncio.run(trackers.finish("failed"))
    assert trackers.failed == {}
