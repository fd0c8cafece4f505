"""Starts a non-daemon thread that never ends."""

import threading

from rllm_core import hookimpl
from rllm_hostile.records import workflow

threading.Thread(target=threading.Event().wait, name="waits-for-ever").start()


@hookimpl
def workflows():
    return workflow("threads")
