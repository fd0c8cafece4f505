"""Results of checks, and the runner of asynchronous checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

SubjectT = TypeVar("SubjectT")
Check = Callable[[SubjectT], Awaitable[str]]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        name: Name of the check.
        outcome: ``skipped`` if the check does not apply, ``warning`` if the problem violates no contract.
        detail: Findings; for a failed check, the violation.
    """

    name: str
    outcome: Literal["passed", "failed", "skipped", "warning"]
    detail: str


class Violation(Exception):
    """A provider violates its contract."""


class NotApplicable(Exception):
    """A check does not apply."""


async def checked(subject: SubjectT, checks: Mapping[str, Check[SubjectT]]) -> list[CheckResult]:
    """Runs checks one after the other."""
    return [await _result(name, check, subject) for name, check in checks.items()]


async def _result(name: str, check: Check[SubjectT], subject: SubjectT) -> CheckResult:
    async def run() -> str:
        return await check(subject)

    # A separate task, to distinguish a cancellation that leaks out of the provider from one by our caller.
    task = asyncio.create_task(run(), name=f"check: {name}")
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    try:
        return CheckResult(name, "passed", task.result())
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Violation as problem:
        return CheckResult(name, "failed", str(problem))
    except asyncio.CancelledError:
        return CheckResult(name, "failed", "a call raised CancelledError without being cancelled")
    except Exception as error:  # an error in one check must not stop the others
        return CheckResult(name, "failed", " ".join(f"raised {type(error).__name__}: {error}".split()))
