"""``rllm-core chat``: answers of the trained model, tool calls, and conversations that fail."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from local_runs import train
from rllm_workflows.calculator import CalculatorConfig, CalculatorWorkflow

from rllm_core.cli import Session
from rllm_core.config import RunConfig
from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.errors import ConfigError, RunError
from rllm_core.parser import ParsedCompletion, ParsedToolCall
from rllm_core.plugins import PluginManager
from rllm_core.types import FinishReason, SamplingParams, TokenInput, TokenOutput, token_ids
from rllm_core.workflow import ChatTools
from rllm_devkit.scripted import ByteParser
from rllm_viewer.commands.chat import chat
from rllm_viewer.conversation import MAX_CALLS, Conversation

SHORT = ("training.steps=1", "training.groups_per_step=2", "training.validation_rollouts=0")


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager.from_environment()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, plugins: PluginManager) -> Callable[[str], Path]:
    """Trains the starter model on a workflow for one step, once for each workflow."""
    runs: dict[str, Path] = {}

    def run(workflow: str) -> Path:
        if workflow not in runs:
            runs[workflow] = train(tmp_path_factory.mktemp("run") / workflow, plugins, workflow, *SHORT)
        return runs[workflow]

    return run


def called(plugins: PluginManager, *arguments: object, typed: str = "") -> Result:
    session = Session()
    vars(session)["plugins"] = plugins
    return CliRunner().invoke(chat, [str(argument) for argument in arguments], input=typed, obj=session)


@pytest.mark.slow
def test_a_message_gets_one_answer(trained, plugins: PluginManager) -> None:
    result = called(plugins, trained("sort"), "--message", "sort: dbca")
    assert result.exit_code == 0, result
    assert re.fullmatch(r"[a-h]*\n", result.stdout)
    assert result.stderr == ""
    assert called(plugins, trained("sort"), "--message", "sort: dbca").stdout == result.stdout, "the seed is the run's"


@pytest.mark.slow
def test_a_conversation_goes_on_until_the_input_ends(trained, plugins: PluginManager) -> None:
    result = called(plugins, trained("sort"), typed="sort: dbca\n\nsort: abdc")
    assert result.exit_code == 0, result
    assert len(result.stdout.splitlines()) == 2, "an empty line is no message"


@pytest.mark.slow
def test_the_model_calls_the_tools_of_its_workflow(trained, plugins: PluginManager) -> None:
    result = called(plugins, trained("calculator"), typed="3 plus 4\n5 times 2\n2 minus 9\n1 plus 6\n")
    assert result.exit_code == 0, result
    lines = result.stderr.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r"\w+\(.*\) -> (\d\d|error: .+)", line)


@pytest.mark.parametrize("options", [("--step", 7), ()])
def test_without_a_checkpoint_there_is_no_model(trained, plugins: PluginManager, tmp_path: Path, options) -> None:
    result = called(plugins, trained("sort") if options else tmp_path, *options, "--message", "hello")
    assert isinstance(result.exception, ConfigError)
    assert re.search("no complete checkpoint of step 7|is not a run folder", str(result.exception))


class CallParser(ByteParser):
    """Parses a completion that is a JSON list of calls."""

    name = "calls"
    supports_tools = True

    def parse_completion(self, completion_ids: Any, *, prompt_ids: Any = None, tools: Any = None) -> ParsedCompletion:
        parsed = super().parse_completion(completion_ids, prompt_ids=prompt_ids, tools=tools)
        if not parsed.content.startswith("["):
            return parsed
        calls = tuple(ParsedToolCall(name, arguments, "") for name, arguments in json.loads(parsed.content))
        return ParsedCompletion("", tool_calls=calls, termination=parsed.termination)


class Answers(RolloutEngine):
    """Returns fixed answers in order, the last one again and again; None fails."""

    name = "answers"

    def __init__(self, answers: Sequence[str | None]) -> None:
        self.parser = CallParser()
        self.answers = list(answers)

    @property
    def supports_token_in_token_out(self) -> bool:
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if text is None:
            raise EngineError("the server is gone")
        ids = [*text.encode(), ByteParser.END]
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.STOP,
            weight_version=0,
        )


CONFIG = RunConfig(workflow="calculator", backend="scripted")
CALL = '[["add", {"a": 3, "b": 4}]]'


def conversation(answers: Sequence[str | None], tools: ChatTools | None) -> tuple[Conversation, list[str]]:
    noted: list[str] = []
    return Conversation(Answers(answers), CONFIG, tools, noted.append), noted


@pytest.mark.parametrize("shows", [True, False])
def test_results_of_tools_become_messages(shows: bool) -> None:
    tools = CalculatorWorkflow(CalculatorConfig(show_tools=shows)).chat_tools(seed=5)
    assert len(tools.specs) == (3 if shows else 0)
    talk, noted = conversation([CALL, CALL.replace("add", "divide"), "done"], tools)
    assert asyncio.run(talk.answer("3 plus 4")) == "done"
    assert [message["role"] for message in talk.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert talk.messages[2]["content"] == "22"
    assert noted == ['add({"a": 3, "b": 4}) -> 22', 'divide({"a": 3, "b": 4}) -> error: no such tool']


def test_calls_without_tools_are_noted() -> None:
    talk, noted = conversation([CALL], None)
    assert asyncio.run(talk.answer("3 plus 4")) == ""
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert noted == ["the model called a tool, but its workflow offers none in chat"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [([CALL], f"called tools {MAX_CALLS} times without an answer"), ([None], "cannot answer: the server is gone")],
)
def test_a_model_that_does_not_answer(answers: Any, message: str) -> None:
    talk, _ = conversation(answers, CalculatorWorkflow().chat_tools(seed=0))
    with pytest.raises(RunError, match=message):
        asyncio.run(talk.answer("3 plus 4"))
