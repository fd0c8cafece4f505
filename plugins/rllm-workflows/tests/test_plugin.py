from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import rllm_workflows

from rllm_core.assembly.resolution import preset_of
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.providers import WorkflowProvider
from rllm_core.workflow import Workflow

RECORDS = rllm_workflows.workflows()
CONVERSATIONS = str(Path(__file__).parent / "conversations.jsonl")
NEEDED = {
    "dataset": {"train_file": str(Path(__file__).parent / "questions.jsonl")},
    "sft": {"train": CONVERSATIONS, "validation": CONVERSATIONS},
}


def load(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_the_entry_point_is_this_module():
    [found] = [point for point in entry_points(group="rllm_core") if point.name == "workflows"]
    assert found.load() is rllm_workflows


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_records_lead_to_workflows(record):
    workflow_class, config_class = load(record.load), load(record.config)
    section = NEEDED.get(record.name, {})
    assert issubclass(workflow_class, Workflow)
    assert workflow_class.name == record.name
    assert workflow_class.config_model is config_class
    assert workflow_class(config_class(**section)).tasks("validation")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_run_files_hold_known_keys_only(record):
    plugins = PluginManager()
    plugins.register(rllm_workflows, "workflows")
    tables = dict(preset_of(plugins.select(WorkflowProvider, record.name), plugins, {}).tables)
    load(record.config).model_validate({**NEEDED.get(record.name, {}), **tables.pop(record.name, {})})
    config = RunConfig.model_validate({"workflow": record.name, **tables})
    assert config.training.model_dump().items() >= tables["training"].items()


def test_importing_the_module_imports_no_workflow_and_no_library():
    code = (
        "import sys, rllm_workflows\n"
        "rllm_workflows.workflows()\n"
        "heavy = {'numpy', 'pydantic', 'torch', 'transformers'}\n"
        "print(*(name for name in sys.modules if name in heavy or name.startswith('rllm_workflows.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
