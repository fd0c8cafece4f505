"""Services for workflows besides the model: reward functions by name, and a sandbox."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rllm_core import providers
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins.blame import defined_at
from rllm_core.records import finite_number
from rllm_core.sandbox import ChildError, ChildFunction, Limits, Sandbox, call_with_retry
from rllm_core.scope import timed
from rllm_core.score import Score as Score
from rllm_core.text import printable
from rllm_core.types import Task

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

REJECTED = "rejected"
RewardFunction = Callable[[Task, str], Awaitable["Score"]]


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
            rllm_core.errors.ConfigError: If the sandbox does not work on this machine.
            rllm_core.errors.PluginError: If there is no sandbox with this name, or it is broken.
        """
        return working_sandbox(self._plugins, self._sandbox_name)()

    def isolating_sandbox(self) -> Sandbox:
        """Sandbox for code that must not run without isolation: the run file's if it isolates, or an installed one.

        Workflows call this in `rllm_core.workflow.Workflow.tasks`, so that a run without such a sandbox ends at once.

        Raises:
            rllm_core.errors.ConfigError: If no installed sandbox isolates and works on this machine.
            rllm_core.errors.PluginError: If the sandbox of the run file is missing or broken.
        """
        return self._isolating

    @cached_property
    def _isolating(self) -> Sandbox:
        if working_sandbox(self._plugins, self._sandbox_name).isolates:
            return self.sandbox
        problems = []
        for name, provided in self._plugins.providers(providers.SandboxProvider).items():
            sandbox_class: type[Sandbox] = self._plugins.load(provided)
            if not sandbox_class.isolates:
                continue
            problem = _problem_of(sandbox_class, name)
            if problem is None:
                return sandbox_class()
            problems.append(f"{name!r} does not work on this machine: {problem}")
        missing = (
            f"rollout.sandbox = {self._sandbox_name!r} does not isolate, and no installed one does; install one: "
            "apt install bubblewrap and pip install rllm-bwrap"
        )
        raise ConfigError(f"model output would be executed, which needs a sandbox: {'; '.join(problems) or missing}")

    def reward_function(
        self, name: str, limits: Limits | None = None, *, blame_text: tuple[type[ChildError], ...] = ()
    ) -> RewardFunction:
        """Returns a plugin's reward function as a coroutine function, which runs it in a child process.

        Args:
            name: Name of the reward function (hook ``reward_functions``).
            limits: Limits of one call.
            blame_text: Errors that are the fault of the text, such as ``ChildRaised`` if the function raises for text
                that is not in the expected form. Such a text gets the score 0.

        Returns:
            A function from a task and the model's text to a `Score`, which is a float. A call without a result raises a
            `rllm_core.sandbox.ChildError`, unless the error is in ``blame_text``. With ``blame_text``, every score has
            the part ``rejected``: 1 if the text caused such an error, otherwise 0. ``ChildTimeout`` and
            ``ChildOutOfMemory`` are usually caused by the text, the other errors by the function. A call whose process
            dies is repeated once, because the machine may have killed it; ``ChildDied`` means that it died twice.

        Raises:
            rllm_core.errors.PluginError: If there is no such function, or its plugin is broken.
        """
        provided = self._plugins.select(providers.RewardFunctionProvider, name)
        # Load now: a broken function should fail before the first rollout.
        function = self._plugins.load(provided)
        written = defined_at(function)
        where = f" ({written})" if written is not None else ""
        short_name = f"reward function {getattr(function, '__name__', name)}{where}"

        async def reward(task: Task, text: str) -> Score:
            # Created on demand: a workflow may be opened again after it was closed.
            graded = self._functions.get((name, limits))
            if graded is None:
                graded = self._functions[name, limits] = ChildFunction(
                    f"{__name__}:graded",
                    limits,
                    children=provided.record.processes,
                    variables=provided.record.variables,
                    name=short_name,
                )
            try:
                with timed("reward", name):
                    task_data = task.model_dump(mode="json")
                    value, parts, wrong = await call_with_retry(graded, provided.record.load, task_data, text)
            except blame_text:
                return Score(0.0, {REJECTED: 1.0})
            if value is None:
                raise ValueError(
                    f"reward function {name!r}{where} returned {wrong}, not a finite number (alone, or with its "
                    "parts: (number, {name: part}))"
                )
            if wrong:
                raise ValueError(
                    f"reward function {name!r}{where} returned the part {wrong}; a part has a name, and is a finite "
                    "number or text"
                )
            return Score(float(value), {REJECTED: 0.0, **parts} if blame_text else parts)

        return reward

    async def close(self) -> None:
        """Ends all child processes and the sandbox. Called once, after the last rollout of a run."""
        for function in self._functions.values():
            function.close()
        self._functions.clear()
        async with AsyncExitStack() as closing:  # each is closed even if another one's close() fails
            for sandbox in {vars(self).pop(name) for name in ("sandbox", "_isolating") if name in vars(self)}:
                closing.push_async_callback(sandbox.close)


def working_sandbox(plugins: PluginManager, name: str) -> type[Sandbox]:
    """Returns the class of a sandbox.

    Raises:
        rllm_core.errors.ConfigError: If the sandbox does not work on this machine.
        rllm_core.errors.PluginError: If there is no sandbox with this name, or it is broken.
    """
    sandbox_class: type[Sandbox] = plugins.load(plugins.select(providers.SandboxProvider, name))
    problem = _problem_of(sandbox_class, name)
    if problem is not None:
        raise ConfigError(f"rollout.sandbox = {name!r} does not work on this machine: {problem}")
    return sandbox_class


def _problem_of(sandbox_class: type[Sandbox], name: str) -> str | None:
    """Returns one line about why a sandbox does not work on this machine; None if it does."""
    problem: object = sandbox_class.unavailable()
    if problem is None:
        return None
    if not isinstance(problem, str) or not problem.strip():
        raise PluginError(
            f"sandbox {name!r}: unavailable() returned {problem!r:.80}; return None if programs can run on this "
            "machine, otherwise one line that says why not"
        )
    return printable(problem)


def graded(path: str, task: dict[str, Any], text: str) -> tuple[float | None, dict[str, float | str], str]:
    """Calls the reward function at ``path``. Runs in the child process, whose answers are JSON.

    Returns:
        Its reward, or None; its parts; and the value that is not allowed, or "".
    """
    value = providers.resolve(path)(Task.model_validate(task), text)
    if inspect.isawaitable(value):
        value = asyncio.run(_result_of(value))
    value, parts = value if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict) else (value, {})
    reward = _number(value)
    if reward is None:
        return None, {}, f"{value!r:.80}"
    read = {name: part if isinstance(part, str) else _number(part) for name, part in parts.items()}
    wrong = next((f"{(name, parts[name])!r:.80}" for name, part in read.items() if part is None or not name), "")
    return reward, {str(name): part for name, part in read.items() if part is not None}, wrong


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _number(value: Any) -> float | None:
    try:
        return finite_number(value)
    except ValueError:
        return None
