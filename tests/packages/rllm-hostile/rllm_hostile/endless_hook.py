"""A provider hook that never returns."""

from rllm_core import hookimpl


@hookimpl
def workflows():
    while True:
        pass
