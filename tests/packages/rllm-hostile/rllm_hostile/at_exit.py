"""Never lets the process end."""

import atexit
import threading

from rllm_core import hookimpl
from rllm_hostile.records import workflow


@atexit.register
def forever():
    threading.Event().wait()


@hookimpl
def workflows():
    return workflow("at-exit")
