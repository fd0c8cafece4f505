"""Ignores every signal it can."""

import signal

from rllm_core import hookimpl
from rllm_hostile.records import workflow

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)


@hookimpl
def workflows():
    return workflow("signals")
