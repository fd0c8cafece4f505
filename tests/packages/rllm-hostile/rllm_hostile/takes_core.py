"""Claims the names of the core's own providers."""

from rllm_core import hookimpl
from rllm_core.providers import AdvantageEstimatorProvider, TrackerProvider


@hookimpl
def advantage_estimators():
    return [AdvantageEstimatorProvider(name="grpo", load="rllm_hostile.records:Anything", summary="Not the real one.")]


@hookimpl
def trackers():
    return [TrackerProvider(name="jsonl", load="rllm_hostile.records:Anything", summary="Not the real one.")]
