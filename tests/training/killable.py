"""Runs scripted trainings in forked children and kills them at a chosen moment; reads one JSON request per line.

A process of its own, warm after a first run and without threads, so that a run costs a fork and not a start.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.journal import JsonLines
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.runs import signals as signals_of_process
from rllm_core.training.stopping import Interrupted
from rllm_devkit import scripted
from rllm_devkit.disk import OPERATIONS
from rllm_devkit.faults import Action, Call, Faults, Proceed, at, returns

MAX_LATENCY_SECONDS = 0.001


def main() -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    scripted.ScriptedBackend.script.latency_seconds = lambda generator: generator.uniform(0, MAX_LATENCY_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        config = load_run_config("say_yes", plugins, overrides=("training.steps=1",), backend="scripted")
        asyncio.run(launch.train(assemble(config, plugins), Path(folder), resume=False, progress=Progress()))
    gc.collect()
    gc.freeze()  # a garbage collection in a child would copy the pages of every imported module
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
        assembly = assemble(config, plugins)
        run_dir = Path(request["run_dir"])
        with planned(request).installed(assembly, run_dir):
            count_lines(killer(request.get("lines")))
            asyncio.run(launch.train(assembly, run_dir, resume=request["resume"], progress=Progress()))
        code = 0
    except Interrupted as interrupted:
        code = interrupted.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def planned(request: dict[str, Any]) -> Faults:
    """Plans a kill before a disk operation, or signals in the middle of a call at a fault-injection point."""
    faults = Faults()
    kill, record = killer(request.get("operations")), request.get("record")

    def chosen(call: Call) -> bool:
        # The loop continues while a thread saves a checkpoint. When it appends lines, and whether the buffer holds
        # anything to write, varies between runs. The order of all other operations is fixed.
        if request.get("writes") not in (None, call.seam == "disk.write"):
            return False
        if record is not None:
            [path] = call.arguments
            with Path(record).open("a") as lines:
                lines.write(f"{call.seam} {path.parent.name}/{path.name}\n")
        return kill()  # type: ignore[no-any-return]

    for operation in OPERATIONS:
        faults.inject(f"disk.{operation}", returns(None), when=chosen)
    signals = request.get("signals")
    if signals is not None:
        signals_of_process.REPEATED_SECONDS = 0.0  # a second signal counts at once
        faults.inject(signals["seam"], sends(signals["names"]), when=at(signals["number"]))
    return faults


def sends(names: list[str]) -> Action:
    async def action(call: Call, proceed: Proceed) -> Any:
        for name in names:
            os.kill(os.getpid(), signal.Signals[name])
        await asyncio.sleep(0.05)
        return await proceed()

    return action


def killer(after: int | None) -> Any:
    """Returns a function that kills this process on call number ``after``."""
    calls = 0

    def called(*_: object) -> bool:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return called


def count_lines(before: Any) -> None:
    original = JsonLines.write_text

    def write_text(self: JsonLines, line: str) -> None:
        for _ in line.splitlines():  # some are written at once
            before()
        original(self, line)

    JsonLines.write_text = write_text  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
