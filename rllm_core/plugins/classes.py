"""Workflows that a Python program passes as classes: ``python:Echo`` replaces the name of an installed workflow.

A run file can thus name a class that no file contains, such as a notebook's, but only the same program can load it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rllm_core.errors import ConfigError, PluginError
from rllm_core.file_references import CLASS_PREFIX, is_file_reference, section_name
from rllm_core.plugins.blame import definition
from rllm_core.plugins.listing import PluginInfo, Provided
from rllm_core.providers import Provider, WorkflowProvider, module_name_of, resolve

ProviderT = TypeVar("ProviderT", bound=Provider)

MODULE = "rllm_classes_of_the_program"


def named(workflow: type, installed: Mapping[str, Provided[WorkflowProvider]]) -> str:
    """Returns the name of a workflow class for a run file.

    Returns:
        The workflow's own name if it is installed; ``/folder/file.py:Echo`` if it is in a module imported from a file;
        otherwise ``python:Echo``.

    Raises:
        ConfigError: If the class is not a workflow.
    """
    contract = resolve(WorkflowProvider.contract)
    if not issubclass(workflow, contract) or inspect.isabstract(workflow):
        missing = ", ".join(sorted(getattr(workflow, "__abstractmethods__", ()))) or "rllm_core.workflow.Workflow"
        raise ConfigError(f"class {workflow.__qualname__} is not a complete workflow; it lacks {missing}")
    path = f"{workflow.__module__}:{workflow.__qualname__}"
    for name, provided in installed.items():
        if provided.record.load == path:
            return name
    return _in_file(workflow) or _in_program(workflow)


def _in_file(workflow: type) -> str | None:
    """Names a class by its file, and makes later loads of the file return the module that is already imported.

    Returns None for the program's own file, which must not be loaded again: it might train again, and may change
    between two launches.
    """
    name, module = workflow.__name__, sys.modules.get(workflow.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__" or name.startswith("_"):
        return None
    reference = f"{Path(file).resolve()}:{name}"
    if vars(module).get(name) is not workflow or not is_file_reference(reference):
        return None
    sys.modules[module_name_of(str(Path(file).resolve()))] = module
    return reference


def _in_program(workflow: type) -> str:
    module = sys.modules.setdefault(MODULE, types.ModuleType(MODULE, __doc__))
    reference = f"{CLASS_PREFIX}{vars(workflow).get('name', workflow.__name__)}"
    setattr(module, _attribute(reference), workflow)
    return reference


def _attribute(reference: str) -> str:
    return "of_" + re.sub(r"\W", "_", reference.removeprefix(CLASS_PREFIX))


def provided_by_class(kind: type[ProviderT], reference: str) -> Provided[ProviderT]:
    """Returns the provider of a class that this program has passed.

    Raises:
        PluginError: If the program has passed no class of this name.
    """
    name, attribute = reference.removeprefix(CLASS_PREFIX), _attribute(reference)
    workflow = getattr(sys.modules.get(MODULE), attribute, None)
    if workflow is None or kind is not WorkflowProvider:
        raise PluginError(
            f"{kind.kind} {reference!r} is a class of a Python program or notebook, which only that program can use, "
            f"such as with rllm_core.train({name}, run_dir=..., resume=True); for the command line, write it to a file"
        )
    has_section = bool(workflow.config_model.model_fields)
    record = kind(
        name=section_name(reference),
        load=f"{MODULE}:{attribute}",
        summary=f"class {workflow.__qualname__} of this program",
        config=f"{MODULE}:{attribute}.config_model" if has_section else None,
    )
    return Provided(record, PluginInfo(name, "", "", reference, "loaded"))


def source_of(reference: str) -> str:
    """Returns the source code of a class that this program has passed, and of its settings; "" if unavailable."""
    workflow: Any = getattr(sys.modules[MODULE], _attribute(reference))
    frame = definition(workflow)
    text = "".join(linecache.getlines(frame.file)) if frame is not None else ""
    if frame is None or not text:
        return ""
    wanted = {workflow.__name__, workflow.config_model.__name__}
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name in wanted]
    lines = text.splitlines()
    found = []
    for node in sorted(classes, key=lambda node: node.lineno):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(found) + "\n"
