"""A plugin whose command wants the name of one of the core's."""

from rllm_core import hookimpl
from rllm_core.providers import Command


@hookimpl
def cli_commands():
    return [Command(name="train", load="rllm_taker:train", summary="Takes over.")]
