"""A provider hook that raises halfway."""

from rllm_core import hookimpl
from rllm_core.providers import Backend


@hookimpl
def backends():
    yield Backend(name="half", load="rllm_garbage:Nothing", summary="Must not be selectable.")
    yield Backend(name="Not A Name", load="rllm_garbage:Nothing", summary="")
