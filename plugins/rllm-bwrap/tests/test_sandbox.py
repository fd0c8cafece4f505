"""Tests sandbox ``bwrap``: what is visible in it, its functions, and what it says where it cannot work."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rllm_bwrap.sandbox
from rllm_bwrap.interpreters import Interpreter
from rllm_bwrap.sandbox import BwrapSandbox
from rllm_bwrap.syscalls import FORBIDDEN, MACHINES, blocklist

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.sandbox import (
    ChildDied,
    ChildFunction,
    ChildNotStarted,
    ChildOutOfMemory,
    ChildOutputTooLong,
    ChildRaised,
    ChildTimeout,
    Limits,
)
from rllm_core.services import Services

Call = Callable[[BwrapSandbox], Any]


def in_sandbox(call: Call, **options: Any) -> Any:
    async def run() -> Any:
        sandbox = BwrapSandbox(**options)
        try:
            return await call(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


# --------------------------------------------------------------------------------------------------------------------
# Functions


@pytest.mark.parametrize(
    ("path", "arguments", "error", "message"),
    [
        ("math:sqrt", [-1], ChildRaised, "math:sqrt raised ValueError"),
        ("builtins:set", [[1]], ChildRaised, r"TypeError: .*JSON"),
        ("sys:exit", [3], ChildRaised, "raised SystemExit: 3"),
        ("os:_exit", [7], ChildDied, "exit code 7"),
        ("ctypes:string_at", [0], ChildDied, "signal 11"),
        ("builtins:bytearray", [10**10], ChildOutOfMemory, "more than"),
        ("operator:mul", ["x", 3_000_000], ChildOutputTooLong, "bytes, more than"),
        ("operator:mul", ["x", 1_050_000], ChildOutputTooLong, "bytes, more than"),
        ("time:sleep", [60], ChildTimeout, r"longer than 1 s"),
        ("no_such_module:anything", [], ChildNotStarted, "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_goes_wrong_has_a_name(path: str, arguments: list[Any], error: type[Exception], message: str) -> None:
    limits = Limits(wall_seconds=1.0 if error is ChildTimeout else 60.0)
    with pytest.raises(error, match=message):
        in_sandbox(lambda sandbox: sandbox.function(path, limits)(*arguments))


def test_a_function_is_imported_once_for_many_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_grader.py").write_text(
        "import os, time\nIMPORTED = time.time_ns()\ndef graded(text):\n    return [IMPORTED, eval(text)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def calls(sandbox: BwrapSandbox) -> list[Any]:
        graded = sandbox.function("planted_grader:graded", Limits(wall_seconds=60.0))
        return [await graded(f"{n} * 2") for n in range(4)]

    found = in_sandbox(calls)
    assert len({imported for imported, _ in found}) == 1
    assert [value for _, value in found] == [0, 2, 4, 6]


def test_texts_have_the_same_hash_as_in_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that goes through a set answers equally in both."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    child = ChildFunction("builtins:hash")
    try:
        expected = asyncio.run(child("a text"))
    finally:
        child.close()
    assert in_sandbox(lambda sandbox: sandbox.function("builtins:hash")("a text")) == expected


def test_an_error_keeps_its_frames() -> None:
    with pytest.raises(ChildRaised) as caught:
        in_sandbox(lambda sandbox: sandbox.function("json:loads")("{"))
    assert "raise_errmsg" in str(caught.value.frames) or "decode" in str(caught.value.frames)


# --------------------------------------------------------------------------------------------------------------------
# What is visible


def test_packages_of_the_interpreter_can_be_imported() -> None:
    source = "import pytest, rllm_core.types, sys; print(sys.prefix, rllm_core.types.__file__)"
    result = in_sandbox(lambda sandbox: sandbox.run_python(source, limits=Limits(wall_seconds=60.0)))
    import rllm_core.types

    assert result.stdout.split() == [sys.prefix, rllm_core.types.__file__], result


def test_another_python_can_be_given() -> None:
    python = next(path for path in (sys._base_executable, "/usr/bin/python3") if Path(path).exists())
    source = "import sys; print(sys.prefix, sys.prefix == sys.base_prefix)"
    result = in_sandbox(lambda sandbox: sandbox.run_python(source), python=python)
    assert result.stdout.split()[1] == "True", result
    assert result.stdout.split()[0] != sys.prefix


def test_of_a_project_only_what_can_be_imported_is_visible(tmp_path: Path) -> None:
    for name in (
        "package/__init__.py",
        "package/data.json",
        "module.py",
        ".env",
        "runs/run/log",
        ".git/HEAD",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = Interpreter.at(sys.executable, {"PYTHONPATH": str(tmp_path)})
    visible = [path for path in found.paths if path.startswith(str(tmp_path))]
    assert visible == [str(tmp_path / "module.py"), str(tmp_path / "package")]


def test_limits_of_processes_and_disk_can_be_chosen() -> None:
    source = textwrap.dedent(
        """
        import os, time
        started = 0
        try:
            while started < 100:
                if not os.fork():
                    time.sleep(60)
                    os._exit(0)
                started += 1
        except OSError:
            pass
        written = 0
        try:
            for _ in range(10):
                written += os.write(os.open(str(_), os.O_CREAT | os.O_WRONLY), bytes(1 << 19))
        except OSError:
            pass
        print(started, written, flush=True)
        os._exit(0)
        """
    )
    result = in_sandbox(lambda sandbox: sandbox.run_python(source), processes=6, disk_bytes=1 << 20)
    started, written = map(int, result.stdout.split())
    assert 1 <= started <= 6
    assert written == 1 << 20


# --------------------------------------------------------------------------------------------------------------------
# The filter of system calls


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_decides_as_the_kernel_would(machine: str) -> None:
    program = list(struct.iter_unpack("=HBBI", blocklist(machine)))
    audit, column = MACHINES[machine]

    def decided(number: int, argument: int = 0, architecture: int = audit) -> int:
        fields, at, value = {0: number, 4: architecture, 16: argument}, 0, 0
        while True:
            code, if_true, if_false, constant = program[at]
            at += 1
            if code == 0x20:
                value = fields[constant]
            elif code == 0x06:
                return int(constant)
            else:
                holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                at += if_true if holds else if_false

    allowed = 0x7FFF0000
    for numbers in FORBIDDEN.values():
        assert decided(numbers[column]) == 0x00050001
    clone, sockets = {"x86_64": (56, 41), "aarch64": (220, 198)}[machine]
    assert decided(clone, 0x01200011) == allowed  # fork
    assert decided(clone, 0x003D0F00) == allowed  # a thread
    assert decided(clone, 0x10000011) == 0x00050001  # a user namespace
    assert decided(435) == 0x00050000 + 38
    assert [decided(sockets, domain) == allowed for domain in (1, 2, 10, 16, 17, 38, 40)] == [True] * 3 + [False] * 4
    assert decided(0) == decided(1) == allowed
    assert decided(0, architecture=0x40000003) == 0x80000000
    if machine == "x86_64":
        assert decided(0x40000000) == 0x00050001


def test_the_numbers_of_system_calls_are_those_of_this_machine() -> None:
    header = next(Path("/usr/include").glob("**/asm/unistd_64.h"), None)
    if header is None or platform.machine() != "x86_64":
        names = {"ptrace": 101, "unshare": 272}
        assert {name: FORBIDDEN[name][0] for name in names} == names
        return
    numbers = dict(line.split()[1:] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    known = {name: int(numbers[f"__NR_{name}"]) for name in FORBIDDEN if f"__NR_{name}" in numbers}
    assert known == {name: FORBIDDEN[name][0] for name in known}
    assert len(known) > 40


def test_a_machine_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        blocklist("riscv64")


# --------------------------------------------------------------------------------------------------------------------
# Where it cannot work


def test_this_machine_isolates_or_its_kernel_refuses() -> None:
    problem = BwrapSandbox.unavailable()
    assert problem is None or "user namespaces" in problem or "processes cannot be limited" in problem


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rllm_bwrap.sandbox, "_found", lambda: None)


def services(name: str) -> Services:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_bwrap, "bwrap")
    return Services(plugins, name)


@pytest.mark.usefixtures("nowhere")
def test_without_bubblewrap_it_says_so() -> None:
    assert "apt install bubblewrap" in (BwrapSandbox.unavailable() or "")
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        BwrapSandbox()
    with pytest.raises(ConfigError, match=r"model output would be executed.*'bwrap' does not work.*apt install"):
        services("child").isolating_sandbox()


@pytest.mark.usefixtures("nowhere")
def test_a_run_file_that_asks_for_it_is_refused_before_anything_is_allocated() -> None:
    plugins = PluginManager.from_environment()
    config = load_run_config("sort", plugins, overrides=("rollout.sandbox=bwrap",), backend="local")
    with pytest.raises(ConfigError, match=r"rollout\.sandbox = 'bwrap' does not work on this machine"):
        assemble(config, plugins)


def test_it_is_chosen_where_isolation_is_needed() -> None:
    found = services("child").isolating_sandbox()
    assert isinstance(found, BwrapSandbox)
    chosen = services("bwrap")
    assert chosen.isolating_sandbox() is chosen.sandbox


ASK = "from rllm_bwrap.sandbox import BwrapSandbox; print(BwrapSandbox.unavailable())"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_where_no_user_namespaces_are_to_be_had_it_says_so() -> None:
    forbid = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c '{ASK}'"
    asked = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid], capture_output=True, text=True, check=True
    )
    assert "user namespaces" in asked.stdout
    assert asked.stdout.count("\n") == 1


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="root alone cannot be limited")
def test_where_processes_cannot_be_limited_it_says_so() -> None:
    asked = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", ASK], capture_output=True, text=True, check=True
    )
    assert "processes cannot be limited" in asked.stdout


def test_a_bubblewrap_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(rllm_bwrap.sandbox, "_found", lambda: str(broken))
    problem = BwrapSandbox.unavailable() or ""
    assert "No permissions to create a new namespace" in problem
    assert "sysctl" in problem
    assert "\n" not in problem


def test_a_bubblewrap_that_stops_working_is_an_error_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: out of something' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(BwrapSandbox, "unavailable", classmethod(lambda cls: None))
    monkeypatch.setattr(rllm_bwrap.sandbox, "_found", lambda: str(broken))
    with pytest.raises(OSError, match="out of something"):
        in_sandbox(lambda sandbox: sandbox.run_python("print(1)"))


def test_it_can_lower_its_memory_limit_below_what_a_python_needs() -> None:
    result = in_sandbox(lambda sandbox: sandbox.run_python("print(1)", limits=Limits(memory_bytes=1 << 20)))
    assert result.outcome in ("finished", "killed")
    assert result.exit_code != 0
