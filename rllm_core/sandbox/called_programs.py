"""Functions of installed packages in a sandbox that can only run programs: each call is a separate program."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rllm_core.providers import PATH_PATTERN
from rllm_core.sandbox.child_functions import ChildDied, ChildOutputTooLong, ChildTimeout, result_in
from rllm_core.sandbox.processes import WORKER
from rllm_core.sandbox.results import CodeResult, Limits

SandboxedFunction = Callable[..., Awaitable[Any]]
ANSWERS = {"error", "memory", "result", "too_long"}


def called_in_program(run_python: Callable[..., Awaitable[CodeResult]], path: str, limits: Limits) -> SandboxedFunction:
    """Returns a function whose calls are programs that ``run_python`` runs; see `rllm_core.sandbox.Sandbox.function`.

    Raises:
        ValueError: If ``path`` is not of the form ``"package.module:function"``.
    """
    if not PATH_PATTERN.fullmatch(path):
        raise ValueError(f"{path!r} is not of the form 'package.module:name'")
    worker = Path(WORKER).read_text(encoding="utf-8").partition('if __name__ == "__main__":')[0]
    source = f"{worker}\nserve({path!r}, {limits.output_bytes}, {limits.wall_seconds})\n"

    async def call(*arguments: Any) -> Any:
        done = await run_python(source, stdin=json.dumps(arguments) + "\n", limits=limits)
        if done.outcome == "timeout":
            raise ChildTimeout(f"{path} took longer than {limits.wall_seconds:g} s")
        if done.outcome == "output_limit":
            raise ChildOutputTooLong(f"the output of {path} has more than {limits.output_bytes} bytes")
        answer = _answer_in(done.stdout)
        if not answer.keys() & ANSWERS:
            how = done.outcome if done.exit_code is None else f"exit code {done.exit_code}"
            raise ChildDied(f"the process of {path} ended ({how}): {done.stderr[-200:]!r}")
        return result_in({**answer, "frames": []}, path, limits)  # do not trust the frames of hostile code

    return call


def _answer_in(stdout: str) -> dict[str, Any]:
    try:
        answer = json.loads(stdout.splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
