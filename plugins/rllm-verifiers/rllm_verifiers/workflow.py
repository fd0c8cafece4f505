"""``verifiers``: runs an environment of the package verifiers, with its own rewards."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from random import Random
from typing import Any, ClassVar

from rllm_core.engine import Completer, Terminated
from rllm_core.errors import ConfigError
from rllm_core.providers import resolve
from rllm_core.types import Episode, FinishReason, Task, TerminationReason, Trajectory, thaw
from rllm_core.workflow import Split, Workflow, WorkflowConfig
from rllm_verifiers.bridge import Bridge, Seats
from rllm_verifiers.config import VerifiersConfig
from rllm_verifiers.folders import sweep
from rllm_verifiers.loading import load_environment
from rllm_verifiers.rows import Rows

MODEL = "policy"
KEY_VARIABLE = "RLLM_VERIFIERS_NO_KEY"  # unset: the bridge of this process needs no key, only the trace id
PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class EpisodeFailed(RuntimeError):
    """An error that verifiers recorded in an episode or a trace."""


class VerifiersWorkflow(Workflow):
    """Lets an environment of verifiers run the conversation, and keeps its agents' samples token-exact.

    Every trace of an episode becomes a trajectory. Its role is the agent's name, its reward comes from verifiers, and
    it is trained if the environment marks it as trainable. An error in an episode or a trace is raised.
    """

    name: ClassVar[str] = "verifiers"
    config_model: ClassVar[type[WorkflowConfig]] = VerifiersConfig
    audits: ClassVar[str] = "rllm_verifiers.audits:audit"
    config: VerifiersConfig

    @cached_property
    def _environment(self) -> Any:
        return load_environment(self.config)

    @cached_property
    def _rows(self) -> Rows:
        return Rows(
            self._environment,
            self.config.environment,
            train_size=self.config.train_size,
            validation_size=self.config.validation_size,
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the rows of a split; see `rllm_verifiers.rows`."""
        if self.config.warm_start:
            _ = self._conversations
        return self._rows.split(split)

    async def open(self) -> None:
        """Starts the agents' shared services: tool servers, verifiers' interception of calls, and the bridge."""
        import verifiers.v1 as vf

        environment = self._environment
        self._open = AsyncExitStack()
        self._bridge = Bridge(hide_tools=self.config.hide_tools, hide_system=self.config.hide_system)
        await self._bridge.open()
        self._open.push_async_callback(self._bridge.close)
        sweep()
        _avoid_proxies()
        self._context = vf.ModelContext(
            model=MODEL, client=vf.EvalClientConfig(base_url=self._bridge.url, api_key_var=KEY_VARIABLE)
        )
        self._open.callback(sweep)
        await self._open.enter_async_context(environment.serving())

    async def close(self) -> None:
        """Stops the services that `open` started."""
        if hasattr(self, "_open"):
            await self._open.aclose()

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays one episode.

        Raises:
            EpisodeFailed: If the episode or a trace has an error.
            Terminated: If one of its stages took longer than the environment allows.
        """
        taskset = self._environment.taskset
        kind = type(taskset).task_type()
        row = kind(kind.data_type().model_validate(thaw(task.data["row"])), taskset.config.task)
        async with self._bridge.rollout(completer) as seats:
            episode = await self._environment.run_episode(row, self._context, on_trace=seats.seat)
            _check(episode)
        return self._played(task, episode, seats)

    def _played(self, task: Task, episode: Any, seats: Seats) -> Episode:
        """Returns the rollout's episode, with the traces that called the policy."""
        trajectories, traces = [], []
        for trace in episode.traces:
            steps = seats.steps(trace.id)
            if steps:
                traces.append(trace)
                trajectories.append(
                    Trajectory(
                        role=trace.agent.name,
                        steps=steps,
                        reward=float(trace.reward),
                        trainable=trace.agent.trainable,
                        metadata={"stop_condition": trace.stop_condition},
                    )
                )
        if not trajectories:
            raise EpisodeFailed("no agent of the episode has called the model")
        judged = [trajectory for trajectory in trajectories if trajectory.trainable] or trajectories
        return Episode(
            task_id=task.task_id,
            trajectories=trajectories,
            is_correct=all(trajectory.total_reward >= self.config.solved_at for trajectory in judged),
            termination_reason=_reason(judged),
            metrics=_metrics(traces),
        )

    @classmethod
    def describe(cls, variant: str) -> dict[str, Any]:
        """Describes an installed taskset without importing it."""
        return {"audited": False, "played": False, "notes": ["rllm-core environments audit verifiers plays it"]}

    def warm_start(self, rng: Random) -> Iterator[Any] | None:
        """Yields the conversations of ``verifiers.warm_start``; returns None if that is not set.

        Raises:
            ConfigError: If the function does not exist.
        """
        return self._conversations(rng) if self.config.warm_start else None

    @cached_property
    def _conversations(self) -> Callable[[Random], Iterator[Any]]:
        named = self.config.warm_start
        path, separator, function = named.rpartition(":")
        try:
            where = os.path.abspath(os.path.expanduser(path)) if path.endswith(".py") else path  # noqa: PTH100, PTH111
            found = resolve(f"{where}{separator}{function}")
        except Exception as error:
            raise ConfigError(f"verifiers.warm_start = {named!r} cannot be loaded: {error}") from error
        if not callable(found):
            raise ConfigError(f"verifiers.warm_start = {named!r} is not a function")
        return found  # type: ignore[no-any-return]


def _reason(judged: Sequence[Trajectory]) -> TerminationReason:
    if all(trajectory.steps[-1].finish_reason is FinishReason.LENGTH for trajectory in judged):
        return TerminationReason.MAX_RESPONSE_TOKENS
    if all(trajectory.metadata["stop_condition"] == "max_turns" for trajectory in judged):
        return TerminationReason.MAX_TURNS
    return TerminationReason.DONE


def _metrics(traces: Sequence[Any]) -> dict[str, float]:
    """Returns the means of verifiers' numbers in the traces: ``reward_NAME``, weighted, and its metrics."""
    found = defaultdict(list)
    several = len({trace.agent.name for trace in traces}) > 1
    for trace in traces:
        numbers = {f"reward_{name}": record.value for name, record in trace.rewards.items()} | dict(trace.metrics)
        for name, number in numbers.items():
            found[f"{trace.agent.name}_{name}" if several else name].append(float(number))
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


def _check(episode: Any) -> None:
    """Raises the error of an episode without a reward; verifiers itself would continue with a reward of 0."""
    for trace in episode.traces:
        if trace.is_timeout:
            raise Terminated(
                TerminationReason.TIMEOUT, f"agent {trace.agent.name!r} took longer than the environment allows"
            )
    errors = [*(error for trace in episode.traces if not trace.ok for error in trace.errors), *episode.errors]
    if not episode.ok:
        raise EpisodeFailed(_described(errors[0]) if errors else "verifiers calls it failed, and names no error")
    for trace in episode.traces:
        missing = [name for name, number in {**trace.rewards, **trace.metrics}.items() if number is None]
        if missing:
            raise EpisodeFailed(f"{missing[0]!r} of agent {trace.agent.name!r} was not computed")


def _described(error: Any) -> str:
    """Returns an error that verifiers recorded, with the code line that raised it."""
    # The first traceback is the cause; later ones show how verifiers re-raised it.
    places = PLACE.findall((error.traceback or "").split("\n\nThe above exception")[0])
    where = f" ({':'.join(places[-1])})" if places else ""
    return f"{error.type}: {error.message}{where}"


def _avoid_proxies() -> None:
    """Excludes the bridge from proxies, which would look for it on their own machine."""
    if any(name.lower() in ("http_proxy", "all_proxy") for name in os.environ):
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
