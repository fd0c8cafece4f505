"""Checks a record's class against the contract of its kind, and class and record against the run-file section."""

from __future__ import annotations

import inspect
from typing import Any

from rllm_core import providers
from rllm_core.providers import CommandProvider, Provider

WITH_SECTION: tuple[type[Provider], ...] = (
    providers.WorkflowProvider,
    providers.BackendProvider,
    providers.EngineProvider,
    providers.ParserProvider,
    providers.RolloutHostProvider,
    providers.TrackerProvider,
)
WITH_OPTIONS: tuple[type[Provider], ...] = (
    providers.AdvantageEstimatorProvider,
    providers.PolicyLossProvider,
    providers.CorrectionProvider,
    providers.GroupScorerProvider,
    providers.TaskSamplerProvider,
)


def breach(record: Provider, found: object, contract: Any) -> str | None:
    """Describes why an object cannot be used as a provider of its kind; None if it can.

    ``contract`` is None for a reward function.
    """
    name = record.contract.replace(":", ".")
    if contract is None:
        fits, wanted = _takes_task_and_text(found), "a function that is called with two arguments, (task, text)"
    elif isinstance(record, CommandProvider):
        fits, wanted = isinstance(found, contract), f"a {name}"
    else:
        fits, wanted = isinstance(found, type) and issubclass(found, contract), f"a subclass of {name}"
    return None if fits else f"{record.load} must be {wanted}"


def _takes_task_and_text(found: Any) -> bool:
    try:
        inspect.signature(found).bind(None, "")
    except TypeError:  # no function, or one with other parameters
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def wrong_model(record: Provider, model: object) -> str | None:
    """Describes why the object that ``record.config`` names is not a pydantic model; None if it is one."""
    if isinstance(model, type) and hasattr(model, "model_validate_json") and hasattr(model, "model_fields"):
        return None
    return (
        f"config={record.config!r} in its record is a {type(model).__name__}, not a pydantic model; use a subclass of "
        "rllm_core.config.Section"
    )


def disagreement(record: Provider, found: object, model: object) -> str | None:
    """Describes how a class and its record disagree about settings, with the fix; None if they agree.

    A class may declare the model of its section as ``config_model``, as every workflow does. The record must then name
    the same model or a subclass; otherwise the run file rejects every key of the section.
    ``model`` is None if the record names none, or if its kind has no sections.
    """
    declared = getattr(found, "config_model", None)
    if not isinstance(record, WITH_SECTION):
        return _without_section(record, declared)
    if model is None:
        if not getattr(declared, "model_fields", None):
            return None
        return (
            f"class {record.load} declares config_model = {_name(declared)}, but its record has no config, so no run "
            f"file can set its keys; write config={_path(declared)} in the {type(record).__name__}(...) record"
        )
    if declared is None or declared is model or _extends(model, declared):
        return None
    return (
        f"class {record.load} declares config_model = {_name(declared)}, but its record config={_path(model)}; write "
        f"config_model = {_name(model)} in the class, or config={_path(declared)} in the {type(record).__name__}(...) "
        "record"
    )


def _extends(model: object, declared: object) -> bool:
    """Whether ``model`` has every key of ``declared``, ignoring the empty base model of workflows."""
    is_subclass = isinstance(model, type) and isinstance(declared, type) and issubclass(model, declared)
    return is_subclass and bool(getattr(declared, "model_fields", None))


def _without_section(record: Provider, declared: object) -> str | None:
    has_options = isinstance(record, WITH_OPTIONS)
    if record.config is not None:
        instead = "declare options_model in its class and remove config" if has_options else "remove it"
        return f"its record has config={record.config!r}, but no {record.kind} has a section in a run file; {instead}"
    if getattr(declared, "model_fields", None):
        instead = "rename it to options_model" if has_options else f"remove it: no {record.kind} has settings"
        return f"class {record.load} declares config_model = {_name(declared)}, which nothing reads; {instead}"
    return None


def _name(model: Any) -> str:
    return str(getattr(model, "__qualname__", repr(model)))


def _path(model: Any) -> str:
    return f'"{getattr(model, "__module__", "?")}:{_name(model)}"'
