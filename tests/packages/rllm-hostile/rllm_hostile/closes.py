"""Closes the standard streams."""

import os

from rllm_core import hookimpl
from rllm_hostile.records import workflow

for descriptor in (1, 2):
    os.close(descriptor)


@hookimpl
def workflows():
    return workflow("closes")
