"""Records that hostile plugins still provide."""

from rllm_core.providers import Workflow


def workflow(name, load="rllm_hostile.records:Anything", summary="Does harm."):
    return [Workflow(name=name, load=load, summary=summary)]


class Anything:
    pass
