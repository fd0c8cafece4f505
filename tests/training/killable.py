"""Runs scripted trainings in forked children that are killed at a chosen moment; one JSON request per line on stdin.

A process of its own, which has imported everything and started no thread, so that a run costs a fork and not a start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import rllm_core.testing.plugin
from rllm_core.config import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.testing import scripted
from rllm_core.testing.disk import InterceptedDisk
from rllm_core.training import launch
from rllm_core.training.journal import JsonLines
from rllm_core.training.progress import Progress

MAX_LATENCY_SECONDS = 0.001


def main() -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_core.testing.plugin, "testing")
    launch.report.plot_reward = lambda path: path  # type: ignore[assignment]  # takes longer than such a run
    scripted.ScriptedBackend.script.latency_seconds = lambda generator: generator.uniform(0, MAX_LATENCY_SECONDS)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            train(request, plugins)
        if request.get("seconds") is not None:
            time.sleep(request["seconds"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def train(request: dict[str, Any], plugins: PluginManager) -> NoReturn:
    code = 1
    try:
        config = load_run_config("say_yes", plugins, overrides=request["overrides"], backend=request["backend"])
        assembly = launch.assemble(config, plugins)
        run_dir = Path(request["run_dir"])
        with InterceptedDisk(run_dir, killer(request.get("operations"))):
            count_lines(killer(request.get("lines")))
            asyncio.run(launch.train(assembly, run_dir, resume=request["resume"], progress=Progress()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def killer(after: int | None) -> Any:
    """A function whose call number ``after`` kills this process."""
    calls = 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)

    return called


def count_lines(before: Any) -> None:
    original = JsonLines.write_text

    def write_text(self: JsonLines, line: str) -> None:
        before()
        original(self, line)

    JsonLines.write_text = write_text  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
