"""rllm-verl: backend ``verl``, which trains with verl's FSDP workers and samples with its vLLM servers, on Ray.

Importing this imports neither torch nor verl: the classes behind the records are loaded when they are selected.
"""

from rllm_core import hookimpl
from rllm_core.providers import Backend, Command

__all__ = ["__version__", "backends", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[Backend]:
    """Backend ``verl``."""
    return [
        Backend(
            name="verl",
            load="rllm_verl.backend:VerlBackend",
            summary="Ray, FSDP and vLLM through verl: many GPUs, many machines, all weights.",
            config="rllm_verl.config:VerlConfig",
            parsers=("renderer", "chat_template"),
            default_parser="renderer",
        )
    ]


@hookimpl
def cli_commands() -> list[Command]:
    """``rllm-core verl-export``."""
    return [
        Command(
            name="verl-export",
            load="rllm_verl.export:command",
            summary="Write a checkpoint of backend verl as an ordinary Hugging Face folder.",
        )
    ]
