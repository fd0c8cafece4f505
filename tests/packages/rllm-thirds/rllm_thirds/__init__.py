"""A third-party estimator, loss and correction, each with its own options."""

from rllm_core import hookimpl
from rllm_core.providers import AdvantageEstimatorProvider, CorrectionProvider, PolicyLossProvider


@hookimpl
def advantage_estimators():
    return [
        AdvantageEstimatorProvider(name="ranks", load="rllm_thirds.estimator:Ranks", summary="Ranks within the group.")
    ]


@hookimpl
def policy_losses():
    return [PolicyLossProvider(name="soft_clip", load="rllm_thirds.loss:SoftClip", summary="A ratio that saturates.")]


@hookimpl
def corrections():
    return [
        CorrectionProvider(name="young_mask", load="rllm_thirds.correction:YoungMask", summary="Masks what has moved.")
    ]
