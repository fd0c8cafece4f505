"""A hook with a misspelled name, next to a correct one."""

from rllm_core import hookimpl
from rllm_core.providers import ParserProvider


@hookimpl
def parsers():
    return [ParserProvider(name="leaked", load="rllm_misspelt:Nothing", summary="Must not be selectable.")]


@hookimpl
def backend():
    return []
