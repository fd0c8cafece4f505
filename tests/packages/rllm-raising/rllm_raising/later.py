"""An async observer that always fails."""

from rllm_core import hookimpl


@hookimpl
async def on_batch_end(step):
    raise ValueError(f"no time for step {step}")
