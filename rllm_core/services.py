"""What the core offers a workflow beside the model: reward functions by name, and a sandbox."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rllm_core import providers
from rllm_core.blame import defined_at
from rllm_core.sandbox import ChildFunction, Limits, Sandbox
from rllm_core.types import Task

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

RewardFunction = Callable[[Task, str], Awaitable[float]]


class Services:
    """The services of a run; `rllm_core.workflow.Workflow.services` has them.

    Args:
        plugins: Where they come from; by default, what is installed.
        sandbox: Name of the sandbox, ``rollout.sandbox`` of the run file.
    """

    def __init__(self, plugins: PluginManager | None = None, sandbox: str = "child") -> None:
        if plugins is not None:
            self._plugins = plugins
        self._sandbox_name = sandbox
        self._functions: dict[tuple[str, Limits | None], ChildFunction] = {}

    @cached_property
    def _plugins(self) -> PluginManager:
        from rllm_core.plugins import PluginManager

        return PluginManager.from_environment()

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run that the model wrote.

        Raises:
            rllm_core.errors.PluginError: If there is no sandbox of that name, or it is broken.
        """
        sandbox_class: type[Sandbox] = self._plugins.load(self._plugins.select(providers.Sandbox, self._sandbox_name))
        return sandbox_class()

    def reward_function(self, name: str, limits: Limits | None = None) -> RewardFunction:
        """A reward function of any plugin, as a coroutine that runs it in a child process.

        Args:
            name: The name it is provided by (hook ``reward_functions``).
            limits: Of one call.

        Returns:
            From a task and the model's text to a reward. Where there is none, a `rllm_core.sandbox.ChildError`:
            ``ChildTimeout`` and ``ChildOutOfMemory`` are as a rule the fault of the text, the others of the function.

        Raises:
            rllm_core.errors.PluginError: If there is no such function, or its plugin is broken.
        """
        provided = self._plugins.select(providers.RewardFunction, name)
        written = defined_at(self._plugins.load(provided))  # what is broken says so now, not in the first rollout

        async def reward(task: Task, text: str) -> float:
            # Made when it is needed: a workflow may be opened again after it was closed.
            graded = self._functions.get((name, limits))
            if graded is None:
                graded = self._functions[name, limits] = ChildFunction(f"{__name__}:graded", limits)
            value = await graded(provided.record.load, task.model_dump(mode="json"), text)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                where = f" ({written})" if written is not None else ""
                raise ValueError(f"reward function {name!r}{where} returned {value!r:.80}, not a finite number")
            return float(value)

        return reward

    async def close(self) -> None:
        """End what was started. Called once, after the last rollout of a run."""
        for function in self._functions.values():
            function.close()
        self._functions.clear()
        if "sandbox" in vars(self):
            await self.sandbox.close()
            del self.sandbox


def graded(path: str, task: dict[str, Any], text: str) -> Any:
    """In the child: call the reward function at ``path``."""
    value = providers.resolve(path)(Task.model_validate(task), text)
    return float(value) if isinstance(value, bool) else value
