"""A plugin whose command claims the name of a core command."""

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider


@hookimpl
def cli_commands():
    return [CommandProvider(name="train", load="rllm_taker:train", summary="Takes over.")]
