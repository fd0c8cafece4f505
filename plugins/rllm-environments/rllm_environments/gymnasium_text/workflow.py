"""``gymnasium``: environments of gymnasium, MiniGrid and BabyAI, with observations and actions as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason
from rllm_core.workflow import LazyTasks, Split, Workflow, WorkflowConfig
from rllm_environments.answers import action_of
from rllm_environments.catalog import AuditFiles, Description
from rllm_environments.gymnasium_text.environment import TextEnvironment
from rllm_environments.gymnasium_text.names import AUDIT_FILES, findings
from rllm_environments.gymnasium_text.observations import TEXT_VERSION, GridForm
from rllm_environments.gymnasium_text.splits import Splits
from rllm_environments.warm_starts import Conversation, random_legal_actions

NO_ACTION = -1.0


class GymnasiumConfig(WorkflowConfig):
    """``[gymnasium]``: the environment, and how it is shown."""

    environment: Annotated[str, Field(min_length=1, description="Id of the environment, in its newest version.")] = (
        "FrozenLake-v1"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of gymnasium.make.")
    imports: Annotated[
        tuple[str, ...],
        Field(description="Modules, or files as ./FILE.py, to import first, which register environments of your own."),
    ] = ()
    view: Annotated[
        GridForm,
        Field(
            description="Form of MiniGrid's observations. objects lists what is in view, with distances; grid shows "
            "every cell; compact lists what is in view in a few letters."
        ),
    ] = "objects"
    instructions: Annotated[
        bool,
        Field(
            description="Whether the first message explains the observation and the actions. A model with a warm start "
            "needs no explanation."
        ),
    ] = True
    max_turns: Annotated[
        int, Field(ge=1, le=10_000, description="Maximum actions per rollout, if the environment has no lower limit.")
    ] = 50
    warm_start_turns: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="Maximum actions of a game in the warm start of a model made from scratch. Defaults to "
            "max_turns. Fewer make the warm start cheaper.",
        ),
    ] = None
    warm_start_habit: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the warm start's actions that are habits: one action per observation, drawn at "
            "random. A model without habits first has to learn to read observations.",
        ),
    ] = 0.0
    solved_return: Annotated[
        float | None,
        Field(
            description="Return from which a rollout counts as solved. If unset, the environment's own threshold, or "
            "any return above 0."
        ),
    ] = None
    train_tasks: Annotated[int, Field(ge=1, le=400_000, description="Number of training games.")] = 4096
    validation_tasks: Annotated[int, Field(ge=1, le=400_000, description="Number of validation games.")] = 256


class GymnasiumWorkflow(Workflow):
    """Multi-turn: the model sees an observation as text, and answers with the name of an action.

    Every step has the environment's own reward. An answer that is not an action gets the reward -1 and ends the
    rollout, so that it is not a cheap way out; the metric ``no_action`` counts such answers. Each turn appends only the
    new observation.

    The environment decides whether starts, only seeds, or nothing can be held out; see
    `rllm_environments.gymnasium_text.splits.Splits`.
    """

    name: ClassVar[str] = "gymnasium"
    config_model: ClassVar[type[WorkflowConfig]] = GymnasiumConfig
    audit_files: ClassVar[AuditFiles] = AUDIT_FILES
    audits: ClassVar[str] = "rllm_environments.gymnasium_text.audit:audits"
    config: GymnasiumConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        made = self.made()
        made.check_play()
        self._opening = f"{made.instructions()}\n\n" if self.config.instructions else ""
        self._solved_return = self.config.solved_return
        if self._solved_return is None:
            self._solved_return = made.solved_return
        made.close()

    def made(self) -> TextEnvironment:
        """Constructs the environment.

        Raises:
            ConfigError: If the environment is refused.
        """
        config = self.config
        return TextEnvironment(config.environment, config.options, config.imports, config.view)

    @cached_property
    def splits(self) -> Splits:
        """The games of both splits."""
        return Splits(self.made())

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns one task per game."""
        size = self.config.train_tasks if split == "train" else self.config.validation_tasks
        return LazyTasks(lambda number: self._task(self.splits.seed(split, number)), size)

    def _task(self, seed: int) -> Task:
        return Task(task_id=f"{self.config.environment}-{seed}", data={"seed": seed})

    def warm_start(self, rng: random.Random) -> Iterator[Conversation]:
        """Yields games with random actions: they teach the form of answers, but not which actions are good."""
        config = self.config
        return random_legal_actions(
            self.made(),
            rng,
            seeds=self.splits.training_seeds(rng.randrange(50_000)),
            max_turns=min(config.warm_start_turns or config.max_turns, config.max_turns),
            opening=self._opening,
            habit=config.warm_start_habit,
        )

    @classmethod
    def describe(cls, variant: str) -> dict[str, Any]:
        """Describes an environment for ``rllm-core environments``, without importing gymnasium."""
        found = findings(variant)
        return {**found, **vars(Description.of(variant, found))} if found else {}

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays one game."""
        environment = self.made()
        try:
            return await self._play(environment, task, completer)
        finally:
            environment.close()

    async def _play(self, environment: TextEnvironment, task: Task, completer: Completer) -> Episode:
        messages = Messages([{"role": "user", "content": self._opening + environment.reset(task.data["seed"])}])
        steps: list[Step] = []
        while True:
            step = await completer.complete(messages)
            steps.append(step)
            action = action_of(step.text)
            if step.finish_reason is FinishReason.LENGTH:
                return self._end(task, steps, TerminationReason.MAX_RESPONSE_TOKENS, no_action=True)
            if not environment.is_legal(action):
                return self._end(task, steps, TerminationReason.DONE, no_action=True)
            shown = environment.act(action)
            step.reward = shown.reward
            if shown.terminated:
                return self._end(task, steps, TerminationReason.DONE)
            if shown.truncated or len(steps) == self.config.max_turns:
                return self._end(task, steps, TerminationReason.MAX_TURNS)
            messages.append(step.response)
            messages.append({"role": "user", "content": shown.text})

    def _end(self, task: Task, steps: list[Step], reason: TerminationReason, *, no_action: bool = False) -> Episode:
        if no_action:
            steps[-1].reward = NO_ACTION
        total = sum(step.reward or 0.0 for step in steps)
        threshold = self._solved_return
        return self.episode(
            task,
            steps,
            is_correct=not no_action and (total > 0 if threshold is None else total >= threshold),
            termination_reason=reason,
            metrics={"turns": float(len(steps)), "no_action": float(no_action)},
            metadata={"text_version": TEXT_VERSION},
        )
