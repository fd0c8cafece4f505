"""Backend ``placeholder`` for rllm-core: hooks only, so that listing it imports nothing else."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Backend, Parser

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[Backend]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        Backend(
            name="placeholder",
            load="rllm_placeholder.backend:PlaceholderBackend",
            summary="Trains a table of logits in numpy.",
            default_parser="placeholder",
        )
    ]


@hookimpl
def parsers() -> list[Parser]:
    """Bytes as tokens, since a table has no tokenizer; a backend with a real model needs no parser of its own."""
    return [
        Parser(
            name="placeholder",
            load="rllm_placeholder.backend:PlaceholderParser",
            summary="Bytes as tokens.",
        )
    ]
