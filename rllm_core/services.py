"""Services for workflows besides the model: reward functions by name, and a sandbox."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rllm_core import providers
from rllm_core.plugins.blame import defined_at
from rllm_core.sandbox import ChildFunction, Limits, Sandbox
from rllm_core.types import Task

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

RewardFunction = Callable[[Task, str], Awaitable[float]]


class Services:
    """Services of a run, available as `rllm_core.workflow.Workflow.services`.

    Args:
        plugins: Plugins that provide the services. Defaults to the installed ones.
        sandbox: Name of the sandbox (``rollout.sandbox`` in the run file).
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
        """Sandbox for model-written programs.

        Raises:
            rllm_core.errors.PluginError: If there is no sandbox with this name, or it is broken.
        """
        sandbox_class: type[Sandbox] = self._plugins.load(
            self._plugins.select(providers.SandboxProvider, self._sandbox_name)
        )
        return sandbox_class()

    def reward_function(self, name: str, limits: Limits | None = None) -> RewardFunction:
        """Returns a plugin's reward function as a coroutine function, which runs it in a child process.

        Args:
            name: Name of the reward function (hook ``reward_functions``).
            limits: Limits of one call.

        Returns:
            A function from a task and the model's text to a reward. If a call has no result, it raises a
            `rllm_core.sandbox.ChildError`. ``ChildTimeout`` and ``ChildOutOfMemory`` are usually caused by the text,
            the others by the function.

        Raises:
            rllm_core.errors.PluginError: If there is no such function, or its plugin is broken.
        """
        provided = self._plugins.select(providers.RewardFunctionProvider, name)
        # Load now: a broken function should fail before the first rollout.
        written = defined_at(self._plugins.load(provided))

        async def reward(task: Task, text: str) -> float:
            # Created on demand: a workflow may be opened again after it was closed.
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
        """Ends all child processes and the sandbox. Called once, after the last rollout of a run."""
        for function in self._functions.values():
            function.close()
        self._functions.clear()
        if "sandbox" in vars(self):
            await self.sandbox.close()
            del self.sandbox


def graded(path: str, task: dict[str, Any], text: str) -> Any:
    """Calls the reward function at ``path``. Runs in the child process."""
    value = providers.resolve(path)(Task.model_validate(task), text)
    return float(value) if isinstance(value, bool) else value
