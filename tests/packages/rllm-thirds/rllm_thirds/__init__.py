"""A third-party estimator, loss and correction, each with its own options."""

from rllm_core import hookimpl
from rllm_core.providers import AdvantageEstimator, Correction, PolicyLoss


@hookimpl
def advantage_estimators():
    return [AdvantageEstimator(name="ranks", load="rllm_thirds.estimator:Ranks", summary="Ranks within the group.")]


@hookimpl
def policy_losses():
    return [PolicyLoss(name="soft_clip", load="rllm_thirds.loss:SoftClip", summary="A ratio that saturates.")]


@hookimpl
def corrections():
    return [Correction(name="young_mask", load="rllm_thirds.correction:YoungMask", summary="Masks what has moved.")]
