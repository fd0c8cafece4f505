"""Provides a backend with the same name as rllm-good."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [BackendProvider(name="good", load="rllm_rival.stack:Stack", summary="A rival backend.")]
