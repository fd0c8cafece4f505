"""The section of a provider: its record names the model that checks it, its class reads it, and both must agree."""

from __future__ import annotations

from typing import Any

from rllm_core.providers import (
    AdvantageEstimator,
    Backend,
    Correction,
    Engine,
    Parser,
    PolicyLoss,
    Provider,
    Tracker,
    Workflow,
)

WITH_SECTION: tuple[type[Provider], ...] = (Workflow, Backend, Engine, Parser, Tracker)
WITH_OPTIONS: tuple[type[Provider], ...] = (AdvantageEstimator, PolicyLoss, Correction)


def wrong_model(record: Provider, model: object) -> str | None:
    """What is wrong with what ``record.config`` points at; None if it is a pydantic model."""
    if isinstance(model, type) and hasattr(model, "model_validate_json") and hasattr(model, "model_fields"):
        return None
    return (
        f"config={record.config!r} in its record is a {type(model).__name__}, no pydantic model; name a subclass of "
        "rllm_core.config.Section"
    )


def disagreement(record: Provider, found: object, model: object) -> str | None:
    """How a class and its record contradict each other about settings, and what to write; None if they agree.

    A class may declare the model of its section as ``config_model``, as every workflow does. If it does, the record
    must name the same one or a subclass: without it, every key of the section is unknown to the run file.

    Args:
        record: The record.
        found: What ``record.load`` points at.
        model: What ``record.config`` points at; None if it names nothing, or the kind has no sections.
    """
    declared = getattr(found, "config_model", None)
    if not isinstance(record, WITH_SECTION):
        return _without_section(record, declared)
    if model is None:
        if not getattr(declared, "model_fields", None):
            return None
        return (
            f"class {record.load} declares config_model = {_name(declared)}, and its record no config, so no run file "
            f"could set its keys; write config={_path(declared)} in the {type(record).__name__}(...) record"
        )
    if declared is None or declared is model or _extends(model, declared):
        return None
    return (
        f"class {record.load} declares config_model = {_name(declared)}, and its record config={_path(model)}; write "
        f"config_model = {_name(model)} in the class, or config={_path(declared)} in the {type(record).__name__}(...) "
        "record"
    )


def _extends(model: object, declared: object) -> bool:
    """Whether a model has every key of the one that the class reads; that of all workflows has none."""
    is_subclass = isinstance(model, type) and isinstance(declared, type) and issubclass(model, declared)
    return is_subclass and bool(getattr(declared, "model_fields", None))


def _without_section(record: Provider, declared: object) -> str | None:
    has_options = isinstance(record, WITH_OPTIONS)
    if record.config is not None:
        instead = "declare options_model in its class, and take config out" if has_options else "take it out"
        return f"its record has config={record.config!r}, and no {record.kind} has a section in a run file; {instead}"
    if getattr(declared, "model_fields", None):
        instead = "call it options_model" if has_options else f"no {record.kind} has settings, so take it out"
        return f"class {record.load} declares config_model = {_name(declared)}, which nothing reads; {instead}"
    return None


def _name(model: Any) -> str:
    return str(getattr(model, "__qualname__", repr(model)))


def _path(model: Any) -> str:
    return f'"{getattr(model, "__module__", "?")}:{_name(model)}"'
