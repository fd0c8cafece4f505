"""The sandbox that is always there, and is none: a fresh interpreter with a clock and limits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from rllm_core.sandbox import processes
from rllm_core.sandbox.contract import CodeResult, Limits, Outcome, Sandbox

AT_ONCE = max(4, os.cpu_count() or 1)


class ChildSandbox(Sandbox):
    """A fresh Python in an empty folder, without this process' variables, killed with all its children at the end.

    It keeps a runaway program from stopping a run. It does not keep a hostile one from this user's files, processes and
    network: use it for code whose worst is a mistake, and a real sandbox for the rest.

    Args:
        at_once: Programs that run at the same time; more of them wait.
    """

    name: ClassVar[str] = "child"
    isolates: ClassVar[bool] = False

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="sandbox")

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """See `Sandbox.run_python`; a call that is cancelled leaves its program to its wall clock."""
        chosen = limits or Limits()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, source, stdin, chosen)

    async def close(self) -> None:
        """Wait for no program; those that run end by their clocks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _run(source: str, stdin: str, limits: Limits) -> CodeResult:
        with tempfile.TemporaryDirectory(prefix="rllm-program-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "main.py")
            file.write_bytes(source.encode("utf-8", "surrogatepass"))
            started = time.monotonic()
            arguments = ["program", str(file), str(limits.memory_bytes), str(limits.output_bytes)]
            process = processes.start([*arguments, str(limits.wall_seconds)], folder=folder)
            outcome: Outcome = "finished"
            try:
                with processes.Exchange(process, started + limits.wall_seconds) as exchange:
                    exchange.send(stdin.encode("utf-8", "surrogatepass"), then_close=True)
                    try:
                        while exchange.step():
                            if len(exchange.output) + len(exchange.errors) > limits.output_bytes:
                                outcome = "output_limit"
                                break
                        else:
                            process.wait(max(0.0, started + limits.wall_seconds - time.monotonic()))
                    except (processes.Overrun, subprocess.TimeoutExpired):
                        outcome = "timeout"
                    exit_code = process.poll()
            finally:
                processes.end(process)
            seconds = time.monotonic() - started
        if outcome == "finished" and exit_code is not None and exit_code < 0:
            outcome = "killed"
        return CodeResult(
            outcome=outcome,
            exit_code=exit_code if outcome == "finished" else None,
            stdout=exchange.output[: limits.output_bytes].decode("utf-8", "replace"),
            stderr=exchange.errors[: limits.output_bytes].decode("utf-8", "replace"),
            wall_seconds=seconds,
        )
