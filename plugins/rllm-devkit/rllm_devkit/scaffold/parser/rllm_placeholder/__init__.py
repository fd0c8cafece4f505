"""Hooks of parser ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import ParserProvider

RLLM_CORE_API = "1.0"


@hookimpl
def parsers() -> list[ParserProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        ParserProvider(
            name="placeholder",
            load="rllm_placeholder.parser:PlaceholderParser",
            summary="ChatML with the model's own tokenizer; text only.",
        )
    ]
