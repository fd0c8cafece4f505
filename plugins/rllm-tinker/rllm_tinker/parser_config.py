"""Keys of ``[tinker]`` that parser ``tinker`` uses; backend and parser share this section. Imports no SDK."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rllm_core.config import Section
from rllm_core.errors import ConfigError

INSTALL = "pip install 'rllm-tinker[cookbook]'"
WITHOUT = 'or set parser = "chat_template" or "renderer" (from rllm-renderers), which do not need the cookbook'


def missing(error: ImportError) -> ConfigError:
    """Returns the error for a missing package of the extra."""
    return ConfigError(
        f"parser 'tinker' needs Tinker's renderers, but {error.name or 'tinker-cookbook'} is not installed; "
        f"run: {INSTALL} (also installs torch), {WITHOUT}"
    )


class ParserConfig(Section):
    """How to render conversations with Tinker's renderers (parser ``tinker``)."""

    renderer: Annotated[
        str,
        Field(
            description="Renderer of tinker-cookbook (qwen3, llama3, ...) for parser tinker. auto uses the cookbook's "
            "recommendation for the model's name; it does not work for model folders."
        ),
    ] = "auto"
    bridge: Annotated[
        bool,
        Field(
            description="Reuse a conversation's sampled tokens, including reasoning, in its next prompt where tests "
            "showed this to be exact. false renders every prompt from the messages. For parser tinker."
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, Field(description="Run tokenizer code that comes with the model. Enable only for models you trust.")
    ] = False
