"""A record whose path is not a dotted path."""

from rllm_core import hookimpl
from rllm_hostile.records import workflow


@hookimpl
def workflows():
    return workflow("climbs", load="../../etc/passwd:Anything")
