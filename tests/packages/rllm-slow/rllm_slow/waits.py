"""An async observer that never returns."""

import asyncio

from rllm_core import hookimpl


@hookimpl
async def on_batch_end(step):
    await asyncio.sleep(3600)
