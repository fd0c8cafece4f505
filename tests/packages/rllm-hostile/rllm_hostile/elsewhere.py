"""Records that point at objects of other packages, or at nothing."""

from rllm_core import hookimpl
from rllm_hostile.records import workflow


@hookimpl
def workflows():
    return [
        *workflow("aborts", load="os:abort"),
        *workflow("dots", load="rllm_hostile..records:Anything"),
        *workflow("of-another", load="rllm_good.stack:Echo"),
        *workflow("no-class", load="rllm_core:__version__"),
    ]
