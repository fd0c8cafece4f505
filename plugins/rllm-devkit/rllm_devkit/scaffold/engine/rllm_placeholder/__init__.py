"""Hooks of engine ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import EngineProvider, ParserProvider

RLLM_CORE_API = "1.0"


@hookimpl
def rollout_engines() -> list[EngineProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        EngineProvider(
            name="placeholder",
            load="rllm_placeholder.engine:PlaceholderEngine",
            config="rllm_placeholder.engine:PlaceholderConfig",
            summary="Samples from a random table of logits.",
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
