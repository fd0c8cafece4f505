"""Turns complete groups into training samples: rewards, advantages and off-policy corrections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Literal

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages import Credit
from rllm_core.algorithms.diagnostics import OffPolicyDiagnostics, token_ages
from rllm_core.algorithms.kl import kl_estimate
from rllm_core.algorithms.samples import training_samples, with_token_rewards, with_tokens
from rllm_core.assembly.algorithm import Algorithm
from rllm_core.backend import Policy
from rllm_core.config import RunConfig
from rllm_core.distillation.teacher import UNSCORED_TOKENS
from rllm_core.errors import RunError
from rllm_core.tokens import logprobs
from rllm_core.training.group import Group
from rllm_core.types import Floats, Step, TrainingSample, TrajectoryGroup

ComputeLogprobs = Callable[[Sequence[TrainingSample], Policy], Awaitable[list[Floats]]]


class Crediting:
    """Builds the samples of an optimizer step.

    Args:
        compute_logprobs: Function that gets log-probabilities from the backend.
        forward_is_proximal: See `rllm_core.backend.Capabilities`.

    Attributes:
        diagnostics: Diagnostics of the ratios and corrections computed here.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        compute_logprobs: ComputeLogprobs,
        *,
        forward_is_proximal: bool = False,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.diagnostics = OffPolicyDiagnostics()
        self._compute_logprobs = compute_logprobs
        self._corrections: dict[str, Floats] = {}
        self._task_ids: dict[int, str] = {}  # of the last credited groups
        self._forward_is_proximal = forward_is_proximal
        kl = config.algorithm.kl
        self._kl_in: Literal["loss", "reward"] | None = kl.place if kl.coefficient > 0 else None

    async def credited(self, taken: Sequence[Group], *, weight_version: float) -> list[list[TrainingSample]]:
        """Returns the samples of each complete group, with advantages.

        ``weight_version`` is that of the weights about to be trained; its fraction is the progress since the last sync.
        """
        groups = [group for item in taken for group in item.groups]
        self._task_ids = {group.group_id: group.task_id for group in groups}
        rewarded = await self._less_kl(groups) if self._kl_in == "reward" and groups else groups
        compared = await self._compared_now(rewarded, weight_version)
        remaining = iter(zip(groups, self._advantages(compared), strict=True))
        return [[sample for _ in item.groups for sample in self._samples(*next(remaining))] for item in taken]

    def _advantages(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        estimators = self.algorithm.estimators
        if estimators.scope == "batch":
            return estimators(groups)
        return [credits for group in groups for credits in estimators([group])]

    def _samples(self, group: TrajectoryGroup, credits: Sequence[Credit]) -> list[TrainingSample]:
        estimator = self.algorithm.estimators.of(group.role)
        return training_samples(group, credits, learns_written=estimator.learns_written, credited_by=estimator.label)

    async def _compared_now(self, groups: Sequence[TrajectoryGroup], weight_version: float) -> list[TrajectoryGroup]:
        """Recomputes the teacher's advantages of stale groups against the weights about to be trained.

        Replaces the log-probabilities of the older policy by current ones. Groups sampled by the current weights stay
        unchanged.
        """
        result = list(groups)
        stale = [
            place
            for place, group in enumerate(groups)
            if self.algorithm.estimators.of(group.role).needs_teacher and group.weight_version < weight_version
        ]
        samples = {place: training_samples(groups[place]) for place in stale}
        flat = [sample for place in stale for sample in samples[place]]
        if not flat:
            return result
        current = iter(await self.logprobs(flat, "current"))
        for place in stale:
            result[place] = with_tokens(groups[place], [next(current) for _ in samples[place]], _compared)
        return result

    async def _less_kl(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Subtracts each token's KL penalty from its reward."""
        kl = self.config.algorithm.kl
        samples = [training_samples(group) for group in groups]
        flat = [sample for of_group in samples for sample in of_group]
        current = await self.logprobs(flat, "current")
        reference = await self.logprobs(flat, "reference")
        penalties = iter(
            [
                (-kl.coefficient * kl_estimate(mine, theirs, kl.estimator)).astype(np.float32)
                for mine, theirs in zip(current, reference, strict=True)
            ]
        )
        return [
            with_token_rewards(group, [next(penalties) for _ in of_group])
            for group, of_group in zip(groups, samples, strict=True)
        ]

    async def logprobs(self, samples: Sequence[TrainingSample], policy: Policy) -> list[Floats]:
        """Gets log-probabilities from the backend and checks that there is one per sampled token.

        Raises:
            RunError: If the number differs; the message names the task.
        """
        computed = await self._compute_logprobs(samples, policy)
        if not isinstance(computed, Sized) or len(computed) != len(samples):
            found = f"{len(computed)} arrays" if isinstance(computed, Sized) else type(computed).__name__
            raise RunError(f"compute_logprobs({policy!r}) of the backend returned {found} for {len(samples)} samples")
        return [self._checked(sample, values, policy) for sample, values in zip(samples, computed, strict=True)]

    def _checked(self, sample: TrainingSample, computed: Floats, policy: Policy) -> Floats:
        try:
            values = logprobs(computed)
            if len(values) != sample.sampled_tokens:
                raise ValueError(f"{len(values)} log-probabilities for {sample.sampled_tokens} sampled tokens")
        except ValueError as error:
            raise RunError(
                f"task {self._task_of(sample)!r}: compute_logprobs({policy!r}) of the backend: {error}"
            ) from error
        return values

    def _task_of(self, sample: TrainingSample) -> str:
        return self._task_ids.get(sample.group_id, f"of group {sample.group_id}")

    async def corrected(self, samples: list[TrainingSample], *, proximal_version: float) -> list[TrainingSample]:
        """Adds the inputs that the loss needs besides advantages to the samples of one pass, and applies corrections.

        ``proximal_version`` is the weight version before this step; its fraction is the progress since the last sync.
        """
        if not samples:
            return samples
        algorithm = self.config.algorithm
        if algorithm.proximal_policy == "forward" and not self._forward_is_proximal:
            proximal = await self.logprobs(samples, "proximal")
            samples = [_with(s, proximal_logprobs=known) for s, known in zip(samples, proximal, strict=True)]
            samples = self._weighted(samples, int(proximal_version))
        elif algorithm.proximal_policy == "forward":
            samples = [_with(s, proximal_fractions=np.ones(len(s.turn_spans), np.float32)) for s in samples]
        elif algorithm.proximal_policy == "interpolated":
            step = 1 / self.config.training.trigger_parameter_sync_step
            samples = [_with(s, proximal_fractions=_fractions(s, proximal_version, step)) for s in samples]
        if self._kl_in == "loss":
            reference = await self.logprobs(samples, "reference")
            samples = [_with(s, reference_logprobs=known) for s, known in zip(samples, reference, strict=True)]
        return samples

    def take_corrections(self) -> dict[str, Floats]:
        """Returns ``(sampled_tokens,)`` weights of the corrections since the last call, by sample id."""
        taken, self._corrections = self._corrections, {}
        return taken

    def _weighted(self, samples: Sequence[TrainingSample], weight_version: int) -> list[TrainingSample]:
        """Applies corrections to the advantages of samples whose sampling log-probabilities are known."""
        known = {index: ratios for index, sample in enumerate(samples) if (ratios := _log_ratios(sample)) is not None}
        result = list(samples)
        if not known:
            return result
        log_ratios = np.concatenate(list(known.values()))
        starts = np.cumsum([0, *(len(ratios) for ratios in known.values())])[:-1]
        corrections = self.algorithm.corrections
        task_ids = [self._task_of(samples[index]) for index in known]
        weights = corrections.weights(log_ratios, starts, task_ids) if corrections else None
        self.diagnostics.add(
            np.concatenate([samples[index].advantages for index in known]),
            token_ages([samples[index] for index in known], weight_version),
            log_ratios=log_ratios,
            weights=weights,
        )
        if weights is not None:
            for index, part in zip(known, np.split(weights, starts[1:]), strict=True):
                self._corrections[samples[index].sample_id] = part.astype(np.float32)
                corrected = (samples[index].advantages * part).astype(np.float32)
                result[index] = _with(samples[index], advantages=corrected)
        return result


def _compared(step: Step, current: Floats) -> Step:
    """Updates a scored step with ``(completion_tokens,)`` log-probabilities of the current policy."""
    assert step.advantages is not None
    assert step.logprobs is not None
    advantages = step.advantages + step.logprobs - current
    advantages[list(step.metadata.get(UNSCORED_TOKENS, ()))] = 0
    return step.model_copy(update={"advantages": advantages})


def _with(sample: TrainingSample, **arrays: Floats) -> TrainingSample:
    return TrainingSample.model_validate({**dict(sample), **arrays})


def _fractions(sample: TrainingSample, proximal_version: float, step: float) -> Floats:
    """Returns ``(turns,)`` (v_proximal - v_rollout) / (v_trained - v_rollout), as in AReaL (arXiv 2505.24298)."""
    ages = proximal_version - np.array(sample.weight_versions, np.float64)
    return (ages / (ages + step)).astype(np.float32)


def _log_ratios(sample: TrainingSample) -> npt.NDArray[np.float64] | None:
    """Returns ``(sampled_tokens,)`` log ratios of proximal over rollout policy, if both are known."""
    if sample.logprobs is None or sample.proximal_logprobs is None:
        return None
    return sample.proximal_logprobs.astype(np.float64) - sample.logprobs
