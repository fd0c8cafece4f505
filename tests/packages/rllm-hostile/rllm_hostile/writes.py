"""Prints to standard output while it is loaded."""

from rllm_core import hookimpl
from rllm_hostile.records import workflow

print("] printed by the module", flush=True)


@hookimpl
def workflows():
    print("] printed by a hook", flush=True)
    return workflow("writes")
