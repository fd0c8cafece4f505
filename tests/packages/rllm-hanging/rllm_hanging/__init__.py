"""A backend whose import never ends."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [BackendProvider(name="hanging", load="rllm_hanging.stack:Any", summary="Hangs.")]
