"""Import one plugin in a process of its own, with a deadline, and report on its health.

What a plugin does at import (loop for ever, end the process, crash, print, import torch) happens to the child.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllm_core.cli import CORE_COMMANDS
from rllm_core.discovery import Settings, installed_plugins
from rllm_core.plugins import PluginInfo, PluginManager
from rllm_core.providers import KINDS

MAX_CHILDREN = 4

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
    """

    plugin: PluginInfo
    hooks: tuple[str, ...] = ()
    provides: tuple[dict[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    load_seconds: float | None = None


def probe_all(plugins: Sequence[PluginInfo], deadline_seconds: float) -> list[Health]:
    """Import every ``available`` plugin in a child process, a few at a time; the others are passed through."""
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(min(MAX_CHILDREN, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(lambda plugin: _probe(plugin, deadline_seconds, running), plugins))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(running):
                _end(child)  # Ctrl-C does not reach them: each leads a session of its own
            raise


def _probe(plugin: PluginInfo, deadline_seconds: float, running: set[subprocess.Popen[bytes]]) -> Health:
    if plugin.status != "available":
        return Health(plugin)
    with tempfile.TemporaryDirectory(prefix="rllm-probe-") as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        # Output goes to a file: a grandchild that keeps a pipe open would make us wait for it.
        with output.open("wb") as sink:
            child = subprocess.Popen(
                # -P: a torch.py in the current folder is not the plugin's torch.
                [sys.executable, "-P", "-m", __name__, plugin.package, plugin.name, plugin.value, str(report)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.add(child)
            try:
                code = child.wait(deadline_seconds)
            except subprocess.TimeoutExpired:
                return Health(_broken(plugin, f"its import did not end within {deadline_seconds:g} s"))
            finally:
                running.discard(child)
                _end(child)
        if not report.exists():
            last = output.read_text(errors="replace").strip().rpartition("\n")[2]
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Health(_broken(plugin, f"its import ended the process ({how})" + (f": {last:.200}" if last else "")))
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return Health(
        replace(plugin, status=found["status"], error=found["error"]),
        tuple(found["hooks"]),
        tuple(found["provides"]),
        tuple(found["warnings"]),
        found["load_seconds"],
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left of its process group
    child.wait()


def _broken(plugin: PluginInfo, error: str) -> PluginInfo:
    return replace(plugin, status="broken", error=error)


def _examine(package: str, name: str, value: str) -> dict[str, Any]:
    """The child's half: load exactly one plugin and describe it."""
    chosen = [c for c in installed_plugins() if (c.package, c.name, c.value) == (package, name, value)]
    before = set(sys.modules)
    start = time.perf_counter()
    manager = PluginManager(chosen, Settings(), reserved_commands=CORE_COMMANDS)
    provides = [
        {"kind": kind.kind, "name": provided.record.name, "summary": provided.record.summary}
        for kind in KINDS
        for provided in manager.providers(kind).values()
        if provided.plugin.name == name
    ]
    seconds = time.perf_counter() - start
    [info] = manager.find(f"{package}/{name}")
    warnings = [f"imports {m} when it is loaded" for m in HEAVY_MODULES if m in sys.modules and m not in before]
    return {
        "status": info.status,
        "error": info.error,
        "hooks": manager.hooks(name) if info.status == "loaded" else [],
        "provides": provides,
        "warnings": warnings,
        "load_seconds": round(seconds, 4),
    }


if __name__ == "__main__":
    target = Path(sys.argv[4])
    result = json.dumps(_examine(*sys.argv[1:4]))
    draft = target.with_suffix(".draft")
    draft.write_text(result, encoding="utf-8")
    draft.replace(target)
    # Threads a plugin has started must not keep the child alive.
    os._exit(0)
