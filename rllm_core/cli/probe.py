"""Import one plugin in a process of its own, with a deadline: report on its health, ask its backends what they can do.

What a plugin does at import (loop for ever, end the process, crash, print, import torch) happens to the child.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rllm_core.blame import Place, blamed, place_in
from rllm_core.cli import CORE_COMMANDS
from rllm_core.discovery import Settings, installed_plugins
from rllm_core.errors import ConfigError, PluginError
from rllm_core.loading import DECLARED_API_VERSION
from rllm_core.plugins import PluginInfo, PluginManager, Provided
from rllm_core.providers import KINDS, Backend
from rllm_core.sandbox.worker import die_with_parent
from rllm_core.witness import STANDARD_ERROR

ASKED_WHERE_ANSWER = "(most recent call first):"
RAISED = "raised"
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_CHILDREN = 4
ASKED_WHERE = signal.SIGUSR1
LATEST_ANSWER_SECONDS = 1.0

# Modules that take seconds to import: a plugin may need them, its entry module must not.
HEAVY_MODULES = (
    "datasets",
    "jax",
    "megatron",
    "pandas",
    "ray",
    "scipy",
    "sglang",
    "sklearn",
    "tensorflow",
    "tinker",
    "torch",
    "transformers",
    "verl",
    "vllm",
)


@dataclass(frozen=True)
class Health:
    """What importing a plugin showed.

    Attributes:
        plugin: The plugin, with status ``loaded`` or ``broken``.
        hooks: Hooks it implements.
        provides: ``{"kind", "name", "summary"}`` of each provider.
        warnings: What is bad about it though it works.
        load_seconds: How long its import took; None if it never ended.
        api_version: Version of the plugin API that it says it was written for.
        changed: What it changes, when it is loaded, that everybody in the process shares.
        trace: The traceback of what broke it.
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
    """Why a child reports nothing.

    Attributes:
        place: Where it was by then.
    """

    place: Place | None = None


@dataclass(frozen=True)
class Asked:
    """What a backend said of itself.

    Attributes:
        status: ``loaded``, or ``broken`` if it could not be asked.
        declared: Its `rllm_core.backend.Capabilities` as JSON, or None.
        error: Why there are none.
    """

    status: str
    declared: dict[str, Any] | None
    error: str | None


def probe_all(plugins: Sequence[PluginInfo], deadline_seconds: float) -> list[Health]:
    """Import every ``available`` plugin in a child process, a few at a time; the others are passed through."""
    return in_children(lambda plugin, running: _probe(plugin, deadline_seconds, running), plugins)


def ask_backends(backends: Sequence[Provided[Backend]], deadline_seconds: float) -> list[Asked]:
    """Import every backend's class in a child process, a few at a time, and ask what it can do by default."""
    return in_children(lambda provided, running: _ask(provided, deadline_seconds, running), backends)


def in_children(
    probe: Callable[[ItemT, set[subprocess.Popen[bytes]]], ResultT], items: Sequence[ItemT]
) -> list[ResultT]:
    """What ``probe`` finds out about each item, a few at a time; what it has `running` ends with a Ctrl-C."""
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(min(MAX_CHILDREN, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(lambda item: probe(item, running), items))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(running):
                _end(child)  # Ctrl-C does not reach them: each leads a session of its own
            raise


def _probe(plugin: PluginInfo, deadline_seconds: float, running: set[subprocess.Popen[bytes]]) -> Health:
    if plugin.status != "available":
        return Health(plugin)
    found = run_child([plugin.package, plugin.name, plugin.value], deadline_seconds, running)
    if isinstance(found, str):
        place = found.place or Place("", 0, "", plugin.name, plugin.package, plugin.version)
        return Health(replace(plugin, status="broken", error=found, failure=place.to_json(str(found))))
    return Health(
        replace(plugin, status=found["status"], error=found["error"], failure=found["failure"]),
        tuple(found["hooks"]),
        tuple(found["provides"]),
        tuple(found["warnings"]),
        found["load_seconds"],
        found["api_version"],
        tuple(found["changed"]),
        found["trace"],
    )


def _ask(provided: Provided[Backend], deadline_seconds: float, running: set[subprocess.Popen[bytes]]) -> Asked:
    plugin = provided.plugin
    arguments = [plugin.package, plugin.name, plugin.value, provided.record.name]
    found = run_child(arguments, deadline_seconds, running)
    return Asked("broken", None, found) if isinstance(found, str) else Asked(**found)


def run_child(
    arguments: Sequence[str],
    deadline_seconds: float,
    running: set[subprocess.Popen[bytes]],
    *,
    module: str = __name__,
    what: str = "its import",
) -> dict[str, Any] | NoReport:
    """What a module reports when it is run with ``arguments`` in a process of its own, or why it reports nothing.

    Args:
        arguments: After the path of its report, which it writes with `report`.
        deadline_seconds: When the process is ended, with all that it has started.
        running: Holds the process meanwhile.
        module: What is run.
        what: What it does, for the reason.
    """
    with tempfile.TemporaryDirectory(prefix="rllm-probe-") as folder:
        target, output = Path(folder, "report.json"), Path(folder, "output")
        # Output goes to a file: a grandchild that keeps a pipe open would make us wait for it.
        with output.open("wb") as sink:
            child = subprocess.Popen(
                # -P: a torch.py in the current folder is not the plugin's torch.
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


def _no_report(what: str, place: Place | None, said: str = "") -> NoReport:
    where = f"; it was in {place.function} ({place.where})" if place is not None else ""
    reason = NoReport(f"{what}{where}" + (f": {said}" if said else ""))
    reason.place = place
    return reason


def _stuck_at(child: subprocess.Popen[bytes], output: Path) -> Place | None:
    """Where the main thread of a process is that uses `report`, if it says so in time."""
    child.send_signal(ASKED_WHERE)
    latest = time.monotonic() + LATEST_ANSWER_SECONDS
    while time.monotonic() < latest:
        text = output.read_text(errors="replace")
        if ASKED_WHERE_ANSWER in text and text.endswith("\n"):
            return place_in(text)
        time.sleep(0.02)
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left of its process group
    child.wait()


def _only(package: str, name: str, value: str) -> PluginManager:
    """Exactly one plugin, beside the core."""
    chosen = [c for c in installed_plugins() if (c.package, c.name, c.value) == (package, name, value)]
    return PluginManager(chosen, Settings(), reserved_commands=CORE_COMMANDS)


def _examine(package: str, name: str, value: str) -> dict[str, Any]:
    """The child's half of `probe_all`: load the plugin and describe it."""
    before = set(sys.modules)
    start = time.perf_counter()
    manager = _only(package, name, value)
    provides = [
        {"kind": kind.kind, "name": provided.record.name, "summary": provided.record.summary}
        for kind in KINDS
        for provided in manager.providers(kind).values()
        if provided.plugin.name == name
    ]
    seconds = time.perf_counter() - start
    [info] = manager.find(f"{package}/{name}")
    warnings = [f"imports {m} when it is loaded" for m in HEAVY_MODULES if m in sys.modules and m not in before]
    declared = None
    if info.status == "loaded":
        [chosen] = [c for c in installed_plugins() if (c.package, c.name, c.value) == (package, name, value)]
        assert chosen.entry_point is not None
        declared = getattr(chosen.entry_point.load(), DECLARED_API_VERSION, None)
    return {
        "status": info.status,
        "error": info.error,
        "hooks": manager.hooks(name) if info.status == "loaded" else [],
        "provides": provides,
        "warnings": warnings,
        "load_seconds": round(seconds, 4),
        "api_version": declared,
        "failure": info.failure,
        "changed": manager.changed(name),
        "trace": manager.trace(name),
    }


def _declared(package: str, name: str, value: str, backend: str) -> dict[str, Any]:
    """The child's half of `ask_backends`: load the backend's class and ask it."""
    from rllm_core.algorithms.support import default_capabilities

    manager = _only(package, name, value)
    try:
        capabilities = default_capabilities(manager.select(Backend, backend), manager)
    except ConfigError as error:  # it cannot be asked without settings, which is no fault
        return asdict(Asked("loaded", None, str(error)))
    except PluginError as error:
        return asdict(Asked("broken", None, str(error)))
    declared = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in asdict(capabilities).items()}
    return asdict(Asked("loaded", declared, None))


def report(target: str, find: Callable[[], dict[str, Any]]) -> NoReturn:
    """The child's half of `run_child`: write what ``find`` returns, and end.

    Args:
        target: Path of the report.
        find: What it raises is reported instead.
    """
    die_with_parent()  # what spins in here would go on for ever
    faulthandler.enable(STANDARD_ERROR, all_threads=False)
    faulthandler.register(ASKED_WHERE, all_threads=False)
    try:
        found = json.dumps(find())
    except Exception as error:  # a check that fails over a plugin is a finding, too
        found = json.dumps({RAISED: blamed(error)})
    draft = Path(target).with_suffix(".draft")
    draft.write_text(found, encoding="utf-8")
    draft.replace(target)
    # Threads a plugin has started must not keep the child alive.
    os._exit(0)


if __name__ == "__main__":
    path, *asked = sys.argv[1:]
    report(path, lambda: _declared(*asked) if len(asked) > 3 else _examine(*asked))
