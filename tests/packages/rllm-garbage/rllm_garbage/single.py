"""A provider hook that returns one record instead of a list."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return BackendProvider(name="alone", load="rllm_garbage:Nothing", summary="")
