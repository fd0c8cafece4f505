"""Hooks of backend ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider, ParserProvider

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[BackendProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        BackendProvider(
            name="placeholder",
            load="rllm_placeholder.backend:PlaceholderBackend",
            summary="Trains a table of logits in numpy.",
            default_parser="placeholder",
        )
    ]


@hookimpl
def parsers() -> list[ParserProvider]:
    """Provides bytes as tokens, because a table has no tokenizer. Delete this for a real model."""
    return [
        ParserProvider(
            name="placeholder",
            load="rllm_placeholder.parser:PlaceholderParser",
            summary="Bytes as tokens.",
        )
    ]
