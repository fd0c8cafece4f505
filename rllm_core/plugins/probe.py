"""Imports a plugin in a child process with a timeout, and reports its providers and problems.

An import that hangs, exits, crashes, prints or imports torch affects only the child process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rllm_core.plugins.blame import CodePlace, blamed, place_in
from rllm_core.plugins.discovery import installed_plugins
from rllm_core.plugins.listing import PluginInfo
from rllm_core.plugins.loading import DECLARED_API_VERSION
from rllm_core.plugins.manager import PluginManager
from rllm_core.plugins.settings import Settings
from rllm_core.plugins.watch import STANDARD_ERROR
from rllm_core.providers import KINDS, resolve
from rllm_core.sandbox.in_child import die_with_parent

ASKED_WHERE_ANSWER = "(most recent call first):"
LAST_LINES = ("in _run_module_as_main\n", "  ...\n")  # the second of a deep stack; lines are written one by one
RAISED = "raised"
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_CHILDREN = 4
ASKED_WHERE = signal.SIGUSR1
LATEST_ANSWER_SECONDS = 1.0

# Modules that take seconds to import. A plugin may need them, but its entry module must not import them.
HEAVY_MODULES = (
    "datasets", "jax", "megatron", "pandas", "ray", "scipy", "sglang", "sklearn", "tensorflow", "tinker", "torch",
    "transformers", "verl", "vllm",
)  # fmt: skip


@dataclass(frozen=True)
class Health:
    """Result of importing a plugin.

    Attributes:
        plugin: The plugin, with status ``loaded`` or ``broken``.
        provides: ``{"kind", "name", "summary"}`` of each provider.
        warnings: Problems that do not break it.
        load_seconds: Duration of the plugin's import; None if the import never ended.
        api_version: Version of the plugin API that it declares.
        changed: Process-wide state that it changes when it is loaded.
        trace: Traceback of the error that broke it.
    """

    plugin: PluginInfo
    hooks: tuple[str, ...] = ()
    provides: tuple[dict[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    load_seconds: float | None = None
    api_version: str | None = None
    changed: tuple[str, ...] = ()
    trace: str | None = None


class NoReport(str):
    """Reason why a child process wrote no report.

    Attributes:
        place: Code that the child was running.
    """

    place: CodePlace | None = None


def probe_all(plugins: Sequence[PluginInfo], deadline_seconds: float, commands: Collection[str]) -> list[Health]:
    """Imports every ``available`` plugin in a child process, a few at a time; passes the others through.

    Args:
        plugins: Plugins to import.
        deadline_seconds: Timeout of one import.
        commands: Command names that plugins must not use.
    """
    return in_children(lambda plugin, running: _probe(plugin, deadline_seconds, commands, running), plugins)


def in_children(
    probe: Callable[[ItemT, set[subprocess.Popen[bytes]]], ResultT], items: Sequence[ItemT]
) -> list[ResultT]:
    """Runs ``probe`` on each item, a few at a time; Ctrl-C ends the processes in `running`."""
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(min(MAX_CHILDREN, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(lambda item: probe(item, running), items))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(running):
                _end(child)  # Ctrl-C does not reach them: each has its own session
            raise


def _probe(
    plugin: PluginInfo, deadline_seconds: float, commands: Collection[str], running: set[subprocess.Popen[bytes]]
) -> Health:
    if plugin.status != "available":
        return Health(plugin)
    arguments = [plugin.package, plugin.name, plugin.value, *commands]
    found = run_child(arguments, deadline_seconds, running)
    if isinstance(found, str):
        place = found.place or CodePlace("", 0, "", plugin.name, plugin.package, plugin.version)
        return Health(replace(plugin, status="broken", error=found, failure=place.to_json(str(found))))
    lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    return Health(**{**found, **lists, "plugin": PluginInfo(**found["plugin"])})


def run_child(
    arguments: Sequence[str],
    deadline_seconds: float,
    running: set[subprocess.Popen[bytes]],
    *,
    module: str = __name__,
    what: str = "its import",
) -> dict[str, Any] | NoReport:
    """Runs a module in a child process and returns its report, or the reason why there is none.

    Args:
        arguments: Arguments after the path of the report; the module must write the report with `report`.
        deadline_seconds: Timeout after which the process and its children are killed.
        running: Set that contains the process while it runs.
        module: Module to run.
        what: Grammatical subject of the reason, such as "its import".
    """
    with tempfile.TemporaryDirectory(prefix="rllm-probe-") as folder:
        target, output = Path(folder, "report.json"), Path(folder, "output")
        # Output goes to a file: a grandchild that keeps a pipe open would block this process.
        with output.open("wb") as sink:
            child = subprocess.Popen(
                # -P: ignore modules in the current folder, such as a torch.py.
                [sys.executable, "-P", "-m", module, str(target), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.add(child)
            try:
                code = child.wait(deadline_seconds)
            except subprocess.TimeoutExpired:
                return _no_report(f"{what} did not end within {deadline_seconds:g} s", _stuck_at(child, output))
            finally:
                running.discard(child)
                _end(child)
        if not target.exists():
            text = output.read_text(errors="replace")
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            said = text.partition("Fatal Python error:")[0].strip().rpartition("\n")[2]
            return _no_report(f"{what} ended the process ({how})", place_in(text), said[:200])
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        if RAISED in found:
            return NoReport(f"{what} failed: {found[RAISED]}")
    return found


def _no_report(what: str, place: CodePlace | None, said: str = "") -> NoReport:
    where = f"; it was in {place.function} ({place.where})" if place is not None else ""
    reason = NoReport(f"{what}{where}" + (f": {said}" if said else ""))
    reason.place = place
    return reason


def _stuck_at(child: subprocess.Popen[bytes], output: Path) -> CodePlace | None:
    """Asks a process that uses `report` where its main thread is; None if the process does not answer in time."""
    child.send_signal(ASKED_WHERE)
    latest, text = time.monotonic() + LATEST_ANSWER_SECONDS, ""
    while time.monotonic() < latest:
        text = output.read_text(errors="replace")
        if ASKED_WHERE_ANSWER in text and text.endswith(LAST_LINES):
            break
        time.sleep(0.02)
    return place_in(text) if ASKED_WHERE_ANSWER in text else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and its process group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # its process group is gone
    child.wait()


def only(package: str, name: str, value: str, commands: Collection[str]) -> PluginManager:
    """Returns a manager with one installed plugin and the core, for a child process."""
    chosen = [c for c in installed_plugins() if (c.package, c.name, c.value) == (package, name, value)]
    return PluginManager(chosen, Settings(), reserved_commands=commands)


def _examine(package: str, name: str, value: str, *commands: str) -> dict[str, Any]:
    """Runs in the child process: loads the plugin and describes it as `Health` does."""
    before, start = set(sys.modules), time.perf_counter()
    manager = only(package, name, value, commands)
    provides = [
        {"kind": kind.kind, "name": provided.record.name, "summary": provided.record.summary}
        for kind in KINDS
        for provided in manager.providers(kind).values()
        if provided.plugin.name == name
    ]
    seconds = time.perf_counter() - start
    [info] = manager.find(f"{package}/{name}")
    is_loaded = info.status == "loaded"
    return {
        "plugin": info.to_json(),
        "hooks": manager.hooks(name) if is_loaded else [],
        "provides": provides,
        "warnings": [f"imports {m} when it is loaded" for m in HEAVY_MODULES if m in sys.modules and m not in before],
        "load_seconds": round(seconds, 4),
        "api_version": getattr(resolve(value), DECLARED_API_VERSION, None) if is_loaded else None,
        "changed": manager.changed(name),
        "trace": manager.trace(name),
    }


def report(target: str, find: Callable[[], dict[str, Any]]) -> NoReturn:
    """Runs in the child process of `run_child`: writes the result of ``find`` and exits.

    Args:
        target: Path of the report.
        find: Function to call; if it raises, the error is reported instead.
    """
    die_with_parent()  # an endless loop in a plugin would outlive the parent
    faulthandler.enable(STANDARD_ERROR, all_threads=False)
    faulthandler.register(ASKED_WHERE, all_threads=False)
    try:
        found = json.dumps(find())
    except Exception as error:  # an error raised by a plugin is a finding, too
        found = json.dumps({RAISED: blamed(error)})
    draft = Path(target).with_suffix(".draft")
    draft.write_text(found, encoding="utf-8")
    draft.replace(target)
    # Exit at once: threads that a plugin has started must not keep the child alive.
    os._exit(0)


if __name__ == "__main__":
    path, *asked = sys.argv[1:]
    report(path, lambda: _examine(*asked))
