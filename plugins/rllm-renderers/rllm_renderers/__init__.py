"""Parsers for rllm-core: convert messages to tokens and back."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import ParserProvider

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def parsers() -> list[ParserProvider]:
    """Provides parsers ``renderer`` and ``chat_template``."""
    return [
        ParserProvider(
            name="chat_template",
            load="rllm_renderers.chat_template:ChatTemplateParser",
            config="rllm_renderers.chat_template:ChatTemplateConfig",
            summary="The chat template and tokenizer of the model folder.",
        ),
        ParserProvider(
            name="renderer",
            load="rllm_renderers.renderer:RendererParser",
            config="rllm_renderers.renderer:RendererConfig",
            summary="The package `renderers`: one hand-written renderer per model family.",
        ),
    ]
