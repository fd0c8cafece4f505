"""Tries to get out of the sandbox, by programs and by texts that a function executes. Nothing does."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rllm_bwrap import syscalls
from rllm_bwrap.interpreters import Interpreter
from rllm_bwrap.sandbox import BwrapSandbox

from rllm_core.sandbox import ChildDied, ChildError, ChildOutputTooLong, ChildTimeout, Limits

spec = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
assert spec is not None
assert spec.loader is not None
hostile = importlib.util.module_from_spec(spec)
sys.modules["hostile"] = hostile
spec.loader.exec_module(hostile)

PATIENT = Limits(wall_seconds=60.0)
VISIBLE = {"bin", "dev", "etc", "inside.py", "lib", "lib32", "lib64", "main.py", "nix", "sandbox", "tmp", "usr"}
IMPATIENT = Limits(wall_seconds=2.0, output_bytes=10_000)
RETURNED = "(lambda space: (exec({source!r}, space), space['found'])[1])(dict())"


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Calls coroutine functions of one sandbox, in one event loop."""
    with asyncio.Runner() as runner:
        made = runner.run(_made())

        def called(call: Callable[[BwrapSandbox], Any]) -> Any:
            return runner.run(call(made))

        yield called
        runner.run(made.close())


async def _made() -> BwrapSandbox:
    return BwrapSandbox()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Things of this process that nobody may reach."""
    secret = tmp_path / "secret"
    secret.write_text("planted", encoding="utf-8")
    monkeypatch.setenv("SOME_API_KEY", "planted")
    found = Interpreter.at(sys.executable, dict(os.environ))
    abstract = f"rllm-{os.getpid()}"
    numbers = {name: syscalls.FORBIDDEN[name][syscalls.MACHINES[platform.machine()][1]] for name in ("bpf", "keyctl")}
    numbers["clone"] = syscalls.CLONE[syscalls.MACHINES[platform.machine()][1]]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        yield {
            "secret": str(secret),
            "folder": str(tmp_path),
            "port": server.getsockname()[1],
            "abstract": abstract,
            "pid": os.getpid(),
            "roots": VISIBLE | {Path(path).parts[1] for path in found.paths},
            **numbers,
        }
    assert secret.read_text(encoding="utf-8") == "planted"
    assert list(tmp_path.iterdir()) == [secret]


def source_of(name: str, world: dict[str, Any]) -> str:
    return str(hostile.START + hostile.CORPUS[name].source.format(**world))


def expected_of(name: str, kind: str) -> Any:
    expected = hostile.CORPUS[name].expected
    return expected[kind] if isinstance(expected, dict) else expected


@pytest.mark.parametrize("name", hostile.CORPUS)
def test_no_program_gets_out(run: Callable[..., Any], world: dict[str, Any], name: str) -> None:
    source = source_of(name, world) + "\nprint(repr(found), flush=True)\nos._exit(0)"
    result = run(lambda sandbox: sandbox.run_python(source, limits=PATIENT))
    assert (result.outcome, result.exit_code) == ("finished", 0), result
    assert ast.literal_eval(result.stdout) == expected_of(name, "program"), result.stdout


@pytest.mark.parametrize("name", hostile.CORPUS)
def test_no_text_that_a_function_executes_gets_out(run: Callable[..., Any], world: dict[str, Any], name: str) -> None:
    text = RETURNED.format(source=source_of(name, world))

    async def both(sandbox: BwrapSandbox) -> tuple[Any, Any]:
        execute = sandbox.function("builtins:eval", PATIENT)
        return await execute(text), await execute("__import__('os').listdir()")

    found, left = run(both)
    assert found == expected_of(name, "function"), found
    assert left == []


# --------------------------------------------------------------------------------------------------------------------
# What is left of a call


# Writes a line into everything that is open, such as where the result goes.
SAY = """
import os
for descriptor in range(64):
    try:
        os.write(descriptor, {line!r})
    except OSError:
        pass
os._exit(0)
"""
POISONS = {
    "modules": "import builtins, json, math; builtins.len = json.loads = math.sqrt = lambda *_: 42",
    "files": "open('math.py', 'w').write('sqrt = len')",
    "exits": "import os; os._exit(0)",
    "exits with an error": "import sys; sys.exit(3)",
    "memory": "x = bytearray(1 << 40)",
    "signals": "import os, signal; signal.alarm(1); os.kill(os.getpid(), signal.SIGSEGV)",
    "forged results": SAY.format(line=b'{"result": 42}\n'),
    "other lines": SAY.format(line=b"[1, 2]\n"),
    "deep lines": SAY.format(line=b'{"result": ' + b"[" * 900 + b"]" * 900 + b"}\n"),
    "floods": SAY.format(line=bytes(200_000)),
    "wrong frames": SAY.format(line=b'{"error": 1, "frames": [[1]]}\n'),
    "never ends": "while True: pass",
    "silence": "import os\nos.closerange(0, 256)\nwhile True: pass",
    "sleeps": "import time; time.sleep(3600)",
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "asks for more": "import sys; sys.stdin.read(); input()",
}
ERRORS = {
    "other lines": ChildDied,
    "deep lines": ChildDied,
    "exits": ChildDied,
    "floods": ChildOutputTooLong,
    "never ends": ChildTimeout,
    "silence": ChildTimeout,
    "sleeps": ChildTimeout,
}


@pytest.mark.parametrize("name", POISONS)
def test_nothing_of_a_call_reaches_the_next(run: Callable[..., Any], name: str) -> None:
    async def poisoned(sandbox: BwrapSandbox) -> tuple[Any, Any, Any]:
        execute = sandbox.function("builtins:exec", IMPATIENT)
        count, root = (sandbox.function(path, IMPATIENT) for path in ("builtins:len", "math:sqrt"))
        [outcome] = await asyncio.gather(execute(POISONS[name]), return_exceptions=True)
        clean = "import math; assert (len('abc'), math.sqrt(4)) == (3, 2)"
        return outcome, await execute(clean), (await count("abc"), await root(4))

    outcome, after, others = run(poisoned)
    assert (after, others) == (None, (3, 2))
    if name in ERRORS:
        assert type(outcome) is ERRORS[name], outcome
    else:
        assert outcome is None or outcome == 42 or isinstance(outcome, ChildError), outcome


def test_the_process_that_serves_survives_hostile_calls(run: Callable[..., Any]) -> None:
    async def serving(sandbox: BwrapSandbox) -> set[int]:
        execute = sandbox.function("builtins:exec", Limits(wall_seconds=1.0))
        pids = set()
        for source in ("1", "import os; os.kill(0, 9)", "while True: pass", "x = bytearray(1 << 40)"):
            await asyncio.gather(execute(source), return_exceptions=True)
            pids |= {child.process.pid for child in execute._children._idle}  # type: ignore[attr-defined]
        return pids

    assert len(run(serving)) == 1


def is_anywhere(marker: str) -> bool:
    return bool(ends_first(marker))


def ends_first(marker: str) -> set[bool]:
    """Of the processes with a text in their command line: whether the kernel ends them before others without memory."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.add(path.with_name("oom_score_adj").read_text() == "1000\n")
        except OSError:
            pass  # it has ended
    return found


DAEMON = """
import os, subprocess, sys
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{marker}"], start_new_session=True)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{marker}"])
    os._exit(0)
import time
time.sleep(1)
found = 1
"""


@pytest.mark.parametrize("kind", ["program", "function"])
def test_no_process_is_left(run: Callable[..., Any], kind: str) -> None:
    marker = f"rllm-left-{kind}-{os.getpid()}"
    source = DAEMON.format(marker=marker)

    async def called(sandbox: BwrapSandbox) -> Any:
        if kind == "program":
            return (await sandbox.run_python(source, limits=PATIENT)).exit_code
        return await sandbox.function("builtins:exec", PATIENT)(source)

    async def watched(sandbox: BwrapSandbox) -> tuple[set[bool], Any]:
        call = asyncio.ensure_future(called(sandbox))
        seen: set[bool] = set()
        while not call.done():
            seen |= await asyncio.to_thread(ends_first, marker)
        return seen, await call

    seen, result = run(watched)
    assert seen == {True}
    assert not result
    deadline = time.monotonic() + 60
    while is_anywhere(marker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_concurrent_calls_do_not_see_each_other(run: Callable[..., Any]) -> None:
    source = (
        "(lambda os, time: (open('mine', 'w').write(text), time.sleep(0.3), os.listdir(), open('mine').read(),"
        " os.getpid())[2:])(__import__('os'), __import__('time'))"
    )

    async def calls(sandbox: BwrapSandbox) -> list[Any]:
        execute = sandbox.function("builtins:eval", PATIENT)
        return await asyncio.gather(*(execute(source.replace("text", repr(str(n)))) for n in range(6)))

    assert run(calls) == [[["mine"], str(n), 1] for n in range(6)]
