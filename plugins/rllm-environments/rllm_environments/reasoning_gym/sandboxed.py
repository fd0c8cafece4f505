"""Checkers that execute the model's answer, inside a sandbox that isolates.

Each call starts a Python program, which imports reasoning-gym. The program and the answer share an interpreter, so an
answer that is written for it can still forge its own reward; it cannot reach this user's files or network.
"""

from __future__ import annotations

import json
import secrets
import sys
from importlib import resources

from rllm_core.sandbox import Limits, Sandbox
from rllm_core.services import Score
from rllm_core.types import Task
from rllm_environments.reasoning_gym import child


async def score(sandbox: Sandbox, task: Task, text: str, limits: Limits) -> Score:
    """Scores a text inside the sandbox.

    Args:
        sandbox: Sandbox of the run.
        task: Task whose ``data`` is a recipe with the ``index`` of its question.
        text: Answer of the model.
        limits: Limits of the checker.

    Raises:
        RuntimeError: If the sandbox cannot run reasoning-gym.
    """
    token = secrets.token_hex(16)
    environment, options, seed, size = child.key_of(task.data)
    call = {
        "token": token,
        "paths": [path for path in sys.path if path],
        "environment": environment,
        "options": json.loads(options),
        "seed": seed,
        "size": size,
        "index": task.data["index"],
        "check_seconds": task.data["check_seconds"],
        "text": text,
    }
    result = await sandbox.run_python(_program(), stdin=json.dumps(call), limits=limits)
    said = [line.removeprefix(token).split() for line in result.stdout.splitlines() if line.startswith(token)]
    if ["ready"] not in said:
        raise RuntimeError(
            f"sandbox {sandbox.name!r} cannot run reasoning-gym ({result.outcome}, exit code {result.exit_code}): "
            f"{result.stderr[-300:]}"
        )
    scores = [float(words[1]) for words in said if words[0] == "score"]
    return Score(scores[0], {"rejected": 0.0}) if scores else Score(0.0, {"rejected": 1.0})


def _program() -> str:
    return resources.files(__package__).joinpath("sandbox_program.py").read_text(encoding="utf-8")
