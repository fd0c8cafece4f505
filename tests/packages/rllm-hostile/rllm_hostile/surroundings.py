"""Changes state shared by the whole process."""

import os
import sys

from rllm_core import hookimpl
from rllm_hostile.records import workflow

os.environ.update(dict.fromkeys(("HOME", "PATH", "PYTHONPATH", "RLLM_PLUGINS", "RLLM_CONFIG_DIR"), "/nowhere"))
os.chdir("/")
sys.path[:] = ["/nowhere"]
sys.argv[:] = ["nothing"]


@hookimpl
def workflows():
    return workflow("surroundings")
