"""Plugin with lightweight test providers: ``plugins.register(rllm_devkit.scripted_plugin, "testing")``."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import BackendProvider, EngineProvider, ParserProvider, WorkflowProvider

_SCRIPTED = "rllm_devkit.scripted"


@hookimpl
def backends() -> list[BackendProvider]:
    """Provides the scripted backend, separated and colocated."""
    return [
        BackendProvider(
            name="scripted", load=f"{_SCRIPTED}:ScriptedBackend", summary="Scripted.", default_parser="bytes"
        ),
        BackendProvider(
            name="scripted_colocated",
            load=f"{_SCRIPTED}:ScriptedColocatedBackend",
            summary="Scripted, colocated.",
            default_parser="bytes",
        ),
    ]


@hookimpl
def rollout_engines() -> list[EngineProvider]:
    """Provides the scripted engine, standalone."""
    return [EngineProvider(name="scripted", load=f"{_SCRIPTED}:ScriptedEngine", summary="Scripted.")]


@hookimpl
def parsers() -> list[ParserProvider]:
    """Provides the byte parser."""
    return [ParserProvider(name="bytes", load=f"{_SCRIPTED}:ByteParser", summary="UTF-8 bytes as tokens.")]


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Provides the scripted workflow."""
    return [
        WorkflowProvider(
            name="say_yes",
            load=f"{_SCRIPTED}:ScriptedWorkflow",
            summary="Say yes.",
            config=f"{_SCRIPTED}:ScriptedWorkflowConfig",
        )
    ]
