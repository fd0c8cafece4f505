"""Tests of the sandbox checks: the core's sandbox passes, and each noncompliant one fails its check."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from rllm_core.builtin.sandbox import ChildSandbox
from rllm_core.sandbox import CodeResult, Limits, Sandbox
from rllm_devkit.checks import check_sandbox, sandboxes
from rllm_devkit.checks.sandboxes import SANDBOX_CHECKS


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Sandbox], str], str]:
    """Returns the failure one check reports for a sandbox."""

    def find(sandbox: type[Sandbox], name: str) -> str:
        monkeypatch.setattr(sandboxes, "SANDBOX_CHECKS", {name: SANDBOX_CHECKS[name]})
        overhead_seconds = 3.0 if sandbox is WithoutClock else 15.0  # uses the entire overhead
        [result] = asyncio.run(check_sandbox(sandbox, wall_seconds=1.0, overhead_seconds=overhead_seconds))
        assert result.outcome == "failed", result
        return result.detail

    return find


class Changed(ChildSandbox):
    """The core's sandbox with changed limits or results."""

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        return self.changed(await super().run_python(source, stdin=stdin, limits=self.limited(limits or Limits())))

    def limited(self, limits: Limits) -> Limits:
        return limits

    def changed(self, result: CodeResult) -> CodeResult:
        return result


class WithoutStdin(ChildSandbox):
    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        return await super().run_python(source, limits=limits)


class WithoutClock(Changed):
    def limited(self, limits: Limits) -> Limits:
        return dataclasses.replace(limits, wall_seconds=60.0)


class WithoutOutputLimit(Changed):
    def limited(self, limits: Limits) -> Limits:
        return dataclasses.replace(limits, output_bytes=1 << 22)


class WithoutMemoryLimit(Changed):
    def limited(self, limits: Limits) -> Limits:
        return dataclasses.replace(limits, memory_bytes=8 << 30)


class Optimistic(Changed):
    def changed(self, result: CodeResult) -> CodeResult:
        return dataclasses.replace(result, outcome="finished", exit_code=0)


class WithoutExitCode(Changed):
    def changed(self, result: CodeResult) -> CodeResult:
        return dataclasses.replace(result, exit_code=None)


class Late(Changed):
    def changed(self, result: CodeResult) -> CodeResult:
        return dataclasses.replace(result, wall_seconds=1e6)


class Raises(Changed):
    def changed(self, result: CodeResult) -> CodeResult:
        if result.exit_code:
            raise RuntimeError(result.stderr)
        return result


class Shared(Sandbox):
    """Runs programs in this process' folder with its environment variables."""

    name: ClassVar[str] = "shared"

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        command = [sys.executable, "-c", source.encode("utf-8", "replace").replace(b"\0", b"?")]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin.encode(), capture_output=True, env=environment
        )
        return CodeResult(
            outcome="finished", exit_code=abs(done.returncode), stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"), wall_seconds=0.0,
        )  # fmt: skip


class Mixed(ChildSandbox):
    """Gives every program the input of the first."""

    first: ClassVar[dict[str, str]] = {}

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        return await super().run_python(source, stdin=self.first.setdefault(source, stdin), limits=limits)


class Boasting(ChildSandbox):
    isolates: ClassVar[bool] = True


@pytest.mark.slow
def test_the_checks_of_the_cores_own() -> None:
    results = asyncio.run(check_sandbox(ChildSandbox))
    assert {result.name for result in results} == set(SANDBOX_CHECKS)
    assert {result.name: result.detail for result in results if result.outcome == "failed"} == {}
    assert [result.name for result in results if result.outcome == "skipped"] == ["isolation"]


@pytest.mark.parametrize(
    ("sandbox", "name", "detail"),
    [
        (WithoutStdin, "programs", "EOF when reading"),
        pytest.param(WithoutClock, "wall clock", "did not end within", marks=pytest.mark.slow),
        (WithoutOutputLimit, "output", "but the limit is 10000"),
        pytest.param(WithoutMemoryLimit, "memory", "a program used", marks=pytest.mark.slow),
        (Optimistic, "bad endings", "is reported as"),
        (WithoutExitCode, "programs", "exit_code = None with outcome 'finished'"),
        (Late, "programs", "wall_seconds is 1000000.0"),
        (Raises, "bad endings", "raised RuntimeError"),
        (Mixed, "concurrency", "should print their numbers"),
        (Boasting, "isolation", "isolates is True, but a program reads a file of this user"),
    ],
)
def test_a_sandbox_that_lies_is_caught(
    failure: Callable[[type[Sandbox], str], str], sandbox: type[Sandbox], name: str, detail: str
) -> None:
    assert detail in failure(sandbox, name)


def test_a_shared_folder_is_seen(
    failure: Callable[[type[Sandbox], str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").touch()
    assert "a program finds files of an earlier one" in failure(Shared, "separation")
