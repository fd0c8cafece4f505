"""A provider hook that returns other objects than records, next to a correct one."""

from rllm_core import hookimpl
from rllm_core.providers import ParserProvider


@hookimpl
def parsers():
    return [ParserProvider(name="garbage-parser", load="rllm_garbage:Nothing", summary="Must not be selectable.")]


@hookimpl
def backends():
    return [{"name": "garbage"}]
