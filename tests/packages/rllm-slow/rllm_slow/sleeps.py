"""A plain observer that never returns, in its thread."""

import time

from rllm_core import hookimpl


@hookimpl
def on_batch_end(step):
    time.sleep(3600)
