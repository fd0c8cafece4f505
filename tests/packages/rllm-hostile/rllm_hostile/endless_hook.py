"""A provider hook that never returns."""

import time

from rllm_core import hookimpl


@hookimpl
def workflows():
    while True:
        time.sleep(0.05)
