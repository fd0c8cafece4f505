"""Backend ``verl``: trains with verl's FSDP workers and samples with its vLLM servers, on Ray.

Importing this module imports neither torch nor verl; the classes behind the records load when they are selected.
"""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider, CommandProvider

__all__ = ["__version__", "backends", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[BackendProvider]:
    """Provides backend ``verl``."""
    return [
        BackendProvider(
            name="verl",
            load="rllm_verl.backend:VerlBackend",
            summary="Training of all weights or adapters on many GPUs and machines with verl (Ray, FSDP and vLLM).",
            config="rllm_verl.config:VerlConfig",
            parsers=("renderer", "chat_template"),
            default_parser="renderer",
            export="rllm_verl.export:write_model",
        )
    ]


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Provides command ``rllm-core verl-export``."""
    return [
        CommandProvider(
            name="verl-export",
            load="rllm_verl.export:command",
            summary="Earlier name of export-model, for backend verl.",
        )
    ]
