"""``calculator``: call a tool, read its result and report it. The call is the only way to learn the answer."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.engine import Completer, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.parser import ToolSpec
from rllm_core.scope import timed
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason
from rllm_core.workflow import ChatTools, Split, Workflow, WorkflowConfig
from rllm_workflows.mcp_tools import ROLLOUT_SEED, McpServers, McpTools

HELD_OUT_ONE_IN = 5
TOOLS = {"plus": "add", "minus": "sub", "times": "mul"}
"""Maps each word of a question to its tool."""

EXECUTED, RIGHT_PARTS = 0.1, 0.9
SOLVED, COPIED_WRONG_RESULT, RIGHT_DIGITS = 1.0, 0.3, 0.3
INVALID = -1.0

MAX_OPERAND = 10**9
LOWEST_DISPLAY, DISPLAYS = 10, 90

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_NUMBER = re.compile(r"[0-9]{1,4}")
_INSTRUCTIONS = (
    "Answer with the tools. Pass the two numbers in the order of the question. The calculator's display is off by an "
    "amount that nobody can know beforehand: what counts is the number it shows. Give that number and nothing else."
)


class CalculatorConfig(WorkflowConfig):
    """``[calculator]``: the size of the numbers, the tools and the prompt."""

    largest: Annotated[int, Field(ge=1, le=99, description="Largest number in a question. The smallest is 0.")] = 9
    max_calls: Annotated[
        int, Field(ge=1, le=100, description="Maximum tool calls per rollout. Above 1, the model can correct a call.")
    ] = 3
    show_tools: Annotated[
        bool,
        Field(
            description="Describe the tools and the rules in the prompt. If false, the prompt is the bare question, "
            "for a model that already knows the format."
        ),
    ] = True
    servers: McpServers = Field(default_factory=dict, description="MCP servers whose tools replace the built-in ones.")


class ToolError(Exception):
    """Raised if a tool call cannot be executed.

    The model reads the message. Messages of the built-in tools never repeat text that the model wrote.
    """


class Calculator:
    """The built-in tools; `call` executes everything a rollout executes.

    The display shows two digits, shifted by an offset drawn per rollout. Each of the `DISPLAYS` results is equally
    likely for any numbers, so only a call reveals the result.

    Args:
        seed: Determines the offset.
    """

    SPECS: ClassVar[Sequence[Mapping[str, Any]]] = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Calculates a {word} b and returns what the display shows.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                    "additionalProperties": False,
                },
            },
        }
        for word, name in TOOLS.items()
    )

    def __init__(self, seed: int) -> None:
        self._offset = seed % DISPLAYS

    def call(self, name: str, arguments: Any) -> str:
        """Executes one call.

        Args:
            name: Name of the tool, as the model wrote it.
            arguments: Any JSON value.

        Returns:
            The display.

        Raises:
            ToolError: If the tool does not exist, or the arguments are not exactly two integers of bounded size.
        """
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise ToolError("error: no such tool")
        if not isinstance(arguments, Mapping) or set(arguments) != {"a", "b"}:
            raise ToolError("error: the arguments are a and b")
        if not all(_is_operand(value) for value in arguments.values()):
            raise ToolError("error: a and b must be integers")
        return str(LOWEST_DISPLAY + (operation(arguments["a"], arguments["b"]) + self._offset) % DISPLAYS)


def _is_operand(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_OPERAND


def is_held_out(a: int, word: str, b: int) -> bool:
    """Returns whether a question is in the validation split: about one in five, by a machine-independent hash."""
    digest = blake2b(f"calculator:{a} {word} {b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def prompt(a: int, word: str, b: int) -> str:
    """Returns the question to the model."""
    return f"{a} {word} {b}"


class CalculatorWorkflow(Workflow):
    """Multi-turn task: for ``3 plus 4``, the model calls ``add`` with a = 3, b = 4, reads ``52`` and answers ``52``.

    The parser finds calls in the format of the model's family. The result of a call, or an error message if it cannot
    be executed, returns as a ``tool`` message. The model may call up to ``max_calls`` times; an answer without a call
    ends the rollout.

    Rewards are per turn:

    - A call earns 0.1 if it can be executed, plus 0.9 times the correct share of tool, a and b. Only the improvement
      over earlier calls counts, so repeating a call does not pay.
    - An answer earns 1 if it equals the last display and that call was correct, and 0.3 if it equals the display of
      a wrong call. Otherwise it earns 0.3 times the share of correct digits. Copying any tool result is not enough.
    - A turn in the wrong format earns -1, less than any other turn, and ends the rollout. This covers an answer without
      an earlier call, several calls at once, an answer that is not a number, and a truncated turn.

    About one question in five is held out, by hash. The two numbers differ, so their order matters.

    With ``servers``, MCP servers execute the calls (see `rllm_workflows.mcp_tools`). Exactly one of them must provide
    each of ``add``, ``sub`` and ``mul``; other tools may be called too, and earn the 0.1. Servers receive the seed of
    the rollout's display. If a server fails, the rollout fails.
    """

    name: ClassVar[str] = "calculator"
    config_model: ClassVar[type[WorkflowConfig]] = CalculatorConfig
    config: CalculatorConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._servers = McpTools(self.config.servers) if self.config.servers else None
        self._tasks: dict[Split, list[Task]] = {"train": [], "validation": []}
        self._asked: dict[str, Messages] = {}
        system = [{"role": "system", "content": _INSTRUCTIONS}] if self.config.show_tools else []
        for a in range(self.config.largest + 1):
            for word, tool in TOOLS.items():
                for b in range(self.config.largest + 1):
                    if a == b:
                        continue
                    task = Task(task_id=f"calculator-{a}-{word}-{b}", data={"tool": tool, "a": a, "b": b})
                    self._tasks["validation" if is_held_out(a, word, b) else "train"].append(task)
                    question = {"role": "user", "content": prompt(a, word, b)}
                    self._asked[task.task_id] = Messages([*system, question])

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns all questions of a split."""
        return self._tasks[split]

    async def open(self) -> None:
        """Starts the servers.

        Raises:
            ConfigError: If a server cannot be started, or a tool is missing.
        """
        if self._servers is None:
            return
        await self._servers.open()
        names = {spec["function"]["name"] for spec in self._servers.specs}
        missing = [name for name in TOOLS.values() if name not in names]
        if missing:
            raise ConfigError(
                f"calculator.servers: exactly one server must have the tool {missing[0]!r}; available tools: "
                f"{', '.join(sorted(names))}"
            )

    async def close(self) -> None:
        """Stops the servers."""
        if self._servers is not None:
            await self._servers.close()

    def chat_tools(self, seed: int) -> ChatTools:
        """Returns the tools, as in a rollout."""
        tools = self._tools_of(seed)

        async def call(name: str, arguments: Any) -> str:
            try:
                return await tools.call(name, arguments)
            except ToolError as error:
                return str(error)

        return ChatTools(specs=tools.specs, call=call)

    def _tools_of(self, seed: int) -> ChatTools:
        """Returns the tools of a rollout, whose calls raise `ToolError`."""
        calculator, servers = Calculator(seed), self._servers

        async def call(name: str, arguments: Any) -> str:
            if servers is None:
                with timed("tool", name):
                    return calculator.call(name, arguments)
            return await _call_server(servers, name, arguments, seed)

        specs: Sequence[ToolSpec] = Calculator.SPECS if servers is None else servers.specs
        return ChatTools(specs=specs if self.config.show_tools else (), call=call)

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Executes calls until the model answers, uses up its calls, or writes a turn in the wrong format."""
        tools = self._tools_of(derive_seed(completer.seed, "calculator"))
        messages = self._asked[task.task_id].copy()
        steps: list[Step] = []
        display, is_right, earned, executed, failed = "", False, 0.0, 0, 0

        def end(reward: float, reason: TerminationReason = TerminationReason.DONE) -> Episode:
            steps[-1].reward = reward
            return self.episode(
                task,
                steps,
                is_correct=reward == SOLVED,
                termination_reason=reason,
                metrics={
                    "calls_executed": float(executed),
                    "calls_failed": float(failed),
                    "invalid": float(reward == INVALID),
                },
            )

        while True:
            step = await completer.complete(messages, tools=tools.specs or None)
            steps.append(step)
            if step.finish_reason is FinishReason.LENGTH:
                return end(INVALID, TerminationReason.MAX_RESPONSE_TOKENS)
            calls = step.response.get("tool_calls") or ()
            if not calls:
                answer = step.text.strip()
                return end(score_answer(answer, display, is_right) if executed or failed else INVALID)
            if len(calls) > 1:
                return end(INVALID)
            if executed + failed == self.config.max_calls:
                return end(0.0, TerminationReason.MAX_TURNS)
            [call] = calls
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            try:
                said = display = await tools.call(name, arguments)
            except ToolError as error:
                said, worth = str(error), 0.0
                failed += 1
            else:
                share = right_share(task.data, name, arguments)
                worth, is_right = EXECUTED + RIGHT_PARTS * share, share == 1.0
                executed += 1
            step.reward = max(0.0, worth - earned)
            earned = max(earned, worth)
            messages.append(step.response)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


async def _call_server(servers: McpTools, name: str, arguments: Any, seed: int) -> str:
    if not isinstance(arguments, Mapping):
        raise ToolError("error: the arguments are a and b")
    result = await servers.call(name, arguments, meta={ROLLOUT_SEED: seed})
    if result.is_error:
        raise ToolError(result.text)
    return result.text


def right_share(wanted: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> float:
    """Returns the correct share of an executed call; the tool, ``a`` and ``b`` count a third each."""
    values = {key: arguments.get(key) for key in ("a", "b")}
    right = [name == wanted["tool"], *(_is_operand(value) and value == wanted[key] for key, value in values.items())]
    return sum(map(bool, right)) / len(right)


def score_answer(answer: str, display: str, is_right: bool) -> float:
    """Returns the reward of an answer.

    Args:
        answer: Answer of the model.
        display: Last display, or "" if no call was executed.
        is_right: Whether the last executed call was correct.
    """
    if not _NUMBER.fullmatch(answer):
        return INVALID
    if answer == display:
        return SOLVED if is_right else COPIED_WRONG_RESULT
    return RIGHT_DIGITS * sum(map(str.__eq__, answer, display)) / max(len(answer), len(display))


def run_file() -> dict[str, Any]:
    """Returns settings for backend ``local``; every tried seed learned in about a minute on one CPU core."""
    return {
        "training": {"steps": 200, "groups_per_step": 16, "rollouts_per_group": 8},
        "rollout": {"max_response_tokens": 20},
        "algorithm": {
            "name": "return_to_go",
            "estimator_options": {"baseline": "group"},
            "entropy_coefficient": 0.06,
            "entropy_coefficient_final": 0.0,
        },
        "optimizer": {
            "learning_rate": 2e-3,  # with 3e-3, one of six seeds called a single operator for every question
            "schedule": "linear",
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.1,
        },
        "calculator": {"show_tools": False},
    }
