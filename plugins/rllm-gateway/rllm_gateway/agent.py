"""Workflow ``agent``: runs a program or function that talks to the model over HTTP, on tasks from a file."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.providers import resolve
from rllm_core.sandbox import Limits, ProcessKeeper
from rllm_core.services import RewardFunction
from rllm_core.types import Episode, Task, well_formed
from rllm_core.workflow import Split, WorkflowConfig
from rllm_gateway.endpoint import Endpoint
from rllm_gateway.programs import AgentFailed, run_program
from rllm_gateway.rows import read_rows
from rllm_gateway.threads import ThreadCall
from rllm_gateway.workflow import GatewayConfig, GatewayWorkflow

logger = logging.getLogger(__name__)

ENDPOINT = ("base_url", "anthropic_base_url", "api_key", "socket")
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")  # not ${...}, which a shell reads
OWN_PLACEHOLDERS = {"python": sys.executable, "relay": str(Path(__file__).with_name("relay.py"))}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
MAX_THREADS = 4096  # for agent functions; the event loop's own pool would run only a few at once


class AgentConfig(GatewayConfig):
    """``[agent]``: the agent, its reward function and its tasks. Set either command or function."""

    command: Annotated[
        tuple[str, ...],
        Field(
            description="Program and arguments. {COLUMN} stands for a column of the row, {folder} for a new folder "
            "that the rollout may write to, {python} for this Python, {base_url}, {anthropic_base_url}, {api_key} and "
            "{socket} for the address of the model, {relay} for a script that lets agents without a network reach it."
        ),
    ] = ()
    function: Annotated[
        str,
        Field(
            description="Python function, as ./FILE.py:NAME or package.module:NAME. Each of its parameters gets "
            "the column of that name, or is base_url, anthropic_base_url, api_key, socket, folder or row."
        ),
    ] = ""
    result_file: Annotated[
        str,
        Field(
            description="File in {folder} with the result. If unset, the result is the standard output of a command."
        ),
    ] = ""
    train_file: Annotated[str, Field(min_length=1, description="Training rows: a .jsonl file.")]
    validation_file: Annotated[
        str, Field(description="Validation rows: a .jsonl file. If unset, held_out_share of the training rows.")
    ] = ""
    held_out_share: Annotated[
        float, Field(ge=0, lt=1, allow_inf_nan=False, description="Share of training rows to hold out, by hash.")
    ] = 0.1
    reward: Annotated[
        str, Field(min_length=1, description="Reward function, by its name or as ./FILE.py:NAME; gets the result.")
    ]
    reward_timeout_seconds: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Timeout of one reward call, in seconds.")
    ] = 10.0
    solved_at: Annotated[
        float, Field(allow_inf_nan=False, description="Minimum reward at which a task counts as solved.")
    ] = 1.0
    trajectories: Annotated[
        Literal["model", "conversation"],
        Field(
            description="What becomes a trajectory: all calls to one model name, or each conversation. The latter "
            "gives rollouts with many conversations more weight."
        ),
    ] = "model"

    @model_validator(mode="after")
    def _check_one_agent(self) -> Self:
        if bool(self.command) == bool(self.function):
            raise ValueError("set either agent.command or agent.function")
        if self.result_file and Path(self.result_file).is_absolute():
            raise ValueError("agent.result_file is a path within the folder of the rollout")
        return self


class AgentWorkflow(GatewayWorkflow):
    """Runs the agent once per rollout and rewards its result; the agent's model calls become the trajectories.

    The agent finds the model through the environment variables of OpenAI's and Anthropic's SDKs, or through arguments.
    The rollout fails if the agent ends with an error, or if the engine fails, even when the agent handles the engine's
    error.
    """

    name: ClassVar[str] = "agent"
    config_model: ClassVar[type[WorkflowConfig]] = AgentConfig
    config: AgentConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._has_environment = False
        self._tasks = read_rows(self.config.train_file, self.config.validation_file, self.config.held_out_share)
        self._check_command()

    async def open(self) -> None:
        """Starts the gateway.

        Raises:
            ConfigError: If the program of the command does not exist where the rollouts run.
        """
        if (missing := self._missing_program()) is not None:
            raise ConfigError(missing)
        await super().open()
        self._folder = tempfile.mkdtemp(prefix="rllm-agent-")  # one for all rollouts, which the keeper removes
        self._keeper = ProcessKeeper(self._folder)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")

    async def close(self) -> None:
        """Stops the gateway and any program that the agent left running."""
        if hasattr(self, "_keeper"):
            self._keeper.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
        await super().close()

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`.

        Raises:
            rllm_core.errors.PluginError: If the reward function does not exist.
            ConfigError: If the agent function does not exist.
        """
        _ = self._reward
        if self.config.function:
            _ = self._function
        # No error: with rollout hosts of other machines, only these need the program.
        if split == "train" and (missing := self._missing_program()) is not None:
            logger.warning("%s", missing)
        return self._tasks[split]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs the agent and rewards its result."""
        async with self.gateway.rollout(completer) as endpoint:
            with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
                result = await self._play(task.data, endpoint, folder)
        if not endpoint.trajectories():  # nothing to train; the agent may have handled the errors of all its calls
            raise AgentFailed(_why_unanswered(endpoint))
        reward = await self._reward(task, result)
        return endpoint.episode(
            task,
            reward=reward,
            is_correct=reward >= self.config.solved_at,
            metadata={"result": result, **({"reward_parts": reward.parts} if reward.parts else {})},
            by=self.config.trajectories,
        )

    async def _play(self, row: Mapping[str, Any], endpoint: Endpoint, folder: str) -> str:
        if self.config.command:
            values = {**row, **_of_endpoint(endpoint), "folder": folder, **OWN_PLACEHOLDERS}
            command = [_filled(part, values) for part in self.config.command]
            env = os.environ | endpoint.env
            printed = await run_program(command, env, self._keeper, mark=endpoint.api_key)
        else:
            printed = await self._call(row, endpoint, folder)
        if not self.config.result_file:
            return printed
        file = Path(folder, self.config.result_file)
        if not file.resolve().is_relative_to(Path(folder).resolve()) or not file.is_file():
            raise AgentFailed(f"the agent has not written {self.config.result_file} in its folder")
        return file.read_text(encoding="utf-8", errors="replace")

    async def _call(self, row: Mapping[str, Any], endpoint: Endpoint, folder: str) -> str:
        function = self._function
        given = {**row, **_of_endpoint(endpoint), "folder": folder, "row": dict(row)}
        arguments = _arguments(function, given)
        with nullcontext() if arguments.keys() & {*ENDPOINT} else self._environment(endpoint):
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments)
            else:
                result = await ThreadCall(self._threads, function, arguments)
                if inspect.isawaitable(result):
                    result = await result
        # An agent may return half a surrogate pair that the model wrote as an escape in the arguments of a tool.
        return well_formed(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))

    @contextmanager
    def _environment(self, endpoint: Endpoint) -> Iterator[None]:
        """Sets the environment variables for a function that takes no argument with the model's address.

        Raises:
            ConfigError: If another rollout has set them, because all rollouts share the environment of this process.
        """
        if self._has_environment:
            raise ConfigError(
                f"agent.function = {self.config.function!r} has no parameter base_url, so it reads the address of the "
                "model from the environment, and one process can run one such rollout at a time: set "
                "rollout.rollouts_per_worker = 1 (with rollout.workers), or give it the parameter"
            )
        before = {name: os.environ.get(name) for name in endpoint.env}
        self._has_environment = True
        os.environ.update(endpoint.env)
        try:
            yield
        finally:
            self._has_environment = False
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @cached_property
    def _function(self) -> Callable[..., Any]:
        try:
            found = resolve(self.config.function)
        except Exception as error:
            raise ConfigError(f"agent.function = {self.config.function!r} cannot be loaded: {error}") from error
        if not callable(found):
            raise ConfigError(f"agent.function = {self.config.function!r} is not a function")
        if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
            raise ConfigError(f"agent.function = {self.config.function!r} has a yield; return the result instead")
        parameters = inspect.signature(found).parameters.values()
        own = {*ENDPOINT, "folder", "row"}
        named = {one.name for one in parameters if one.kind not in VARIADIC}
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        optional = {one.name for one in parameters if one.default is not one.empty}
        self._check_rows(named - optional, own if takes_all else own & named, own, "parameter")
        return found  # type: ignore[no-any-return]

    @cached_property
    def _reward(self) -> RewardFunction:
        return self.services.reward_function(
            self.config.reward, Limits(wall_seconds=self.config.reward_timeout_seconds)
        )

    def _missing_program(self) -> str | None:
        """Says that the program of the command is not on this machine; None if it is, or if a column names it."""
        program = self.config.command[0] if self.config.command else ""
        if not program or PLACEHOLDER.search(program) or shutil.which(program) is not None:
            return None
        return (
            f"agent.command: this machine has no program {program!r}, in PATH or at this path and executable; install "
            "it, activate the environment that has it, or write its path"
        )

    def _check_command(self) -> None:
        """Raises ConfigError if the columns of a row do not fit the placeholders of the command."""
        named = {name for part in self.config.command for name in PLACEHOLDER.findall(part)}
        own = {*ENDPOINT, "folder", *OWN_PLACEHOLDERS}
        self._check_rows(named, own & named, own, "placeholder")

    def _check_rows(self, needed: Set[str], hiding: Set[str], own: Set[str], what: str) -> None:
        """Checks every row before the run, which would else end at a wrong one, perhaps after hours.

        Args:
            needed: Names that the agent must get.
            hiding: Names of ``own`` that the agent gets; it would never see a column with such a name.
            own: Names of values that do not come from a row.
            what: How the agent names a value, for messages.

        Raises:
            ConfigError: If a row lacks a column that the agent needs, or has a column that would be hidden.
        """
        for task in (*self._tasks["train"], *self._tasks["validation"]):
            for name in sorted(needed - own - task.data.keys()):
                raise ConfigError(
                    f"the agent's {what} {name!r} has no value for the row {_start_of(task.data)}; known names are "
                    f"{', '.join(sorted(own | task.data.keys()))}"
                )
            for name in sorted(hiding & task.data.keys()):
                raise ConfigError(
                    f"the agent would never see the column {name!r} of the row {_start_of(task.data)}, because it has "
                    f"a {what} of this name; rename the column"
                )


def _why_unanswered(endpoint: Endpoint) -> str:
    if endpoint.refused:
        return f"none of the agent's calls was answered; the last one got status {endpoint.refused}"
    if endpoint.counts["calls"]:
        return "the agent waited for the answer to none of its calls"
    return "the agent did not call the model: let it use the address in base_url or OPENAI_BASE_URL"


def _start_of(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)[:100]


def _of_endpoint(endpoint: Endpoint) -> dict[str, str]:
    return {name: getattr(endpoint, name) for name in ENDPOINT}


def _filled(part: str, values: Mapping[str, Any]) -> str:
    """Returns an argument with its placeholders filled in; placeholders in the inserted values stay as they are."""

    def value_of(found: re.Match[str]) -> str:
        value = values[found[1]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return PLACEHOLDER.sub(value_of, part)


def _arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, by the function's parameter names."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {one.name: given[one.name] for one in parameters if one.name in given}
