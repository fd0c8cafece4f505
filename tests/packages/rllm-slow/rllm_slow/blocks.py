"""An async observer that blocks the event loop."""

import time

from rllm_core import hookimpl


@hookimpl
async def on_batch_end(step):
    time.sleep(4.0)
