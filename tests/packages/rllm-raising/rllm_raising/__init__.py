"""An observer that always fails."""

from rllm_core import hookimpl


@hookimpl
def on_batch_end(step):
    raise ValueError(f"no room for step {step}")
