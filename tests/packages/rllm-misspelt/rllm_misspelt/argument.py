"""A hook with an argument that is not in its spec."""

from rllm_core import hookimpl


@hookimpl
def on_batch_end(step, loss):
    pass
