"""Selects a workflow that only another Python interpreter can import (``rollout.python``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm_core.errors import ConfigError, PluginError
from rllm_core.file_references import section_name
from rllm_core.hosts.elsewhere import no_interpreter
from rllm_core.plugins import Provided
from rllm_core.plugins.listing import PluginInfo
from rllm_core.providers import WorkflowProvider
from rllm_core.run_file import Preset

ANSWERS = ("load", "summary", "package", "version", "samples", "tables", "reason")
FLAGS = ("blocks", "global_state", "waits_for_others")


@dataclass(frozen=True, kw_only=True)
class ElsewhereProvider(WorkflowProvider):
    """A workflow in another interpreter.

    Attributes:
        path: Dotted path of the workflow's class there.
        samples: See `rllm_core.workflow.Workflow`.
        warm_starts: Whether the workflow has conversations for a model made from scratch.
    """

    python: str
    path: str
    samples: bool = True
    warm_starts: bool = False
    preset: Preset = field(default_factory=lambda: Preset({}, ""))


def provided_elsewhere(
    python: str, name: str, given: Mapping[str, Any]
) -> tuple[Provided[WorkflowProvider], str, str | None]:
    """Asks an interpreter for a workflow.

    Returns:
        The workflow, its own name in the run file, and the variant at the end of ``name``, if any.

    Raises:
        ConfigError: If the interpreter cannot be started, or rejects the workflow's section.
        PluginError: If the interpreter does not have the workflow, or the workflow is broken.
    """
    question = json.dumps({"workflow": name, "given": given}, default=str)
    command = [python, "-m", "rllm_core.assembly.describe"]
    try:
        asked = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise no_interpreter(python, error) from error
    try:
        answer = None if asked.returncode else json.loads(asked.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        what = f"ended with exit code {asked.returncode}" if asked.returncode else "did not describe the workflow"
        raise PluginError(
            f"rollout.python = {python!r} {what}; it must be the Python interpreter of an environment that has "
            "rllm-core and the workflow"
        )
    if "error" in answer:
        raise (ConfigError if answer["is_config"] else PluginError)(
            f"{answer['error']} (of rollout.python = {python!r})"
        )
    missing = [key for key in (*ANSWERS, *FLAGS) if key not in answer]
    if missing:
        raise PluginError(f"rollout.python = {python!r} described the workflow without {', '.join(missing)}")
    variant = answer.get("variant")
    own = name if variant is None else name.removesuffix(f"/{variant}")
    record = ElsewhereProvider(
        name=section_name(own).rpartition("/")[2],
        load="rllm_core.hosts.elsewhere:WorkflowElsewhere",
        config="rllm_core.hosts.elsewhere:ElsewhereConfig",
        summary=answer["summary"],
        python=python,
        path=answer["load"],
        samples=answer["samples"],
        warm_starts=answer.get("warm_starts", False),
        preset=Preset(answer["tables"], answer["reason"]),
        **{flag: answer[flag] for flag in FLAGS},
    )
    plugin = PluginInfo(own, answer["package"], answer["version"], answer["load"], "loaded")
    return Provided(record, plugin), own, variant
