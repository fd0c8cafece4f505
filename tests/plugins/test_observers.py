"""Tests event hooks: order, deadlines, and that no observer stops a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.observers import Observers
from rllm_core.plugins import PluginManager
from rllm_core.plugins.settings import Settings
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch

Build = Callable[..., PluginManager]


def observers(*plugins: tuple[str, object], deadline_seconds: float = 5.0) -> Observers:
    manager = PluginManager()
    for name, plugin in plugins:
        manager.register(plugin, name)
    return Observers(manager, deadline_seconds=deadline_seconds)


class Recorder:
    """Records the steps it observes."""

    def __init__(self, heard: list[Any], name: str = "") -> None:
        self.heard, self.name = heard, name

    @hookimpl
    def on_batch_end(self, step: int) -> None:
        self.heard.append((self.name, step))


class AsyncRecorder(Recorder):
    @hookimpl
    async def on_batch_end(self, step: int) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.heard.append((self.name, step))


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("observer-")}


async def batch_ends(watching: Observers, *steps: int) -> None:
    for step in steps:
        await watching.notify("on_batch_end", state=None, step=step, metrics={})


def test_observers_are_called_in_the_order_of_plugin_names() -> None:
    heard: list[Any] = []
    watching = observers(
        ("b", AsyncRecorder(heard, "b")),
        ("c", Recorder(heard, "c")),
        ("a", Recorder(heard, "a")),
        ("d", AsyncRecorder(heard, "d")),
    )
    asyncio.run(batch_ends(watching, 1, 2))
    assert heard == [(name, step) for step in (1, 2) for name in "abcd"]


def test_plain_observers_leave_the_loop_free_and_async_ones_run_on_it() -> None:
    threads = {}

    class Where:
        @hookimpl
        def on_batch_end(self) -> None:
            threads["plain"] = threading.current_thread()

        @hookimpl
        async def on_batch_start(self) -> None:
            threads["async"] = threading.current_thread()

    async def run() -> None:
        watching = observers(("where", Where()))
        await watching.notify("on_batch_start", state=None, step=1)
        await batch_ends(watching, 1)

    asyncio.run(run())
    assert threads["async"] is threading.main_thread()
    assert threads["plain"] is not threading.main_thread()
    assert threads["plain"].daemon, "a hanging observer must not keep the process from ending"


def test_failures_are_named_and_counted_and_stop_nobody(manager: Build, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    plugins = manager("rllm-raising")
    plugins.register(Recorder(heard), "z-recorder")
    watching = Observers(plugins)
    asyncio.run(batch_ends(watching, *range(12)))
    assert heard == [("", step) for step in range(12)]
    assert watching.failures == {"a-raising": 12, "a-raising-async": 12, "a-raising-exit": 12}
    assert watching.disabled == set()
    lines = [record.getMessage() for record in caplog.records]
    places = {
        "a-raising": "rllm_raising/__init__.py:8: ValueError: no room for step 0",
        "a-raising-async": "rllm_raising/later.py:8: ValueError: no time for step 0",
        "a-raising-exit": "rllm_raising/exits.py:10: RuntimeError: raised SystemExit: from a thread",
    }
    told = {name: f"on_batch_end failed: plugin {name!r} (rllm-raising 1.0), {what}" for name, what in places.items()}
    assert set(told.values()) <= set(lines)
    assert watching.first_failures == told
    assert len(lines) == 6, "of twelve failures each, the first and the tenth are printed"


def test_an_observer_that_exits_on_the_loop_is_contained(manager: Build) -> None:
    watching = Observers(manager("rllm-raising"))
    asyncio.run(watching.notify("on_batch_start", state=None, step=1))
    assert watching.failures == {"a-raising-exit": 1}


@pytest.mark.parametrize("name", ["slow-sync", "slow-async", "slow-stubborn", "slow-blocking"])
def test_an_observer_that_overruns_is_disabled(manager: Build, name: str, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    plugins = manager("rllm-slow", settings=Settings(only=frozenset({name})))
    plugins.register(Recorder(heard), "z-recorder")
    watching = Observers(plugins, deadline_seconds=3.0)  # that of the recorder, too, which must not be late

    async def run() -> None:
        await batch_ends(watching, 1, 2, 3)
        if name == "slow-stubborn":
            sys.modules["rllm_slow.stubborn"].released.append(True)
            await asyncio.sleep(0.05)

    asyncio.run(run())
    assert heard == [("", 1), ("", 2), ("", 3)]
    assert watching.failures == {name: 1}
    assert watching.disabled == {name}
    assert f"plugin {name!r}: on_batch_end took longer than 3 s" in caplog.text


def test_an_observer_in_a_thread_is_not_late_because_something_else_blocks_the_event_loop() -> None:
    called, heard = threading.Event(), []

    class Quick:
        @hookimpl
        def on_batch_end(self, step: int) -> None:
            called.set()
            heard.append(step)

    watching = observers(("quick", Quick()), deadline_seconds=2.0)

    async def block() -> None:
        called.wait()
        time.sleep(2.5)

    async def run() -> None:
        await asyncio.gather(batch_ends(watching, 1), block())
        await batch_ends(watching, 2)

    asyncio.run(run())
    assert heard == [1, 2]
    assert not watching.disabled


def test_active_says_whether_anybody_listens(manager: Build) -> None:
    watching = Observers(manager("rllm-slow", settings=Settings(only=frozenset({"slow-async"}))), deadline_seconds=0.05)
    assert watching.active("on_batch_end")
    assert not watching.active("on_epoch_start")
    asyncio.run(batch_ends(watching, 1))
    assert not watching.active("on_batch_end"), "the only listener has been disabled"


def test_a_plain_observer_may_return_an_awaitable() -> None:
    heard = []

    class Returns:
        @hookimpl
        def on_batch_end(self, step: int) -> Any:
            async def later() -> None:
                heard.append(step)

            return later()

    asyncio.run(batch_ends(observers(("returns", Returns())), 7))
    assert heard == [7]


def test_an_observer_cannot_change_what_the_next_one_sees() -> None:
    seen = []

    class Vandal:
        @hookimpl
        def on_batch_end(self, metrics: dict[str, float]) -> None:
            metrics["loss"] = -1.0

    class Reader:
        @hookimpl
        def on_batch_end(self, metrics: dict[str, float]) -> None:
            seen.append(metrics["loss"])

    metrics = {"loss": 0.5}
    watching = observers(("a", Vandal()), ("b", Reader()))
    asyncio.run(watching.notify("on_batch_end", state=None, step=1, metrics=metrics))
    assert seen == [0.5]
    assert metrics == {"loss": 0.5}


def test_the_trace_names_every_call_of_an_observer(capsys: pytest.CaptureFixture[str]) -> None:
    manager = PluginManager(settings=Settings(trace=True))
    manager.register(Recorder([]), "recorder")
    asyncio.run(batch_ends(Observers(manager), 1))
    assert "[plugins] on_batch_end -> recorder: " in capsys.readouterr().err


def test_arguments_with_defaults_are_filled() -> None:
    heard = []

    class Defaults:
        @hookimpl
        def on_batch_end(self, step: int = -1, metrics: object = None) -> None:
            heard.append((step, metrics))

    asyncio.run(batch_ends(observers(("defaults", Defaults())), 5))
    assert heard == [(5, {})]


@pytest.mark.slow
def test_a_plugin_is_never_called_twice_at_a_time_and_waiting_is_not_overrunning() -> None:
    running, most = 0, 0

    def enter() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    def leave() -> None:
        nonlocal running
        running -= 1

    class Slowish:
        @hookimpl
        def on_batch_end(self) -> None:
            enter()
            time.sleep(0.3)
            leave()

        @hookimpl
        async def on_batch_start(self) -> None:
            enter()
            await asyncio.sleep(0.3)
            leave()

    watching = observers(("slowish", Slowish()), deadline_seconds=2.5)

    async def run() -> None:
        starts = (watching.notify("on_batch_start", state=None, step=step) for step in range(5))
        ends = (batch_ends(watching, step) for step in range(5))
        await asyncio.gather(*starts, *ends)

    asyncio.run(run())
    assert most == 1
    assert not watching.failures, "ten calls of 0.3 s are within a deadline of 2.5 s each"


def test_cancelling_the_run_cancels_a_waiting_observer() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Waits:
        @hookimpl
        async def on_batch_end(self) -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def run() -> None:
        task = asyncio.create_task(batch_ends(observers(("waits", Waits())), 1))
        assert await asyncio.to_thread(begun.wait, 600)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 50), "at once, and not only when the loop is closed"

    asyncio.run(run())


def test_a_hanging_observer_does_not_keep_the_process(
    installed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import subprocess

    code = (
        "import asyncio\nfrom rllm_core.plugins import PluginManager\nfrom rllm_core.observers import Observers\n"
        "watching = Observers(PluginManager.from_environment(), deadline_seconds=0.1)\n"
        "asyncio.run(watching.notify('on_batch_end', state=None, step=1, metrics={}))\n"
        "print(sorted(watching.disabled))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(installed("rllm-slow")))
    monkeypatch.setenv("RLLM_PLUGINS", "slow-sync")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout == "['slow-sync']\n"
    assert (
        run.stderr == "plugin 'slow-sync': on_batch_end took longer than 0.1 s; "
        "its observers are disabled for the rest of the run\n"
    )


def test_an_event_nobody_hears_starts_nothing_and_an_unknown_one_is_a_bug() -> None:
    before = worker_threads()
    watching = observers()

    async def run() -> None:
        for _ in range(1000):
            await watching.notify("on_episode_finished", state=None, episode=None)
        with pytest.raises(KeyError):
            await watching.notify("on_batch_ended", state=None)

    asyncio.run(run())
    assert worker_threads() == before


def test_an_argument_the_caller_forgot_is_the_callers_error() -> None:
    watching = observers(("r", Recorder([])))
    with pytest.raises(KeyError, match="step"):
        asyncio.run(watching.notify("on_batch_end", state=None, metrics={}))
    assert not watching.failures


def test_the_worker_thread_ends_with_its_observers() -> None:
    before = worker_threads()
    watching = observers(("r", Recorder([])))
    asyncio.run(batch_ends(watching, 1))
    [worker] = worker_threads() - before
    del watching
    worker.join(timeout=600)
    assert not worker.is_alive()


# --------------------------------------------------------------------------------------------------------------------
# Observers change nothing


def rewritten(value: object, seen: set[int] | None = None) -> int:
    """Changes everything below ``value`` that can be changed from outside; returns the number of changes."""
    seen = set() if seen is None else seen
    if id(value) in seen or value is None or isinstance(value, str | int | float | bytes | Path):
        return 0
    seen.add(id(value))
    changed = 0
    if isinstance(value, np.ndarray):
        for array in (value, value.base):
            if isinstance(array, np.ndarray):
                with contextlib.suppress(ValueError):
                    array.setflags(write=True)
                    array[...] = 7
                    changed += 1
        return changed
    if isinstance(value, dict):
        for content in list(value.values()):
            changed += rewritten(content, seen)
        with contextlib.suppress(TypeError):
            value.update(dict.fromkeys(value, 7.0), more=7.0)
            changed += 1
        return changed
    if isinstance(value, list | tuple):
        for content in value:
            changed += rewritten(content, seen)
        if isinstance(value, list):
            with contextlib.suppress(TypeError):
                value.clear()
                changed += 1
        return changed
    fields = dict(getattr(value, "__dict__", {}))
    for name, content in fields.items():
        changed += rewritten(content, seen)
        for given in (77.0, 77, True, "", None):
            with contextlib.suppress(Exception):
                setattr(value, name, given)
                changed += 1
                break
        else:
            vars(value)[name] = 77  # bypasses a frozen class
            changed += 1
    return changed


class Rewriter:
    """Changes every argument of every hook, and counts the changes."""

    def __init__(self) -> None:
        self.changed: Counter[str] = Counter()

    def heard(self, hook: str, **arguments: object) -> None:
        self.changed[hook] += sum(map(rewritten, arguments.values()))

    @hookimpl
    def on_train_start(self, state: object) -> None:
        self.heard("on_train_start", state=state)

    @hookimpl
    async def on_epoch_start(self, state: object, epoch: object) -> None:
        self.heard("on_epoch_start", state=state, epoch=epoch)

    @hookimpl
    def on_batch_start(self, state: object, step: object) -> None:
        self.heard("on_batch_start", state=state, step=step)

    @hookimpl
    def on_batch_end(self, state: object, step: object, metrics: object) -> None:
        self.heard("on_batch_end", state=state, step=step, metrics=metrics)

    @hookimpl
    async def on_validation_end(self, state: object, step: object, metrics: object) -> None:
        self.heard("on_validation_end", state=state, step=step, metrics=metrics)

    @hookimpl
    def on_episode_finished(self, state: object, episode: object) -> None:
        self.heard("on_episode_finished", state=state, episode=episode)

    @hookimpl
    def on_checkpoint_saved(self, state: object, directory: object) -> None:
        self.heard("on_checkpoint_saved", state=state, directory=directory)

    @hookimpl
    def on_policy_updated(self, update: object, state: object) -> None:
        self.heard("on_policy_updated", state=state, update=update)

    @hookimpl
    def save_plugin_state(self, state: object) -> None:
        self.heard("save_plugin_state", state=state)


def everything_of(run_dir: Path) -> dict[str, Any]:
    """Returns everything a run wrote, except times and ids that differ between any two runs."""
    kept: dict[str, Any] = {}
    for name in ("events.jsonl", "metrics.jsonl", "groups.jsonl"):
        text = re.sub(r'"step_id":"\w+"', "", (run_dir / name).read_text(encoding="utf-8")).replace("{,", "{")
        kept[name] = [{k: v for k, v in json.loads(line).items() if k != "time"} for line in text.splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    for amounts in summary["costs"]["by_kind"].values():
        amounts.pop("seconds", None)
    kept["summary.json"] = {key: value for key, value in summary.items() if key not in ("seconds",)}
    return kept


@pytest.mark.slow
def test_an_observer_that_rewrites_everything_it_is_given_changes_nothing(tmp_path: Path) -> None:
    rewriter, heard = Rewriter(), Rewriter()
    runs = {}
    for name, plugins in (("alone", ()), ("watched", (rewriter, heard))):
        manager = PluginManager()
        manager.register(rllm_devkit.scripted_plugin, "testing")
        for number, plugin in enumerate(plugins):
            manager.register(plugin, f"observer-{number}")
        overrides = ["training.steps=3", "training.groups_per_step=2", "training.rollouts_per_group=2",
                     "training.validation_rollouts=2"]  # fmt: skip
        config = load_run_config("say_yes", manager, overrides=overrides, backend="scripted")
        assembly = assemble(config, manager)
        path = tmp_path / name / "run"
        asyncio.run(launch.train(assembly, path, resume=False, progress=Progress()))
        runs[name] = everything_of(path)
    assert runs["watched"] == runs["alone"]
    assert runs["alone"]["events.jsonl"], "there is something to compare"
    # There was much to change, and the second observer received everything unchanged by the first.
    assert all(count > 5 for count in rewriter.changed.values())
    assert rewriter.changed.keys() >= {"on_episode_finished", "on_batch_end", "on_policy_updated", "save_plugin_state"}
    assert rewriter.changed == heard.changed
