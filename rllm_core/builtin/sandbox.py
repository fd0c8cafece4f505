"""Default sandbox: a fresh interpreter with time, memory and output limits, but no isolation."""

from __future__ import annotations

import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import rllm_core.sandbox.processes as processes
from rllm_core.sandbox.contract import Sandbox
from rllm_core.sandbox.programs import result_of
from rllm_core.sandbox.results import CodeResult, Limits

AT_ONCE = max(4, os.cpu_count() or 1)


class ChildSandbox(Sandbox):
    """Runs programs in a fresh Python process, in an empty folder and without this process's environment variables.

    The process and all its children are killed at the end. A runaway program cannot stop a run. A hostile program can
    still access this user's files, processes and network: use a real sandbox for code you do not trust.

    Args:
        at_once: Maximum number of concurrent programs; further programs wait.
    """

    name: ClassVar[str] = "child"
    isolates: ClassVar[bool] = False

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="sandbox")

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """See `Sandbox.run_python`. The program of a cancelled call runs until its time limit."""
        chosen = limits or Limits()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, source, stdin, chosen)

    async def close(self) -> None:
        """Does not wait for running programs, which end by their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _run(source: str, stdin: str, limits: Limits) -> CodeResult:
        with tempfile.TemporaryDirectory(prefix="rllm-program-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "main.py")
            file.write_bytes(source.encode("utf-8", "surrogatepass"))
            return result_of(processes.start("program", str(file), limits, folder=folder), stdin, limits)
