"""One of two plugins with one name."""

from rllm_core import hookimpl
from rllm_core.providers import Backend


@hookimpl
def backends():
    return [Backend(name="twin-backend", load="rllm_twin_a:Stack", summary="Of twin a.")]


class Stack:
    pass
