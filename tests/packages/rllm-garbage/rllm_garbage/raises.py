"""A provider hook that raises halfway."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    yield BackendProvider(name="half", load="rllm_garbage:Nothing", summary="Must not be selectable.")
    yield BackendProvider(name="Not A Name", load="rllm_garbage:Nothing", summary="")
