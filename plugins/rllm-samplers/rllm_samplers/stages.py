"""``stages``: draws from one set of tasks after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.types import Task
from rllm_samplers.subsets import order_of, shown, subsets_of

NAME = "stages"


class Stage(Section):
    """One of ``training.sampler_options.stages``."""

    subsets: list[str] = Field(min_length=1, description="Names of the subsets that the stage draws from.")
    until_step: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Optimizer step after which the next stage begins."
    )
    until_solved: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of solved rollouts, among the latest groups, at which the next stage begins."
    )


class StagesOptions(Section):
    """``[training.sampler_options]`` of ``stages``."""

    by: str = Field(default="subset", min_length=1, description="Key of the tasks' data that names their subset.")
    stages: list[Stage] = Field(
        min_length=1,
        description="The stages in order: tables with `subsets`, and `until_step`, `until_solved` or both; the first "
        "that is reached ends the stage. The last stage has neither.",
    )
    groups: int = Field(
        default=64, ge=1, description="Number of latest groups of a stage to which until_solved applies."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        *before, last = self.stages
        for number, stage in enumerate(before):
            if stage.until_step is None and stage.until_solved is None:
                raise ValueError(
                    f"stages[{number}] never ends; give it until_step or until_solved, or remove the later stages"
                )
        if last.until_step is not None or last.until_solved is not None:
            raise ValueError("the last of stages has an end, but no stage follows; remove until_step and until_solved")
        ends = [stage.until_step for stage in before if stage.until_step is not None]
        if ends != sorted(set(ends)):
            raise ValueError(f"until_step must grow from stage to stage, but is {', '.join(map(str, ends))}")
        return self


class Stages(TaskSampler):
    """Draws from one stage's subsets after another's; within a stage, every task comes once before any repeats.

    The sampler never returns to an earlier stage. With ``until_solved``, filtered groups count too: without them, a
    stage would never look solved. Results of a stage's groups that arrive after it ended do not count for the next
    stage.
    """

    options_model = StagesOptions
    options: StagesOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """See `TaskSampler.begin`."""
        where = "training.sampler_options"
        found = subsets_of(tasks, self.options.by, f"{where}.by")
        self._orders = []
        for number, stage in enumerate(self.options.stages):
            unknown = [name for name in stage.subsets if name not in found]
            if unknown:
                raise ConfigError(
                    f"{where}.stages[{number}].subsets has {unknown[0]!r}; the subsets of the tasks are "
                    f"{shown(list(found))}"
                )
            positions = [position for name in dict.fromkeys(stage.subsets) for position in found[name]]
            self._orders.append(order_of(tasks, positions, seed, NAME, str(number)))
        self._stage, self._drawn = 0, 0
        self._began = 0  # ordinal of the first draw of the stage
        self._solved: deque[float] = deque(maxlen=self.options.groups)

    def next(self, n: int) -> list[int]:
        """See `TaskSampler.next`."""
        self._drawn += n
        return [self._orders[self._stage].take() for _ in range(n)]

    def observe(self, result: GroupResult) -> None:
        """See `TaskSampler.observe`."""
        if result.ordinal >= self._began and result.solved is not None:
            self._solved.append(result.solved)
        stage = self.options.stages[self._stage]
        is_late = stage.until_step is not None and result.step >= stage.until_step
        if is_late or (stage.until_solved is not None and self._is_solved(stage.until_solved)):
            self._stage += 1
            self._began = self._drawn
            self._solved.clear()

    def _is_solved(self, share: float) -> bool:
        return len(self._solved) == self.options.groups and sum(self._solved) >= share * len(self._solved)

    def metrics(self) -> dict[str, float]:
        """Returns the number of the stage, from 0."""
        return {"stage": float(self._stage)}

    def state_dict(self) -> dict[str, Any]:
        """See `TaskSampler.state_dict`."""
        return {
            "stage": self._stage,
            "drawn": [order.drawn for order in self._orders],
            "began": self._began,
            "solved": list(self._solved),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        self._stage, self._began = state["stage"], state["began"]
        for order, drawn in zip(self._orders, state["drawn"], strict=True):
            order.drawn = drawn
        self._drawn = sum(state["drawn"])
        self._solved = deque(state["solved"], maxlen=self.options.groups)
