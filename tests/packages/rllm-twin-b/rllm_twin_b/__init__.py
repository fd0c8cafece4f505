"""One of two plugins with the same name."""

from rllm_core import hookimpl
from rllm_core.providers import Backend


@hookimpl
def backends():
    return [Backend(name="twin-backend", load="rllm_twin_b:Stack", summary="Of twin b.")]


class Stack:
    pass
