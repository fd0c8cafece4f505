"""rllm-tinker: backend ``tinker``, which trains and samples through the tinker SDK, and the parser that goes with it.

Importing this imports no SDK: the classes behind the records are loaded when they are selected.
"""

from rllm_core import hookimpl
from rllm_core.providers import Backend, Parser

__all__ = ["__version__", "backends", "parsers"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[Backend]:
    """Backend ``tinker``."""
    return [
        Backend(
            name="tinker",
            load="rllm_tinker.backend:TinkerBackend",
            summary="LoRA through the tinker SDK: the hosted service, or a server of your own (base_url).",
            config="rllm_tinker.config:TinkerConfig",
            default_parser="tinker",
        )
    ]


@hookimpl
def parsers() -> list[Parser]:
    """Parser ``tinker``, which needs the extra ``cookbook``."""
    return [
        Parser(
            name="tinker",
            load="rllm_tinker.parser:TinkerParser",
            config="rllm_tinker.config:TinkerConfig",
            summary="Tinker's own renderers, one per model family; needs rllm-tinker[cookbook].",
        )
    ]
