"""A backend whose policy writes a file with the shell of a coding agent, and trains on a step of that."""

from __future__ import annotations

import json
from typing import Any

from playing import Script

from rllm_core import hookimpl
from rllm_core.parser import BaseParser
from rllm_core.providers import BackendProvider
from rllm_devkit.scripted import ScriptedBackend

# Name of each agent's shell, and its argument.
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command", "run_shell_command": "command"}
FILE = "hello.txt"
WORDS = ("hello é", "good “day”")


class Coder(Script):
    """Writes a file, with other words in every second conversation, looks at it, and says that it is done."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = 0

    def say(self, prompt: str) -> str:
        """See `Script.say`."""
        shell = next((name for name in SHELLS if f'{{"name": "{name}"' in prompt), None)
        if shell is None:
            return "A title é"
        match prompt.count("\n<tool_response>\n"):
            case 0:
                self._begun += 1
                words = WORDS[self._begun % len(WORDS)]
                return f"<think>\nhm\n</think>\n\nI write it.\n{_call(shell, f'printf %s  {words!r} > {FILE}')}"
            case 1:
                return _call(shell, f"cat {FILE}")
        return "All done é."


def _call(shell: str, command: str) -> str:
    more = {"is_background": False} if shell == "run_shell_command" else {}
    arguments = {SHELLS[shell]: command, "description": "greets", **more}
    if shell == "exec_command":
        del arguments["description"]
    said = json.dumps({"name": shell, "arguments": arguments}, ensure_ascii=False, separators=(" , ", ":"))
    return f"<tool_call>\n{said}\n</tool_call>"


class CodingBackend(ScriptedBackend):
    """Trains a number, but counts tokens as any backend does."""

    name = "coding"

    async def init_rollout_engine(self, parser: BaseParser) -> Any:
        """See `BackendProtocol.init_rollout_engine`."""
        self.rollout_engine = Coder()
        return self.rollout_engine


@hookimpl
def backends() -> list[BackendProvider]:
    """The backend."""
    return [
        BackendProvider(
            name="coding", load="coding:CodingBackend", summary="Writes a file.", default_parser="chat_template"
        )
    ]
