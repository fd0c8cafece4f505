"""A plugin for a plugin API version that does not exist yet."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider

RLLM_CORE_API = "2.0"


@hookimpl
def backends():
    return [BackendProvider(name="foreign", load="rllm_foreign_api.backend:ForeignBackend", summary="From the future.")]
