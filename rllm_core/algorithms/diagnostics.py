"""Metrics of the distance between training and sampling policy, and of the effect of losses and corrections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.corrections import MAX_LOG_RATIO
from rllm_core.types import TrainingSample

_SIGNS = ("negative", "positive")
_AGES = ("age_0", "age_1", "age_2_3", "age_4_up")
_AGE_BOUNDS = np.array([1, 2, 4])
_CELLS = len(_SIGNS) * len(_AGES)


class _Split:
    """Token counts and a sum, by sign of the advantage and staleness, ``(signs * ages,)``."""

    def __init__(self) -> None:
        self.tokens = np.zeros(_CELLS)
        self.sum = np.zeros(_CELLS)

    def add(self, cells: npt.NDArray[np.int64], values: npt.NDArray[np.floating] | npt.NDArray[np.bool_]) -> None:
        self.tokens += np.bincount(cells, minlength=_CELLS)
        self.sum += np.bincount(cells, values, minlength=_CELLS)

    def means(self, name: str, *, by_sign: bool) -> dict[str, float]:
        """Returns the mean as ``name``, and means of parts as ``name/part``; by age only if there are several ages."""
        tokens, sums = (array.reshape(len(_SIGNS), len(_AGES)) for array in (self.tokens, self.sum))
        if not tokens.any():
            return {}
        result = {name: float(sums.sum() / tokens.sum())}
        parts: list[tuple[tuple[str, ...], int]] = [(_SIGNS, 1)] if by_sign else []
        if tokens[:, 1:].any():
            parts.append((_AGES, 0))
        for labels, axis in parts:
            for label, count, total in zip(labels, tokens.sum(axis), sums.sum(axis), strict=True):
                if count:
                    result[f"{name}/{label}"] = float(total / count)
        return result


class OffPolicyDiagnostics:
    """Accumulates metrics over the tokens of an optimizer step, independent of the split into passes.

    Excludes tokens with an advantage of 0 and tokens with an unknown rollout log-probability. A backend adds the
    quantities of its forward pass and its loss; the core adds the quantities of corrections that it applies itself.
    ``docs/run-folder.md`` explains the names that `flush` returns.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._log_ratio, self._masked, self._clipped = _Split(), _Split(), _Split()
        self._signed_log_ratio = self._k3 = self._ratio = self._square = self._weight = 0.0

    def add(
        self,
        advantages: npt.NDArray[np.floating],
        ages: npt.NDArray[np.integer],
        *,
        log_ratios: npt.NDArray[np.floating] | None = None,
        weights: npt.NDArray[np.floating] | None = None,
        clipped: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Adds some tokens.

        Args:
            advantages: ``(tokens,)`` advantages before corrections.
            ages: ``(tokens,)`` staleness: weight versions between sampling and training.
            log_ratios: ``(tokens,)`` proximal minus rollout log-probabilities, NaN if the latter are unknown.
            weights: ``(tokens,)`` weights of the corrections.
            clipped: ``(tokens,)`` result of `rllm_core.algorithms.torch_losses.PolicyLoss.clipped`.
        """
        chosen = advantages != 0
        if log_ratios is not None:
            chosen &= ~np.isnan(log_ratios)
        cells = np.searchsorted(_AGE_BOUNDS, ages, side="right") + len(_AGES) * (advantages > 0)
        selection = slice(None) if chosen.all() else chosen  # a slice copies nothing
        cells = cells[selection]
        if log_ratios is not None:
            log_ratios = log_ratios[selection]
            x: npt.NDArray[np.float64] = np.clip(log_ratios.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
            excess = np.expm1(x)
            ratio = excess + 1
            self._log_ratio.add(cells, np.abs(x))
            self._signed_log_ratio += float(x.sum())
            self._k3 += float((excess - x).sum())
            self._ratio += float(ratio.sum())
            self._square += float(np.square(ratio).sum())
        if weights is not None:
            weights = weights[selection]
            self._masked.add(cells, weights == 0)
            self._weight += float(weights.sum(dtype=np.float64))
        if clipped is not None:
            self._clipped.add(cells, clipped[selection])

    def flush(self) -> dict[str, float]:
        """Returns the metrics since the last flush, without those that have no data."""
        metrics = self._log_ratio.means("off_policy_log_ratio", by_sign=False)
        if metrics:
            tokens = float(self._log_ratio.tokens.sum())
            metrics["off_policy_k3"] = self._k3 / tokens
            metrics["off_policy_chi_square"] = self._square / tokens - 1
            metrics["off_policy_effective_share"] = self._ratio**2 / (tokens * self._square)
            metrics["off_policy_perplexity_ratio"] = float(np.exp(-self._signed_log_ratio / tokens))
        if masked := self._masked.means("masked_share", by_sign=True):
            metrics |= masked
            metrics["correction_weight_mean"] = self._weight / float(self._masked.tokens.sum())
        metrics |= self._clipped.means("clipped_share", by_sign=True)
        self._reset()
        return metrics


def token_ages(samples: Sequence[TrainingSample], weight_version: int) -> npt.NDArray[np.int64]:
    """``(sampled_tokens,)`` staleness of each token of all samples: weight versions behind ``weight_version``."""
    versions = np.array([version for sample in samples for version in sample.weight_versions], np.int64)
    lengths = [stop - start for sample in samples for start, stop in sample.turn_spans]
    return np.repeat(weight_version - versions, lengths)
