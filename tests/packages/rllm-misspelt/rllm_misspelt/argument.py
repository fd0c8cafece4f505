"""A hook with an argument its spec does not have."""

from rllm_core import hookimpl


@hookimpl
def on_batch_end(step, loss):
    pass
