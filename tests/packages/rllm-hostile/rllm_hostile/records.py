"""Records that hostile plugins still provide."""

from rllm_core.providers import WorkflowProvider


def workflow(name, load="rllm_hostile.records:Anything", summary="Does harm."):
    return [WorkflowProvider(name=name, load=load, summary=summary)]


class Anything:
    pass
