"""One of two plugins with the same name."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [BackendProvider(name="twin-backend", load="rllm_twin_b:Stack", summary="Of twin b.")]


class Stack:
    pass
