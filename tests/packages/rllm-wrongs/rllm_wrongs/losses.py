"""Broken losses."""

from rllm_core.algorithms.torch_losses import PolicyLoss


class NoLoss:
    pass


class Averages(PolicyLoss):
    def __call__(self, inputs):
        return -(inputs.logprobs * inputs.advantages).mean()


class NaNLoss(PolicyLoss):
    def __call__(self, inputs):
        return inputs.logprobs * float("nan")


class FailingLoss(PolicyLoss):
    def __call__(self, inputs):
        return inputs.log_probs
