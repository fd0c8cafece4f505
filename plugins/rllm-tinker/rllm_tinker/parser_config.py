"""The part of ``[tinker]`` that parser ``tinker`` reads; backend and parser share one section. Light: no SDK."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rllm_core.config import Section
from rllm_core.errors import ConfigError

INSTALL = "pip install 'rllm-tinker[cookbook]'"
WITHOUT = 'or set parser = "chat_template" or "renderer" (of rllm-renderers), which need no cookbook'


def missing(error: ImportError) -> ConfigError:
    """What to say where something of the extra is not installed."""
    return ConfigError(
        f"parser 'tinker' needs Tinker's own renderers, but {error.name or 'tinker-cookbook'} is not installed; "
        f"run: {INSTALL} (it brings torch), {WITHOUT}"
    )


class ParserConfig(Section):
    """How conversations are written, if that is done by Tinker's own renderers (parser ``tinker``)."""

    renderer: Annotated[
        str,
        Field(
            description="Parser tinker: name of a renderer of tinker-cookbook (qwen3, llama3, ...); auto is the one "
            "that the cookbook's table recommends for the model's name, which says nothing about folders."
        ),
    ] = "auto"
    bridge: Annotated[
        bool,
        Field(
            description="Parser tinker: carry a conversation's sampled tokens, reasoning included, into its next "
            "prompt where that is proven exact; false renders every turn anew, as the renderer has it."
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, Field(description="Parser tinker: run tokenizer code that comes with the model; only if you trust it.")
    ] = False
