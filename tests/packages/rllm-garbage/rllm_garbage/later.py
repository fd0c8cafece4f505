"""A provider hook that is async."""

from rllm_core import hookimpl


@hookimpl
async def backends():
    return []
