"""Engine ``placeholder`` for rllm-core: hooks only, so that listing it imports nothing else."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Engine, Parser

RLLM_CORE_API = "1.0"


@hookimpl
def rollout_engines() -> list[Engine]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        Engine(
            name="placeholder",
            load="rllm_placeholder.engine:PlaceholderEngine",
            config="rllm_placeholder.engine:PlaceholderConfig",
            summary="A random table of logits.",
        )
    ]


@hookimpl
def parsers() -> list[Parser]:
    """Bytes as tokens, since a table has no tokenizer; an engine with a real model needs no parser of its own."""
    return [
        Parser(
            name="placeholder",
            load="rllm_placeholder.engine:PlaceholderParser",
            summary="Bytes as tokens.",
        )
    ]
