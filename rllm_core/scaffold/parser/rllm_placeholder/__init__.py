"""Parser ``placeholder`` for rllm-core: hooks only, so that listing it imports nothing else."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Parser

RLLM_CORE_API = "1.0"


@hookimpl
def parsers() -> list[Parser]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        Parser(
            name="placeholder",
            load="rllm_placeholder.parser:PlaceholderParser",
            summary="ChatML over the model's own tokenizer; text only.",
        )
    ]
