"""Observers that try to end the process."""

import sys

from rllm_core import hookimpl


@hookimpl
def on_batch_end():
    sys.exit("from a thread")


@hookimpl
async def on_batch_start():
    sys.exit("from the loop")
