"""Providers whose classes have settings that their records omit or name differently."""

from rllm_core import hookimpl
from rllm_core.providers import (
    AdvantageEstimatorProvider,
    CorrectionProvider,
    RolloutHostProvider,
    SandboxProvider,
    TrackerProvider,
    WorkflowProvider,
)


@hookimpl
def workflows():
    return [
        WorkflowProvider(name="unset", load="rllm_unset.pieces:Unset", summary="Its record names no config."),
        WorkflowProvider(
            name="otherwise",
            load="rllm_unset.pieces:Otherwise",
            config="rllm_unset.pieces:TrackerConfig",
            summary="Its record names another config.",
        ),
    ]


@hookimpl
def rollout_hosts():
    return [
        RolloutHostProvider(
            name="unset-host", load="rllm_unset.pieces:UnsetHost", summary="Its record names no config."
        )
    ]


@hookimpl
def trackers():
    return [
        TrackerProvider(
            name="unset-tracker", load="rllm_unset.pieces:UnsetTracker", summary="Its record names no config."
        )
    ]


@hookimpl
def advantage_estimators():
    return [
        AdvantageEstimatorProvider(name="sectioned", load="rllm_unset.pieces:Sectioned", summary="config for options.")
    ]


@hookimpl
def corrections():
    return [
        CorrectionProvider(
            name="configured",
            load="rllm_unset.pieces:Configured",
            config="rllm_unset.pieces:TrackerConfig",
            summary="A section where there is none.",
        )
    ]


@hookimpl
def sandboxes():
    return [
        SandboxProvider(
            name="walled",
            load="rllm_core.builtin.sandbox:ChildSandbox",
            config="rllm_unset.pieces:no_model",
            summary="A section where there is none.",
        )
    ]
