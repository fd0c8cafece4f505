"""Writes to standard output bypassing ``sys.stdout``, directly and from a child process."""

import os
import subprocess

from rllm_core import hookimpl
from rllm_hostile.records import workflow

os.write(1, b"] straight to the descriptor\n")


@hookimpl
def workflows():
    subprocess.run(["echo", "] from a child"], check=True)
    return workflow("writes")
