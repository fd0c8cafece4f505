"""The contract of `Sandbox` as checks that any sandbox can be put through; see `check_sandbox`."""

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
from rllm_core.testing.parsers import Broken, CheckResult, NotApplicable
from rllm_core.testing.probe import Check, checked

AT_A_TIME = 8
PLANTED = "RLLM_PLANTED_VARIABLE"
FEW_BYTES = 10_000
MUCH_MEMORY_BYTES = 128 << 20

# Each ends in a way of its own, and none of them well.
GARBAGE = ("(" * 10_000, "\0", "\ud800", "def", "raise SystemExit('no')", "1 / 0", "import no_such_module")


async def check_sandbox(
    make: Callable[[], Sandbox], *, wall_seconds: float = 2.0, overhead_seconds: float = 15.0
) -> list[CheckResult]:
    """Hold a sandbox to the contract of `Sandbox`.

    For the tests of a sandbox: ``assert not [r for r in await check_sandbox(Mine) if r.outcome == "failed"]``.

    Args:
        make: Constructs one; it is closed in the end.
        wall_seconds: The clock of programs that do not end by themselves.
        overhead_seconds: What starting and ending a program may add to that.

    Returns:
        A result per check; whatever the sandbox raises is a failure of the check that met it.
    """
    sandbox = make()
    probe = _Probe(sandbox, wall_seconds, overhead_seconds)
    try:
        return await checked(probe, SANDBOX_CHECKS)
    finally:
        await sandbox.close()


@dataclass
class _Probe:
    """A sandbox that is being checked."""

    sandbox: Sandbox
    wall_seconds: float
    overhead_seconds: float

    async def run(self, source: str, stdin: str = "", **limits: Any) -> CodeResult:
        """What became of a program, if it was told in time."""
        clock = Limits(**{"wall_seconds": self.wall_seconds + self.overhead_seconds, **limits})
        latest = clock.wall_seconds + self.overhead_seconds
        shown = source[:60].replace("\n", "; ")
        started = time.monotonic()
        try:
            async with asyncio.timeout(latest) as deadline:
                result: Any = await self.sandbox.run_python(source, stdin=stdin, limits=clock)
        except TimeoutError:
            if deadline.expired():
                clock_seconds = f"its clock was {clock.wall_seconds:g} s"
                raise Broken(f"{shown!r} did not end within {latest:g} s, and {clock_seconds}") from None
            raise
        if not isinstance(result, CodeResult):
            raise Broken(f"{shown!r} came back as {result!r:.80}, no CodeResult")
        if (result.exit_code is not None) != (result.outcome == "finished"):
            raise Broken(f"{shown!r} has outcome {result.outcome!r} and exit code {result.exit_code!r}")
        if not 0 <= result.wall_seconds <= time.monotonic() - started + 0.1:
            raise Broken(f"{shown!r} says that it took {result.wall_seconds!r} s")
        return result

    async def finished(self, source: str, stdin: str = "", **limits: Any) -> CodeResult:
        """As `run`, of a program that ends by itself with exit code 0."""
        result = await self.run(source, stdin, **limits)
        if (result.outcome, result.exit_code) != ("finished", 0):
            raise Broken(f"{source[:60]!r} ended as {result.outcome} {result.exit_code}: {result.stderr[-200:]!r}")
        return result


async def _programs(probe: _Probe) -> str:
    result = await probe.finished("import sys\nprint(input()[::-1])\nsys.stderr.write('Ω')", "straße\n")
    if (result.stdout, result.stderr) != ("eßarts\n", "Ω"):
        raise Broken(f"stdin, stdout and stderr do not pass: {result.stdout!r}, {result.stderr!r}")
    left = await probe.run("import sys; sys.exit(7)")
    if left.exit_code != 7:
        raise Broken(f"exit code 7 came back as {left.exit_code}")
    await probe.finished("import sys; assert sys.stdin.read() == ''")
    return f"in {result.wall_seconds:.2f} s"


async def _clock(probe: _Probe) -> str:
    ends = []
    for source in ("import time; time.sleep(3600)", "while True: pass", "9 ** 9 ** 9"):
        result = await probe.run(source, wall_seconds=probe.wall_seconds)
        if result.outcome not in ("timeout", "killed"):
            raise Broken(f"{source!r} ended as {result.outcome!r}")
        ends.append(result.wall_seconds)
    return f"ended after {min(ends):.2f} to {max(ends):.2f} s"


async def _output(probe: _Probe) -> str:
    for stream in ("out", "err"):
        source = f"import sys\nwhile True: sys.std{stream}.write('x' * 1000)"
        result = await probe.run(source, output_bytes=FEW_BYTES, wall_seconds=probe.wall_seconds)
        if result.outcome == "finished":
            raise Broken(f"a program that writes to std{stream} for ever ended by itself")
        size = max(len(text.encode()) for text in (result.stdout, result.stderr))
        if size > FEW_BYTES:
            raise Broken(f"std{stream} has {size} bytes, and the limit is {FEW_BYTES}")
    return f"at most {FEW_BYTES} bytes"


async def _memory(probe: _Probe) -> str:
    source = f"x = b'x' * {4 * MUCH_MEMORY_BYTES}; print(len(x))"
    result = await probe.run(source, memory_bytes=MUCH_MEMORY_BYTES)
    if result.exit_code == 0:
        raise Broken(f"a program has used {4 * MUCH_MEMORY_BYTES} bytes, and the limit is {MUCH_MEMORY_BYTES}")
    return f"ended as {result.outcome}"


async def _endings(probe: _Probe) -> str:
    killed = await probe.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    if killed.outcome not in ("killed", "finished") or killed.exit_code == 0:
        raise Broken(f"a program that kills itself ended as {killed.outcome!r} {killed.exit_code}")
    for source in GARBAGE:
        result = await probe.run(source)
        if result.outcome == "finished" and result.exit_code == 0:
            raise Broken(f"{source[:40]!r} ended well")
    return f"{1 + len(GARBAGE)} programs that do not end well"


async def _separation(probe: _Probe) -> str:
    look = "import os; print(sorted(os.listdir())); open('mine', 'w').write('x')"
    first, second = [(await probe.finished(look)).stdout for _ in range(2)]
    if first != second or "mine" in first:
        raise Broken(f"a program finds what another has left: {first.strip()}, then {second.strip()}")
    with mock.patch.dict(os.environ, {PLANTED: "1"}):
        seen = await probe.finished(f"import os; print(os.environ.get({PLANTED!r}))")
    if seen.stdout.strip() != "None":
        raise Broken("a program sees the variables of this process, and with them whatever secrets they hold")
    return "each in a folder of its own, without this process' variables"


async def _concurrency(probe: _Probe) -> str:
    source = "import time; text = input(); time.sleep(0.1); print(text)"
    results = await asyncio.gather(*(probe.finished(source, f"{number}\n") for number in range(AT_A_TIME)))
    said = [result.stdout.strip() for result in results]
    if said != [str(number) for number in range(AT_A_TIME)]:
        raise Broken(f"{AT_A_TIME} programs at once were asked for their numbers, and said {said}")
    return f"{AT_A_TIME} at once"


async def _isolation(probe: _Probe) -> str:
    if not probe.sandbox.isolates:
        raise NotApplicable("isolates is false: programs can reach this user's files, processes and network")
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
                raise Broken(f"isolates is true, and a program {what}")
    return "neither files, nor network, nor processes"


SANDBOX_CHECKS: dict[str, Check[_Probe]] = {
    "programs": _programs,
    "wall clock": _clock,
    "output": _output,
    "memory": _memory,
    "bad endings": _endings,
    "separation": _separation,
    "concurrency": _concurrency,
    "isolation": _isolation,
}
