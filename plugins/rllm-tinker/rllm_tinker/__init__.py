"""Backend ``tinker``, which trains and samples through the tinker SDK, and its parser.

Importing this module does not import the SDK; the classes behind the records load when they are selected.
"""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider, ParserProvider

__all__ = ["__version__", "backends", "parsers"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[BackendProvider]:
    """Provides backend ``tinker``."""
    return [
        BackendProvider(
            name="tinker",
            load="rllm_tinker.backend:TinkerBackend",
            summary="LoRA training through the tinker SDK, on the hosted service or your own server (base_url).",
            config="rllm_tinker.config:TinkerConfig",
            default_parser="tinker",
            export="rllm_tinker.export:export",
        )
    ]


@hookimpl
def parsers() -> list[ParserProvider]:
    """Provides parser ``tinker``, which needs the extra ``cookbook``."""
    return [
        ParserProvider(
            name="tinker",
            load="rllm_tinker.parser:TinkerParser",
            config="rllm_tinker.config:TinkerConfig",
            summary="Tinker's renderers, one per model family; needs rllm-tinker[cookbook].",
        )
    ]
