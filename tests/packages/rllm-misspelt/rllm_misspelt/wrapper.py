"""A pluggy wrapper, which rllm-core does not call."""

from rllm_core import hookimpl


@hookimpl(wrapper=True)
def on_batch_end():
    yield
