"""Describes a workflow to a run in another Python interpreter, see `rllm_core.assembly.elsewhere`. Runs as a script.

The script reads a question from standard input. It answers, as JSON, with the workflow's provider record and its own
run file, or with the problem in the settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rllm_core.assembly.elsewhere import FLAGS
from rllm_core.assembly.resolution import checked_section, preset_of
from rllm_core.assembly.variants import select_workflow
from rllm_core.errors import ConfigError, UserError
from rllm_core.file_references import section_name
from rllm_core.plugins import PluginManager
from rllm_core.run_file import merged
from rllm_core.workflow import Workflow


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to a question."""
    plugins, asked = PluginManager.from_environment(), {**question["given"], "rollout": {}}
    workflow, named = select_workflow(plugins, question["workflow"], asked)
    section = section_name(named["workflow"])
    given = merged(question["given"], named)
    workflow_class, preset = plugins.load(workflow), preset_of(workflow, plugins, given)
    checked_section(workflow, plugins, preset, given, section)
    record = workflow.record
    return {
        "variant": named.get(section, {}).get("environment"),
        "load": record.load,
        "summary": record.summary,
        "package": workflow.plugin.package,
        "version": workflow.plugin.version,
        "samples": workflow_class.samples,
        "warm_starts": workflow_class.warm_start is not Workflow.warm_start,
        "tables": preset.tables,
        "reason": preset.reason,
        **{flag: getattr(record, flag) for flag in FLAGS},
    }


def main() -> None:
    """Answers the question on standard input."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # keep the output of plugins out of the answer
        try:
            answer = _answer(json.load(sys.stdin))
        except UserError as error:
            answer = {"error": str(error), "is_config": isinstance(error, ConfigError)}
        json.dump(answer, output, default=str)


if __name__ == "__main__":
    main()
