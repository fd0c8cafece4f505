"""Selects a workflow that only another Python interpreter can import (``rollout.python``).

That interpreter runs this module as a script: it reads a question from standard input, and answers with the record of
the workflow, its own run file, and what is wrong with the settings, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.file_references import section_name
from rllm_core.hosts.elsewhere import no_interpreter
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.listing import PluginInfo
from rllm_core.providers import WorkflowProvider
from rllm_core.run_file import Preset

_FLAGS = ("blocks", "global_state", "waits_for_others")


@dataclass(frozen=True, kw_only=True)
class ElsewhereProvider(WorkflowProvider):
    """A workflow that another interpreter has.

    Attributes:
        python: The interpreter.
        path: Dotted path of the workflow's class there.
        samples: See `rllm_core.workflow.Workflow`.
        preset: Its own run file.
    """

    python: str
    path: str
    samples: bool = True
    preset: Preset = field(default_factory=lambda: Preset({}, ""))


def provided_elsewhere(python: str, name: str, given: Mapping[str, Any]) -> Provided[WorkflowProvider]:
    """Asks an interpreter for a workflow.

    Args:
        python: The interpreter.
        name: Name of the workflow in the run file.
        given: Tables that the user gave.

    Raises:
        ConfigError: If the interpreter cannot be started, or rejects the workflow's section.
        PluginError: If it does not have the workflow, or the workflow is broken.
    """
    question = json.dumps({"workflow": name, "given": given}, default=str)
    command = [python, "-m", "rllm_core.assembly.elsewhere"]
    try:
        asked = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise no_interpreter(python, error) from error
    if asked.returncode:
        raise PluginError(
            f"rollout.python = {python!r} ended with exit code {asked.returncode}; it must be the Python interpreter "
            "of an environment that has rllm-core and the workflow"
        )
    answer = json.loads(asked.stdout)
    if "error" in answer:
        raise (ConfigError if answer["is_config"] else PluginError)(
            f"{answer['error']} (of rollout.python = {python!r})"
        )
    record = ElsewhereProvider(
        name=section_name(name),
        load="rllm_core.hosts.elsewhere:WorkflowElsewhere",
        config="rllm_core.hosts.elsewhere:ElsewhereConfig",
        summary=answer["summary"],
        python=python,
        path=answer["load"],
        samples=answer["samples"],
        preset=Preset(answer["tables"], answer["reason"]),
        **{flag: answer[flag] for flag in _FLAGS},
    )
    return Provided(record, PluginInfo(name, answer["package"], answer["version"], answer["load"], "loaded"))


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a question in the other interpreter."""
    from rllm_core.assembly.resolution import checked_section, preset_of  # it imports this module

    name, given, plugins = question["workflow"], question["given"], PluginManager.from_environment()
    workflow = plugins.select(WorkflowProvider, name)
    workflow_class, preset = plugins.load(workflow), preset_of(workflow, plugins, given)
    checked_section(workflow, plugins, preset, given, section_name(name))
    record = workflow.record
    return {
        "load": record.load,
        "summary": record.summary,
        "package": workflow.plugin.package,
        "version": workflow.plugin.version,
        "samples": workflow_class.samples,
        "tables": preset.tables,
        "reason": preset.reason,
        **{flag: getattr(record, flag) for flag in _FLAGS},
    }


def main() -> None:
    """Answers the question on standard input."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what plugins print is no answer
        try:
            answer = _answer(json.load(sys.stdin))
        except UserError as error:
            answer = {"error": str(error), "is_config": isinstance(error, ConfigError)}
        json.dump(answer, output, default=str)


if __name__ == "__main__":
    main()
