"""A reward with its parts."""

from __future__ import annotations

from collections.abc import Mapping

from rllm_core.messages import well_formed

MAX_REWARD = 1e30  # advantages are float32, and estimators sum rewards
MAX_METRIC = 1e300  # the sum over all episodes must be finite


class Score(float):
    """A reward, and the parts that a reward function returned with it.

    Attributes:
        parts: Numbers and texts by name, such as ``{"format": 1.0, "found": "7"}``.
    """

    parts: Mapping[str, float | str]

    def __new__(cls, reward: float, parts: Mapping[str, float | str] | None = None) -> Score:
        """Creates a score."""
        score = super().__new__(cls, reward)
        # Texts may come from a model, and half a surrogate pair cannot be recorded.
        score.parts = {
            well_formed(str(name)): well_formed(part) if isinstance(part, str) else part
            for name, part in (parts or {}).items()
        }
        return score

    @property
    def numbers(self) -> dict[str, float]:
        """The parts that are numbers, for `rllm_core.types.Episode.metrics`."""
        return {name: part for name, part in self.parts.items() if not isinstance(part, str)}
