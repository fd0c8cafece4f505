"""Plugin with lightweight test providers: ``plugins.register(rllm_devkit.scripted_plugin, "testing")``."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import Backend, Engine, Parser, Workflow

_SCRIPTED = "rllm_devkit.scripted"


@hookimpl
def backends() -> list[Backend]:
    """The scripted backend, separated and colocated."""
    return [
        Backend(name="scripted", load=f"{_SCRIPTED}:ScriptedBackend", summary="Scripted.", default_parser="bytes"),
        Backend(
            name="scripted_colocated",
            load=f"{_SCRIPTED}:ScriptedColocatedBackend",
            summary="Scripted, colocated.",
            default_parser="bytes",
        ),
    ]


@hookimpl
def rollout_engines() -> list[Engine]:
    """The scripted engine, standalone."""
    return [Engine(name="scripted", load=f"{_SCRIPTED}:ScriptedEngine", summary="Scripted.")]


@hookimpl
def parsers() -> list[Parser]:
    """The byte parser."""
    return [Parser(name="bytes", load=f"{_SCRIPTED}:ByteParser", summary="UTF-8 bytes as tokens.")]


@hookimpl
def workflows() -> list[Workflow]:
    """The scripted workflow."""
    return [
        Workflow(
            name="say_yes",
            load=f"{_SCRIPTED}:ScriptedWorkflow",
            summary="Say yes.",
            config=f"{_SCRIPTED}:ScriptedWorkflowConfig",
        )
    ]
