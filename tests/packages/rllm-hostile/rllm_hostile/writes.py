"""Writes to standard output past ``sys.stdout``, and lets a process of its own do so."""

import os
import subprocess

from rllm_core import hookimpl
from rllm_hostile.records import workflow

os.write(1, b"] straight to the descriptor\n")


@hookimpl
def workflows():
    subprocess.run(["echo", "] from a child"], check=True)
    return workflow("writes")
