"""A provider hook that returns other objects than records, next to a correct one."""

from rllm_core import hookimpl
from rllm_core.providers import Parser


@hookimpl
def parsers():
    return [Parser(name="garbage-parser", load="rllm_garbage:Nothing", summary="Must not be selectable.")]


@hookimpl
def backends():
    return [{"name": "garbage"}]
