"""Contract of a sandbox for model-written code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from rllm_core.sandbox.called_programs import SandboxedFunction, called_in_program
from rllm_core.sandbox.results import CodeResult, Limits


class Sandbox(ABC):
    """Runs model-written programs. One instance serves all rollouts of a run concurrently.

    Guarantees to workflows: a call ends shortly after the time limit at the latest. The call returns a result,
    regardless of what the program does. No process of the program keeps running. Programs cannot see each other.

    Attributes:
        name: Name by which ``rollout.sandbox`` in the run file selects it.
        isolates: Whether programs have no access to this user's files, processes and network. If False, do not run
            hostile programs where they could reach anything valuable.
    """

    name: ClassVar[str]
    isolates: ClassVar[bool] = False

    @classmethod
    def unavailable(cls) -> str | None:
        """Returns one line about why this machine cannot run programs, and what to do; None if it can."""
        return None

    @abstractmethod
    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """Runs a Python program in an empty folder.

        Args:
            source: Source code of the program.
            stdin: Text on its standard input.
            limits: Resource limits. Defaults to `Limits()`.

        Raises:
            OSError: If no program can be started on this machine; never because of the program itself.
        """

    def function(self, path: str, limits: Limits | None = None) -> SandboxedFunction:
        """Returns a coroutine version of a function in an installed package: a `ChildFunction` in this sandbox.

        For functions that execute model-written code, such as graders of programs. No call can change the result of
        another call. Whatever the code makes the function return is the result: code that is executed where it is
        graded can give itself any grade.

        By default, each call is a program, whose Python must have the package. `close` ends all functions.

        Args:
            path: ``"package.module:function"``.
            limits: Limits of a call, without the import of the function if the sandbox can tell them apart.

        Raises:
            ValueError: If ``path`` does not have this form.
        """
        return called_in_program(self.run_python, path, limits or Limits())

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases the sandbox's resources. Called once, after the last program of a run."""
