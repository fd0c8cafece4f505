"""Contract checks for sandboxes; see `check_sandbox`."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rllm_core.sandbox import CodeResult, Limits, Sandbox
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked

AT_A_TIME = 8
PLANTED = "RLLM_PLANTED_VARIABLE"
FEW_BYTES = 10_000
MEMORY_LIMIT_BYTES = 128 << 20

# Programs that fail, each in a different way.
GARBAGE = ("(" * 10_000, "\0", "\ud800", "def", "raise SystemExit('no')", "1 / 0", "import no_such_module")


async def check_sandbox(
    make: Callable[[], Sandbox], *, wall_seconds: float = 2.0, overhead_seconds: float = 15.0
) -> list[CheckResult]:
    """Checks a sandbox against the contract of `Sandbox`.

    In a test: ``assert not [r for r in await check_sandbox(Mine) if r.outcome == "failed"]``.

    Args:
        make: Constructs a sandbox; it is closed at the end.
        wall_seconds: Time limit of programs that do not end by themselves, in seconds.
        overhead_seconds: Maximum time for starting and ending a program, in addition to its limit.

    Returns:
        One result per check. An exception raised by the sandbox fails the check that called it.
    """
    sandbox = make()
    probe = _SandboxProbe(sandbox, wall_seconds, overhead_seconds)
    try:
        return await checked(probe, SANDBOX_CHECKS)
    finally:
        await sandbox.close()


@dataclass
class _SandboxProbe:
    """Sandbox under test."""

    sandbox: Sandbox
    wall_seconds: float
    overhead_seconds: float

    async def run(self, source: str, stdin: str = "", **limits: Any) -> CodeResult:
        """Runs a program and checks that a valid result arrives in time."""
        clock = Limits(**{"wall_seconds": self.wall_seconds + self.overhead_seconds, **limits})
        latest = clock.wall_seconds + self.overhead_seconds
        shown = source[:60].replace("\n", "; ")
        started = time.monotonic()
        try:
            async with asyncio.timeout(latest) as deadline:
                result: Any = await self.sandbox.run_python(source, stdin=stdin, limits=clock)
        except TimeoutError:
            if deadline.expired():
                clock_seconds = f"wall_seconds was {clock.wall_seconds:g}"
                raise Violation(f"{shown!r} did not end within {latest:g} s; {clock_seconds}") from None
            raise
        if not isinstance(result, CodeResult):
            raise Violation(f"run_python({shown!r}) must return a CodeResult, got {result!r:.80}")
        if not 0 <= result.wall_seconds <= time.monotonic() - started + 0.1:
            raise Violation(f"{shown!r}: wall_seconds is {result.wall_seconds!r}, which cannot be right")
        return result

    async def finished(self, source: str, stdin: str = "", **limits: Any) -> CodeResult:
        """Does the same as `run`, for a program that must finish with exit code 0."""
        result = await self.run(source, stdin, **limits)
        if (result.outcome, result.exit_code) != ("finished", 0):
            raise Violation(f"{source[:60]!r} ended as {result.outcome} {result.exit_code}: {result.stderr[-200:]!r}")
        return result


async def _programs(probe: _SandboxProbe) -> str:
    result = await probe.finished("import sys\nprint(input()[::-1])\nsys.stderr.write('Ω')", "straße\n")
    if (result.stdout, result.stderr) != ("eßarts\n", "Ω"):
        raise Violation(f"stdin, stdout or stderr is not passed on: {result.stdout!r}, {result.stderr!r}")
    left = await probe.run("import sys; sys.exit(7)")
    if left.exit_code != 7:
        raise Violation(f"exit code 7 is reported as {left.exit_code}")
    await probe.finished("import sys; assert sys.stdin.read() == ''")
    return f"in {result.wall_seconds:.2f} s"


async def _clock(probe: _SandboxProbe) -> str:
    ends = []
    for source in ("import time; time.sleep(3600)", "while True: pass", "9 ** 9 ** 9"):
        result = await probe.run(source, wall_seconds=probe.wall_seconds)
        if result.outcome not in ("timeout", "killed"):
            raise Violation(f"{source!r} must end as 'timeout' or 'killed', got {result.outcome!r}")
        ends.append(result.wall_seconds)
    return f"ended after {min(ends):.2f} to {max(ends):.2f} s"


async def _output(probe: _SandboxProbe) -> str:
    for stream in ("out", "err"):
        source = f"import sys\nwhile True: sys.std{stream}.write('x' * 1000)"
        result = await probe.run(source, output_bytes=FEW_BYTES, wall_seconds=probe.wall_seconds)
        if result.outcome == "finished":
            raise Violation(f"a program that writes to std{stream} forever is reported as 'finished'")
        size = max(len(text.encode()) for text in (result.stdout, result.stderr))
        if size > FEW_BYTES:
            raise Violation(f"std{stream} has {size} bytes, but the limit is {FEW_BYTES}")
    return f"at most {FEW_BYTES} bytes"


async def _memory(probe: _SandboxProbe) -> str:
    source = f"x = b'x' * {4 * MEMORY_LIMIT_BYTES}; print(len(x))"
    result = await probe.run(source, memory_bytes=MEMORY_LIMIT_BYTES)
    if result.exit_code == 0:
        raise Violation(f"a program used {4 * MEMORY_LIMIT_BYTES} bytes, but the limit is {MEMORY_LIMIT_BYTES}")
    return f"ended as {result.outcome}"


async def _endings(probe: _SandboxProbe) -> str:
    killed = await probe.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    if killed.outcome not in ("killed", "finished") or killed.exit_code == 0:
        raise Violation(
            f"a program that kills itself is reported as {killed.outcome!r} with exit code {killed.exit_code}"
        )
    for source in GARBAGE:
        result = await probe.run(source)
        if result.outcome == "finished" and result.exit_code == 0:
            raise Violation(f"{source[:40]!r} fails, but is reported with exit code 0")
    return f"{1 + len(GARBAGE)} failing programs"


async def _separation(probe: _SandboxProbe) -> str:
    look = "import os; print(sorted(os.listdir())); open('mine', 'w').write('x')"
    first, second = [(await probe.finished(look)).stdout for _ in range(2)]
    if first != second or "mine" in first:
        raise Violation(f"a program finds files of an earlier one: {first.strip()}, then {second.strip()}")
    with mock.patch.dict(os.environ, {PLANTED: "1"}):
        seen = await probe.finished(f"import os; print(os.environ.get({PLANTED!r}))")
    if seen.stdout.strip() != "None":
        raise Violation("a program sees the environment variables of this process, which may contain secrets")
    return "each in its own folder, without this process' environment variables"


async def _concurrency(probe: _SandboxProbe) -> str:
    source = "import time; text = input(); time.sleep(0.1); print(text)"
    results = await asyncio.gather(*(probe.finished(source, f"{number}\n") for number in range(AT_A_TIME)))
    said = [result.stdout.strip() for result in results]
    if said != [str(number) for number in range(AT_A_TIME)]:
        raise Violation(f"{AT_A_TIME} programs at once should print their numbers, but printed {said}")
    return f"{AT_A_TIME} at once"


async def _isolation(probe: _SandboxProbe) -> str:
    if not probe.sandbox.isolates:
        raise NotApplicable("isolates is False: programs can reach this user's files, processes and network")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder, "secret").write_text(PLANTED, encoding="utf-8")
        port, pid = server.getsockname()[1], os.getpid()
        attempts = {
            "reads a file of this user": f"print(open({f'{folder}/secret'!r}).read())",
            "writes into a folder of this user": f"open({f'{folder}/written'!r}, 'w').write('x')",
            "reaches a server of this machine": "import socket\n"
            f"socket.create_connection(('127.0.0.1', {port}), timeout=2)\nprint({PLANTED!r})",
            "sees the command line of this process": f"print(open('/proc/{pid}/cmdline').read(), {PLANTED!r})",
        }
        own = Path(f"/proc/{pid}/cmdline")
        command_line = own.read_text(encoding="utf-8") if own.exists() else PLANTED
        for what, source in attempts.items():
            said = (await probe.run(source)).stdout
            found = command_line in said if "command line" in what else PLANTED in said
            if found or Path(folder, "written").exists():
                raise Violation(f"isolates is True, but a program {what}")
    return "no access to files, network or processes"


SANDBOX_CHECKS: dict[str, Check[_SandboxProbe]] = {
    "programs": _programs,
    "wall clock": _clock,
    "output": _output,
    "memory": _memory,
    "bad endings": _endings,
    "separation": _separation,
    "concurrency": _concurrency,
    "isolation": _isolation,
}
