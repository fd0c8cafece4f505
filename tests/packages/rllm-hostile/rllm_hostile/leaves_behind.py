"""Leaves a process behind that ignores all signals it can, and reports its id."""

import os
import subprocess
import sys
from pathlib import Path

from rllm_core import hookimpl
from rllm_hostile.records import workflow

STAYS = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
left = subprocess.Popen([sys.executable, "-c", STAYS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if "RLLM_TEST_LEFT" in os.environ:
    Path(os.environ["RLLM_TEST_LEFT"]).write_text(str(left.pid), encoding="utf-8")


@hookimpl
def workflows():
    return workflow("leaves-behind")
