"""Tests of the sandbox: contract and results."""

from __future__ import annotations

import asyncio

from rllm_core.sandbox import CodeResult, Limits
from rllm_devkit.contracts import SandboxContract

from rllm_placeholder.sandbox import PlaceholderSandbox


class TestContract(SandboxContract):
    """Runs each contract check as a test."""

    name = "placeholder"


def ran(source: str, stdin: str = "", limits: Limits | None = None) -> CodeResult:
    async def run() -> CodeResult:
        sandbox = PlaceholderSandbox()
        try:
            return await sandbox.run_python(source, stdin=stdin, limits=limits)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def test_a_program_reads_and_prints() -> None:
    result = ran("print(int(input()) + 1)", stdin="41")
    assert (result.outcome, result.exit_code, result.stdout) == ("finished", 0, "42\n")


def test_nothing_is_left_of_a_program() -> None:
    result = ran("import os, time; os.fork(); time.sleep(60)", limits=Limits(wall_seconds=1.0))
    assert (result.outcome, result.exit_code) == ("timeout", None)
    assert result.wall_seconds < 30


def test_output_is_cut() -> None:
    result = ran("while True: print('x' * 99)", limits=Limits(output_bytes=1000))
    assert (result.outcome, len(result.stdout)) == ("output_limit", 1000)
