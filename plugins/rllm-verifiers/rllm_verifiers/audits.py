"""Audits tasksets: loads each, and plays whole rollouts with a scripted policy.

``rllm-core environments audit verifiers`` audits the installed tasksets. ``make verifiers-newest`` audits folders::

    python -m rllm_verifiers.audits FOLDER...
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllm_core.engine import TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, SamplingParams
from rllm_verifiers.catalog import variants
from rllm_verifiers.config import VerifiersConfig
from rllm_verifiers.workflow import VerifiersWorkflow

LOAD_SECONDS = 120
PLAY_SECONDS = 180
ROLLOUTS = 2
CALL, ANSWER = "yes", "<answer>1</answer>"
EXAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
MAX_CAUSE = 240


class TookTooLong(BaseException):
    """A taskset did not load in time. Not an `Exception`, so that no environment catches it."""


def audit(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Loads tasksets and plays them.

    Args:
        names: Names or paths, as in ``verifiers.environment``; empty for all installed ones.

    Yields:
        Each name with its finding: ``played``, ``turns``, ``players``, and ``refused`` with the cause if it was not
            played.
    """
    for name in names or variants():
        finding: dict[str, Any] = {"audited": True, "played": False}
        began = time.process_time()
        try:
            with _limit(LOAD_SECONDS):
                # Hold out one prompt besides the first, so that both splits are created.
                workflow = VerifiersWorkflow(VerifiersConfig(environment=name, validation_size=1, train_size=ROLLOUTS))
                tasks = [*workflow.tasks("train")][:ROLLOUTS] or [*workflow.tasks("validation")]
            finding["constructs"] = True
            episodes = asyncio.run(_played(workflow, tasks))
            finding["played"] = True
            finding["players"] = max(len({one.role for one in episode.trajectories}) for episode in episodes)
            turns = [len(one.steps) for episode in episodes for one in episode.trajectories]
            finding["turns"] = str(min(turns)) if min(turns) == max(turns) else f"{min(turns)} to {max(turns)}"
        except ConfigError as error:
            finding["refused"] = str(error)
        except TookTooLong:
            finding["refused"] = f"it did not load within {LOAD_SECONDS} s"
        except TimeoutError:
            finding["refused"] = f"{ROLLOUTS} rollouts did not end within {PLAY_SECONDS} s"
        except Exception as error:  # third-party code
            finding["refused"] = f"its rollouts fail: {type(error).__name__}: {error}"
        if "refused" in finding:
            finding["refused"] = " ".join(finding["refused"].split())[:MAX_CAUSE]
        finding["cpu_seconds"] = round(time.process_time() - began, 2)
        yield name, finding


async def _played(workflow: VerifiersWorkflow, tasks: Sequence[Any]) -> list[Episode]:
    from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination
    from rllm_devkit.scripted import ByteParser, Script, ScriptedEngine

    class Parser(ByteParser):
        """Reads an answer as a call of the first tool, if there are tools."""

        supports_tools = True

        def parse_completion(
            self, completion_ids: Any, *, tools: Sequence[Any] | None = None, **more: Any
        ) -> ParsedCompletion:
            plain = super().parse_completion(completion_ids, tools=tools, **more)
            if not tools or plain.content != CALL:
                return plain
            tool = tools[0]["function"]
            given = _arguments(tool.get("parameters") or {})
            return ParsedCompletion(
                "", None, (ParsedToolCall(tool["name"], given, json.dumps(given)),), Termination.STOP
            )

    engine = ScriptedEngine(Parser(), Script(good=CALL, bad=ANSWER), skill=0.6)
    params = SamplingParams(max_response_tokens=64)
    try:
        await workflow.open()
        rollouts = (
            workflow.run(task, TITOCompleter(engine, seed=seed, sampling_params=params))
            for seed, task in enumerate(tasks)
        )
        return list(await asyncio.wait_for(asyncio.gather(*rollouts), PLAY_SECONDS))
    finally:
        await workflow.close()


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments that fit a tool's schema, if the schema is simple."""
    found = {}
    for name in schema.get("required", ()):
        kind = schema["properties"][name]
        found[name] = kind["enum"][0] if "enum" in kind else EXAMPLES.get(kind.get("type", ""), "1")
    return found


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raises TookTooLong in code that waits for a network or computes for too long."""

    def end(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Audits every taskset in the folders, and prints one line for each, then the counts."""
    names: list[str] = []
    for folder in map(Path, sys.argv[1:]):
        found = [*folder.glob("*.py"), *(one for one in folder.iterdir() if (one / "pyproject.toml").is_file())]
        names += [str(one.resolve()) for one in sorted(found) if "conftest" not in one.name]
    if not names:
        print("usage: python -m rllm_verifiers.audits FOLDER_OF_TASKSETS...", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for name, finding in audit(names):
        counts["played" if finding["played"] else "constructs" if finding.get("constructs") else "refused"] += 1
        print(json.dumps({"environment": Path(name).stem, **finding}), flush=True)
    print(json.dumps({"tasksets": len(names), **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
