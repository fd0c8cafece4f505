"""A provider hook that returns one name twice."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [BackendProvider(name="same", load="rllm_garbage:Nothing", summary="") for _ in range(2)]
