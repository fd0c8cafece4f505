"""Tests untrusted code in child processes: its limits, how it ends, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm_core.builtin.sandbox import ChildSandbox
from rllm_core.sandbox import (
    ChildDied,
    ChildError,
    ChildFunction,
    ChildNotStarted,
    ChildOutOfMemory,
    ChildOutputTooLong,
    ChildRaised,
    ChildTimeout,
    CodeResult,
    Limits,
    Sandbox,
    call_with_retry,
    processes,
    result_of,
)

Functions = Callable[..., ChildFunction]


@pytest.fixture
def function() -> Iterator[Functions]:
    made: list[ChildFunction] = []

    def make(path: str, **limits: Any) -> ChildFunction:
        made.append(ChildFunction(path, Limits(**limits), children=2))
        return made[-1]

    yield make
    for one in made:
        one.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------------------------
# Functions


def test_a_function_is_called_elsewhere_and_its_child_serves_again(function: Functions) -> None:
    pid = function("os:getpid")

    async def three() -> list[int]:
        return [await pid() for _ in range(3)]

    first, *others = asyncio.run(three())
    assert first != os.getpid()
    assert others == [first, first]


def test_arguments_and_results_are_json(function: Functions) -> None:
    assert asyncio.run(function("builtins:sorted")([3, 1, 2])) == [1, 2, 3]
    assert asyncio.run(function("textwrap:dedent")("  ä\n  \0")) == textwrap.dedent("  ä\n  \0")
    with pytest.raises(TypeError):
        asyncio.run(function("builtins:len")({1, 2}))
    with pytest.raises(ChildRaised, match=r"TypeError: .*JSON"):
        asyncio.run(function("builtins:set")([1]))


@pytest.mark.parametrize(
    ("path", "arguments", "error", "message"),
    [
        ("math:sqrt", [-1], ChildRaised, "math:sqrt raised ValueError: math domain error|nonnegative"),
        ("sys:exit", [3], ChildRaised, "raised SystemExit: 3"),
        ("os:abort", [], ChildDied, "signal 6"),
        ("os:_exit", [7], ChildDied, "exit code 7"),
        ("builtins:bytearray", [10**10], ChildOutOfMemory, "more than"),
        ("operator:mul", ["x", 3_000_000], ChildOutputTooLong, "3000015 bytes, more than"),
        pytest.param("time:sleep", [60], ChildTimeout, r"longer than 0\.5 s", marks=pytest.mark.slow),
        ("no_such_module:anything", [], ChildNotStarted, "cannot be imported: ModuleNotFoundError"),
        ("os:no_such_function", [], ChildNotStarted, "cannot be imported: AttributeError"),
    ],
)
def test_what_goes_wrong_has_a_name_and_the_next_call_works(
    function: Functions, path: str, arguments: list[Any], error: type[ChildError], message: str
) -> None:
    called = function(path, wall_seconds=0.5 if error is ChildTimeout else 60.0)
    for _ in range(2):
        with pytest.raises(error, match=message):
            asyncio.run(called(*arguments))


@pytest.mark.slow
def test_a_computation_that_holds_the_interpreter_is_killed(function: Functions) -> None:
    power = function("operator:pow", wall_seconds=1.0)
    with pytest.raises(ChildTimeout):
        asyncio.run(power(9, 9**9))
    assert asyncio.run(power(2, 5)) == 32


def test_the_others_are_answered_while_some_hang(function: Functions) -> None:
    sleep = function("time:sleep", wall_seconds=600.0)

    async def mixed() -> list[Any]:
        hung = asyncio.create_task(sleep(3600))
        others = await asyncio.gather(*(sleep(0) for _ in range(50)))
        assert not hung.done()
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        return others

    assert asyncio.run(mixed()) == [None] * 50


def test_it_works_off_the_main_thread(function: Functions) -> None:
    got: list[Any] = []
    upper = function("string:capwords")
    thread = threading.Thread(target=lambda: got.append(asyncio.run(upper("a b"))))
    thread.start()
    thread.join()
    assert got == ["A B"]


def test_what_a_function_prints_is_no_answer(function: Functions, capfd: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(function("builtins:print")('{"result": 5}')) is None
    assert capfd.readouterr().out == ""


def test_a_child_sees_no_secret_and_nothing_of_the_working_directory(
    function: Functions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_module.py").write_text("def f():\n    return 1\n")
    assert asyncio.run(function("os:getenv")("SOME_API_KEY")) is None
    with pytest.raises(ChildNotStarted, match="No module named 'planted_module'"):
        asyncio.run(function("planted_module:f")())


def test_a_process_that_dies_while_it_imports_was_not_called(
    function: Functions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So it says nothing about the arguments, and `call_with_retry` starts no further one."""
    (tmp_path / "planted_module.py").write_text(
        "import os\nprint(1, file=open('started', 'a'))\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChildNotStarted, match="signal 9"):
        asyncio.run(call_with_retry(function("planted_module:f")))
    assert Path("started").read_text() == "1\n"


@pytest.mark.parametrize("path", ["", "os", "os:", ":f", "../x:f", "os;x:f", "os:f()"])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        ChildFunction(path)


@pytest.mark.parametrize("name", ["wall_seconds", "memory_bytes", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_close_leaves_no_child_and_ends_calls() -> None:
    called = ChildFunction("time:sleep", children=2)
    pids: list[int] = []

    async def closed_meanwhile() -> list[Any]:
        calls = [asyncio.ensure_future(called(60)) for _ in range(4)]
        while sum(child.calls == 2 for child in [*called._children._busy]) < 2:  # the first one imports the function
            await asyncio.sleep(0.01)
        pids.extend(child.process.pid for child in called._children._busy)
        called.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(closed_meanwhile())
    with pytest.raises(ChildNotStarted, match="was closed"):
        asyncio.run(called(60))
    assert {type(outcome) for outcome in outcomes} == {ChildDied, asyncio.CancelledError}
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_an_idle_child_ends_with_the_last_reference() -> None:
    called = ChildFunction("os:getpid")
    pid = asyncio.run(called())
    assert is_running(pid)
    del called
    wait_until(lambda: not is_running(pid))


def test_children_die_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio
        from rllm_core.sandbox import ChildFunction, Limits

        async def main():
            pid, sleep = (ChildFunction(f, Limits(wall_seconds=300), children=1) for f in ("os:getpid", "time:sleep"))
            hanging = asyncio.ensure_future(sleep(300))
            while not sleep._children._busy:
                await asyncio.sleep(0.01)
            [busy] = sleep._children._busy
            print(await pid(), busy.process.pid, flush=True)
            await hanging

        asyncio.run(main())
        """
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_running, children)))


# --------------------------------------------------------------------------------------------------------------------
# Functions in a sandbox that can only run programs


def in_programs(path: str, *arguments: Any, **limits: Any) -> Any:
    async def call() -> Any:
        sandbox = ChildSandbox()
        try:
            return await sandbox.function(path, Limits(**{"wall_seconds": 60.0, **limits}))(*arguments)
        finally:
            await sandbox.close()

    return asyncio.run(call())


def test_a_sandbox_calls_functions_by_programs() -> None:
    assert in_programs("builtins:sorted", [3, 1, 2]) == [1, 2, 3]
    assert in_programs("builtins:print", '{"result": 5}') is None
    with pytest.raises(ValueError, match="is not of the form"):
        in_programs("os")


@pytest.mark.parametrize(
    ("path", "arguments", "error", "message"),
    [
        ("math:sqrt", [-1], ChildRaised, "math:sqrt raised ValueError"),
        ("os:abort", [], ChildDied, "killed"),
        ("os:_exit", [7], ChildDied, "exit code 7"),
        ("builtins:bytearray", [10**10], ChildOutOfMemory, "more than"),
        ("operator:mul", ["x", 3_000_000], ChildOutputTooLong, "3000015 bytes, more than"),
        pytest.param("time:sleep", [60], ChildTimeout, r"longer than 1\.5 s", marks=pytest.mark.slow),
        ("no_such_module:anything", [], ChildRaised, "ModuleNotFoundError"),
        ("os:write", [1, "[]"], ChildRaised, "TypeError"),
        ("builtins:exec", ["import os; os.write(3, b'[1]'); os._exit(0)"], ChildDied, "exit code 0"),
        ("builtins:exec", ["import os; os.write(3, b'['*9999); os._exit(0)"], ChildDied, "exit code 0"),
        ("builtins:exec", ["while True: print('x' * 1000)"], ChildOutputTooLong, "more than"),
    ],
)
def test_a_program_without_a_result_is_an_error(
    path: str, arguments: list[Any], error: type[ChildError], message: str
) -> None:
    with pytest.raises(error, match=message):
        in_programs(path, *arguments, wall_seconds=1.5 if error is ChildTimeout else 60.0)


@pytest.mark.slow
def test_a_child_that_survives_its_calls_ends_them_itself(tmp_path: Path) -> None:
    """Of a sandbox: it answers that the time is over, and serves the next call."""
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys, time
            print('{"ready": true}', flush=True)
            for line in sys.stdin:
                [wanted] = json.loads(line)
                time.sleep(0.2)
                answers = {"died": {"died": "signal 9"}, "late": {"timeout": True}, "pid": {"result": os.getpid()}}
                print(json.dumps(answers[wanted]), flush=True)
            """
        )
    )

    def start() -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, str(script)], bufsize=0, start_new_session=True, **pipes)

    async def calls(served: ChildFunction) -> tuple[int, int]:
        first = await served("pid")
        with pytest.raises(ChildTimeout):
            await served("late")
        with pytest.raises(ChildDied, match="signal 9"):
            await served("died")
        return first, await served("pid")

    served = ChildFunction("some:name", Limits(wall_seconds=0.01), start=start)
    try:
        first, second = asyncio.run(calls(served))
    finally:
        served.close()
    assert first == second


def test_a_sandbox_works_unless_it_says_otherwise() -> None:
    assert Sandbox.unavailable() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"outcome": "done"}, "outcome = 'done' must be one of finished, timeout"),
        ({"exit_code": None}, "exit_code = None with outcome 'finished'"),
        ({"outcome": "timeout"}, "exit_code = 0 with outcome 'timeout'"),
        ({"stdout": b"1"}, "must be text, got bytes and str"),
        ({"stderr": None}, "must be text, got str and NoneType"),
    ],
)
def test_a_result_that_is_none_is_refused_where_it_is_made(wrong: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"outcome": "finished", "exit_code": 0, "stdout": "", "stderr": "", "wall_seconds": 0.1}
    with pytest.raises(ValueError, match=message):
        CodeResult(**{**good, **wrong})


# --------------------------------------------------------------------------------------------------------------------
# Programs


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., CodeResult]]:
    sandbox = ChildSandbox()

    def program(source: str, stdin: str = "", **limits: Any) -> CodeResult:
        return asyncio.run(sandbox.run_python(source, stdin=stdin, limits=Limits(**limits)))

    yield program
    asyncio.run(sandbox.close())


def test_a_program_reads_and_prints(run: Callable[..., CodeResult]) -> None:
    result = run("import sys\nprint(input()[::-1])\nsys.stderr.write('ä')\nsys.exit(3)", "abc\n")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("finished", 3, "cba\n", "ä")


def test_what_a_program_writes_while_nobody_looks_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # On a busy machine, the program may write and end between two looks of this process.
        patch.setattr(subprocess.Popen, "poll", lambda self: self.wait())
        process = processes.start("program", "-", Limits())
        result = result_of(process, "import time; time.sleep(0.3); print('late')", Limits(wall_seconds=60))
    assert (result.outcome, result.exit_code, result.stdout) == ("finished", 0, "late\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import time; time.sleep(60)", "timeout"),
        ("9 ** 9 ** 9", "timeout"),
        ("while True: print('x' * 1000)", "output_limit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "timeout"),  # as the limit on CPU time does
        ("import os; os.close(1); os.close(2); import time; time.sleep(60)", "timeout"),
    ],
)
def test_a_program_that_does_not_end_well_is_ended(run: Callable[..., CodeResult], source: str, outcome: str) -> None:
    result = run(source, wall_seconds=1.5 if outcome == "timeout" else 60.0, output_bytes=10_000)
    assert (result.outcome, result.exit_code) == (outcome, None)
    assert len(result.stdout) <= 10_000
    assert result.wall_seconds < 60


def test_memory_and_files_are_limited(run: Callable[..., CodeResult]) -> None:
    hog = run("x = bytearray(10 ** 10)")
    assert (hog.outcome, hog.exit_code) == ("finished", 1)
    assert hog.stderr.rstrip().endswith("MemoryError")
    writer = run("open('a', 'wb').write(b'x' * 10_000_000)", output_bytes=100_000)
    assert "File too large" in writer.stderr


def test_limits_cannot_be_raised_again(run: Callable[..., CodeResult]) -> None:
    limits = "import resource as r; print(r.getrlimit(r.RLIMIT_AS)[1], r.getrlimit(r.RLIMIT_FSIZE)[1])"
    assert run(limits, memory_bytes=1 << 30, output_bytes=4096).stdout.split() == [str(1 << 30), "4096"]


def test_programs_see_neither_variables_nor_each_other(
    run: Callable[..., CodeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted")
    monkeypatch.setenv("PYTHONSTARTUP", "planted")
    look = "import os; print('planted' in str(os.environ), os.listdir(), open('mine', 'w').write('x'))"
    for _ in range(2):
        assert run(look).stdout == "False ['main.py'] 1\n"


def test_nothing_of_a_program_is_left_running(run: Callable[..., CodeResult]) -> None:
    source = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(child.pid)"
    )
    result = run(source)
    assert (result.outcome, result.exit_code) == ("finished", 0)
    wait_until(lambda: not is_running(int(result.stdout)))


def test_the_folder_of_a_program_is_removed(run: Callable[..., CodeResult]) -> None:
    folder = Path(run("import os; print(os.getcwd())").stdout.strip())
    assert folder.name.startswith("rllm-program-")
    assert not folder.exists()


def test_a_source_that_is_no_text_is_a_result(run: Callable[..., CodeResult]) -> None:
    for source in ("\ud800", "\0", "(" * 10_000):
        result = run(source)
        assert result.outcome in ("finished", "killed")
        assert result.exit_code != 0


def test_the_variables_that_pass() -> None:
    passed = processes.environment({"PATH": "p", "SOME_TOKEN": "t", "AWS_SECRET": "s", "PYTHONHASHSEED": "3"})
    assert passed == {"PATH": "p", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
