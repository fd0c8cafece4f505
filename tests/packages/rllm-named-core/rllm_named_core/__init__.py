"""A plugin with the name of the core's own."""

from rllm_core import hookimpl


@hookimpl
def parsers():
    return []
