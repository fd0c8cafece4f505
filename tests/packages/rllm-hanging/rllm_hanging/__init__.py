"""A backend whose import never ends."""

from rllm_core import hookimpl
from rllm_core.providers import Backend


@hookimpl
def backends():
    return [Backend(name="hanging", load="rllm_hanging.stack:Any", summary="Hangs.")]
