"""``mixture``: draws from named subsets of the tasks by weight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.types import Task
from rllm_samplers.subsets import order_of, shown, subsets_of

NAME = "mixture"


class MixtureOptions(Section):
    """``[training.sampler_options]`` of ``mixture``."""

    by: str = Field(default="subset", min_length=1, description="Key of the tasks' data that names their subset.")
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Weight of each subset by name, such as { easy = 1, hard = 2 }. Required; 0 leaves a subset out.",
    )


class Mixture(TaskSampler):
    """Draws from named subsets by weight; within a subset, every task comes once before any repeats.

    Draws follow the weights as closely as integers allow: no subset ever falls a whole draw behind its share.
    """

    options_model = MixtureOptions
    options: MixtureOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """See `TaskSampler.begin`."""
        where = "training.sampler_options"
        found, weights = subsets_of(tasks, self.options.by, f"{where}.by"), self.options.weights
        if not weights:
            example = shown([f"{json.dumps(name)} = 1" for name in found])
            raise ConfigError(
                f"{where}.weights is missing: sampler {NAME!r} needs a number of at least 0 for each subset of the "
                f"tasks, here {shown(list(found))}; write for example {where} = {{ weights = {{ {example} }} }}"
            )
        missing, unknown = (
            [name for name in found if name not in weights],
            [name for name in weights if name not in found],
        )
        if unknown:
            raise ConfigError(f"{where}.weights has {unknown[0]!r}; the subsets of the tasks are {shown(list(found))}")
        if missing:
            raise ConfigError(f"{where}.weights lacks subset {missing[0]!r}; give it a weight, or 0 to leave it out")
        total = sum(weights.values())
        if total <= 0:
            raise ConfigError(f"{where}.weights are all 0; give a subset a positive weight")
        self._shares = {name: weights[name] / total for name in found if weights[name] > 0}
        self._orders = {name: order_of(tasks, found[name], seed, NAME, name) for name in self._shares}

    def next(self, n: int) -> list[int]:
        """See `TaskSampler.next`."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        drawn = sum(order.drawn for order in self._orders.values())
        behind = {name: share * (drawn + 1) - self._orders[name].drawn for name, share in self._shares.items()}
        return self._orders[max(behind, key=lambda name: behind[name])].take()

    def metrics(self) -> dict[str, float]:
        """Returns the number of passes over each subset."""
        return {f"passes/{name}": order.drawn / order.size for name, order in self._orders.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `TaskSampler.state_dict`."""
        return {"drawn": {name: order.drawn for name, order in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        if state["drawn"].keys() != self._orders.keys():
            raise ConfigError(
                f"training.sampler = {NAME!r}: the checkpoint has the subsets {shown(list(state['drawn']))}, but the "
                f"tasks have {shown(list(self._orders))}; resume with the same tasks"
            )
        for name, drawn in state["drawn"].items():
            self._orders[name].drawn = drawn
