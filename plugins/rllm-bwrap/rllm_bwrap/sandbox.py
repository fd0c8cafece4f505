"""Sandbox ``bwrap``: a container for each program, without network, other files or processes, and without root."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rllm_bwrap import inside
from rllm_bwrap.interpreters import Interpreter
from rllm_bwrap.jail import Jail
from rllm_bwrap.syscalls import blocklist
from rllm_core.errors import ConfigError
from rllm_core.sandbox import ChildFunction, CodeResult, Limits, Sandbox, SandboxedFunction, result_of

PASSED_VARIABLES = ("PYTHONPATH",)
# Same seed as the core's child processes: a function that iterates over a set returns the same there and here.
HASH_SEED = "0"
AT_ONCE = max(4, os.cpu_count() or 1)
PROCESSES = 32
DISK_BYTES = 64 << 20
SIGNALS = 64

# Must run into the limit and print so. With a limit of one process, nothing could start where the user's other
# processes count.
PROBE = """
import os, time
started = 0
try:
    for _ in range(16):
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        started += 1
except BlockingIOError:
    print("limited")
"""
PROBE_PROCESSES = 4
PROBE_LIMITS = Limits(wall_seconds=30.0)


class BwrapSandbox(Sandbox):
    """Runs programs in bubblewrap's namespaces: alone, without network, with only an interpreter and a folder.

    Args:
        python: Path of the Python interpreter for programs and functions. Defaults to that of this process.
        processes: Maximum number of concurrent processes and threads of a program or call.
        disk_bytes: Maximum number of bytes they may write, which are kept in memory.
        at_once: Maximum number of concurrent programs, and of concurrent calls of a function; others wait.

    Raises:
        ConfigError: If bubblewrap is missing on this machine, or cannot isolate programs here.
    """

    name: ClassVar[str] = "bwrap"
    isolates: ClassVar[bool] = True

    def __init__(
        self,
        python: str | None = None,
        *,
        processes: int = PROCESSES,
        disk_bytes: int = DISK_BYTES,
        at_once: int = AT_ONCE,
    ) -> None:
        problem = self.unavailable()
        if problem is not None:
            raise ConfigError(f"sandbox {self.name!r} does not work on this machine: {problem}")
        self._jail = _jail(python or sys.executable, processes, disk_bytes)
        self._at_once = at_once
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="bwrap")
        self._functions: dict[tuple[str, Limits], ChildFunction] = {}

    @classmethod
    def unavailable(cls) -> str | None:
        """See `Sandbox.unavailable`. Runs a program on the first call."""
        return _problem(_found())

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """See `Sandbox.run_python`. The program of a cancelled call runs until its time limit."""
        chosen = limits or Limits()
        return await asyncio.get_running_loop().run_in_executor(self._threads, _run, self._jail, source, stdin, chosen)

    def function(self, path: str, limits: Limits | None = None) -> SandboxedFunction:
        """See `Sandbox.function`. Each call runs in a fork of a process that has imported the function."""
        chosen = limits or Limits()
        found = self._functions.get((path, chosen))
        if found is None:
            start = functools.partial(self._jail.start, ["function", path], chosen)
            found = ChildFunction(path, chosen, children=self._at_once, start=start)
            self._functions[path, chosen] = found
        return found

    async def close(self) -> None:
        """Ends all functions. Does not wait for running programs, which end at their time limits."""
        for function in self._functions.values():
            function.close()
        self._functions.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _found() -> str | None:
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


def _jail(python: str, processes: int, disk_bytes: int) -> Jail:
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return Jail(
        bwrap=_found() or "bwrap",
        interpreter=Interpreter.at(python, {**passed, "PATH": os.environ.get("PATH", "")}),
        variables={
            **passed,
            "HOME": inside.FOLDER,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONHASHSEED": HASH_SEED,
            "TMPDIR": inside.FOLDER,
        },
        blocklist=blocklist(),
        processes=processes,
        disk_bytes=disk_bytes,
    )


def _run(jail: Jail, source: str, stdin: str, limits: Limits) -> CodeResult:
    started, says_started = os.pipe()
    file = os.memfd_create("program")
    try:
        with os.fdopen(os.dup(file), "wb") as writing:
            writing.write(source.encode("utf-8", "surrogatepass"))
        os.lseek(file, 0, os.SEEK_SET)
        process = jail.start(["program"], limits, (says_started, file))
        os.close(says_started)
        says_started = -1
        result = result_of(process, stdin, limits)
        has_started = bool(os.read(started, 1))
    finally:
        for descriptor in (started, says_started, file):
            if descriptor >= 0:
                os.close(descriptor)
    if result.exit_code is None:
        return result
    if not has_started:
        raise OSError(f"bwrap did not start a program: {_last_line(result.stderr)}")
    if 128 < result.exit_code <= 128 + SIGNALS:  # bwrap reports a signal this way
        return replace(result, outcome="killed", exit_code=None)
    return result


@functools.cache
def _problem(bwrap: str | None) -> str | None:
    """Returns the reason why programs cannot be isolated here, with what to do."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap is for Linux only; run on a machine with Linux"
    if bwrap is None:
        return "there is no program bwrap on the PATH; install bubblewrap (apt install bubblewrap)"
    try:
        tried = _run(_jail(sys.executable, PROBE_PROCESSES, DISK_BYTES), PROBE, "", PROBE_LIMITS)
    except (OSError, ValueError) as error:
        return (
            f"{error}; bubblewrap needs user namespaces, which this machine or its container does not allow: set "
            "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 with sysctl, or "
            "start the container with --security-opt seccomp=unconfined"
        )
    if tried.stdout.strip() != "limited":
        return (
            "the number of processes cannot be limited, for which Linux 5.14 is needed, and another user than root: "
            f"{tried.outcome} {tried.exit_code} {_last_line(tried.stderr)}"
        )
    return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
