"""A plugin whose entry module imports torch (a stand-in of that name is in this package)."""

import torch  # noqa: F401

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [BackendProvider(name="heavy", load="rllm_heavy:Stack", summary="Heavy.")]


class Stack:
    pass
