"""A plugin whose command claims the name of a core command."""

from rllm_core import hookimpl
from rllm_core.providers import Command


@hookimpl
def cli_commands():
    return [Command(name="train", load="rllm_taker:train", summary="Takes over.")]
