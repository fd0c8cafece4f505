"""The rules of the formats, as models that allow nothing else.

Written from OpenAI's API reference (FineTuneChatRequestInput), TRL's page on dataset formats, the ATIF specification
(1.7) of Harbor, the models of verifiers 0.4.0, and those of Inspect 0.3.285. Exports were validated with the models of
these packages by hand, too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Json, Tag, model_validator


class Strict(BaseModel):
    """Allows no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


Count = Annotated[int, Field(ge=0)]
Bit = Annotated[int, Field(ge=0, le=1)]
Bits = list[Bit]


# --------------------------------------------------------------------------------------------------------------------
# OpenAI, TRL and our rows


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Asked(Strict):
    role: Literal["system", "developer", "user"]
    content: str | list[dict[str, Any]]
    name: str | None = None


class Answered(Strict):
    role: Literal["assistant"]
    content: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    weight: Bit = 1

    @model_validator(mode="after")
    def says_something(self) -> Answered:
        assert self.content is not None or self.tool_calls
        return self


class ToolAnswered(Strict):
    role: Literal["tool"]
    content: str | list[dict[str, Any]]
    tool_call_id: str


def _kind(message: Any) -> str:
    return message["role"] if message["role"] in ("assistant", "tool") else "asked"


Message = Annotated[
    Annotated[Asked, Tag("asked")] | Annotated[Answered, Tag("assistant")] | Annotated[ToolAnswered, Tag("tool")],
    Discriminator(_kind),
]
Messages = Annotated[list[Message], Field(min_length=2)]


class OpenAIRow(Strict):
    messages: Messages
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def teaches_something(self) -> OpenAIRow:
        assert any(isinstance(message, Answered) and message.weight for message in self.messages)
        return self


class Columns(Strict):
    task_id: str
    task: Json[dict[str, Any]]
    step: Count
    group: Count | None = None
    kept: str
    outcome: str
    reason: str
    rollout_id: str
    rollout_index: Count
    is_correct: bool | None = None
    is_validation: bool
    termination_reason: str
    role: str
    reward: float | None = None
    trajectory: Count


class HuggingFaceRow(Columns):
    prompt: Annotated[list[Message], Field(min_length=1)]
    completion: Annotated[list[Answered], Field(min_length=1, max_length=1)]
    tools: Json[list[Tool]] | None = None
    turn: Count
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: Count | None = None
    segment: Count
    break_reason: str | None = None
    turn_reward: float | None = None


class SFTRow(Columns):
    id: str
    messages: Messages
    tools: list[Tool]
    input_ids: list[Count] | None = None
    assistant_masks: Bits | None = None
    question: str | None = None
    answer: str | None = None

    @model_validator(mode="after")
    def masks_fit(self) -> SFTRow:
        assert (self.input_ids is None) == (self.assistant_masks is None)
        if self.assistant_masks is not None and self.input_ids is not None:
            assert len(self.assistant_masks) == len(self.input_ids)
            assert not self.assistant_masks[0]
            assert self.assistant_masks[-1]
        return self


# --------------------------------------------------------------------------------------------------------------------
# Harbor


class ATIFToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class ATIFResult(Strict):
    source_call_id: str | None = None
    content: str
    extra: dict[str, Any] | None = None


class ATIFObservation(Strict):
    results: list[ATIFResult]


class ATIFMetrics(Strict):
    prompt_tokens: Count
    completion_tokens: Count
    prompt_token_ids: list[Count] | None = None
    completion_token_ids: list[Count] | None = None
    logprobs: list[float] | None = None


class ATIFStep(Strict):
    step_id: Annotated[int, Field(ge=1)]
    source: Literal["system", "user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[ATIFToolCall] | None = None
    observation: ATIFObservation | None = None
    metrics: ATIFMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Count | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def follows_the_rules(self) -> ATIFStep:
        if self.source != "agent":
            assert (self.reasoning_content, self.tool_calls, self.metrics) == (None, None, None)
        known = {call.tool_call_id for call in self.tool_calls or ()}
        results = self.observation.results if self.observation else []
        assert all(result.source_call_id is None or result.source_call_id in known for result in results)
        return self


class ATIFAgent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class ATIFDocument(Strict):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str
    trajectory_id: str
    agent: ATIFAgent
    steps: Annotated[list[ATIFStep], Field(min_length=1)]
    final_metrics: dict[Literal["total_prompt_tokens", "total_completion_tokens"], Count]
    extra: dict[str, Any]

    @model_validator(mode="after")
    def counts_steps(self) -> ATIFDocument:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        return self


# --------------------------------------------------------------------------------------------------------------------
# Prime's verifiers


class VerifiersCall(Strict):
    id: str
    name: str
    arguments: str


class VerifiersMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    reasoning_content: str | None = None
    tool_calls: list[VerifiersCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def fits_its_role(self) -> VerifiersMessage:
        assert self.role == "assistant" or (self.content is not None and self.tool_calls is None)
        assert (self.role == "tool") == (self.tool_call_id is not None)
        return self


class VerifiersTool(Strict):
    type: Literal["function"]
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class VerifiersNode(Strict):
    parent: Count | None
    tools: list[VerifiersTool] = []
    message: VerifiersMessage
    sampled: bool
    timestamp: float
    token_ids: list[Count] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] | None = None

    @model_validator(mode="after")
    def lengths_fit(self) -> VerifiersNode:
        assert len(self.mask) == len(self.token_ids)
        assert len(self.logprobs) in (0, sum(self.mask))
        assert self.sampled or not any(self.mask)
        return self


class VerifiersTrace(BaseModel):
    version: Literal[1]
    id: str
    verifiers: dict[str, str]
    task: dict[str, Any]
    agent: dict[str, Any]
    tools: list[VerifiersTool]
    nodes: list[VerifiersNode]
    calls: list[dict[str, Any]]
    rewards: dict[str, dict[str, float]]
    metrics: dict[str, float]
    info: dict[str, Any]
    is_completed: bool
    ok: bool

    @model_validator(mode="after")
    def is_a_graph(self) -> VerifiersTrace:
        assert all(node.parent is None or node.parent < at for at, node in enumerate(self.nodes))
        assert all(not node.tools or node.parent is None for node in self.nodes)
        assert all(self.nodes[call["node"]].sampled for call in self.calls)
        return self


class VerifiersEpisode(BaseModel):
    id: str
    env: dict[str, str]
    task: dict[str, Any]
    group: dict[str, str]
    run: dict[str, Any]
    ok: bool
    is_timeout: bool
    errors: list[dict[str, str]]
    traces: Annotated[list[VerifiersTrace], Field(min_length=1)]


# --------------------------------------------------------------------------------------------------------------------
# Inspect


class InspectCall(Strict):
    id: str
    function: str
    arguments: dict[str, Any]
    type: Literal["function"]


class InspectMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]]
    tool_calls: list[InspectCall] | None = None
    tool_call_id: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def fits_its_role(self) -> InspectMessage:
        assert self.tool_calls is None or self.role == "assistant"
        assert self.tool_call_id is None or self.role == "tool"
        return self


class InspectParameters(BaseModel):
    type: Literal["object"]
    properties: dict[str, Any]
    required: list[str]


class InspectTool(Strict):
    name: str
    description: str
    parameters: InspectParameters


class InspectChoice(Strict):
    message: InspectMessage
    stop_reason: Literal["stop", "max_tokens", "unknown"]


class InspectOutput(Strict):
    model: str
    choices: list[InspectChoice] = []
    usage: dict[str, Count] | None = None


class InspectEvent(Strict):
    event: Literal["model"]
    timestamp: str
    working_start: float
    model: str
    role: str
    input: Annotated[list[Any], Field(max_length=0)]
    input_refs: list[list[Count]]
    tools: list[InspectTool]
    tool_choice: Literal["auto"]
    config: dict[str, Any]
    output: InspectOutput
    metadata: dict[str, Any]


class InspectSample(Strict):
    id: str
    epoch: Annotated[int, Field(ge=1)]
    input: str | list[InspectMessage]
    target: str
    messages: list[InspectMessage]
    output: InspectOutput
    scores: dict[str, dict[Literal["value"], float | str]]
    metadata: dict[str, Any]
    events: list[InspectEvent]
    events_data: dict[Literal["messages", "calls"], list[Any]]
    error: dict[Literal["message", "traceback", "traceback_ansi"], str] | None = None

    @model_validator(mode="after")
    def references_exist(self) -> InspectSample:
        known = len(self.events_data["messages"])
        assert all(0 <= a <= b <= known for event in self.events for a, b in event.input_refs)
        return self


class InspectLog(Strict):
    version: Literal[2]
    status: Literal["success"]
    eval: dict[str, Any]
    samples: list[InspectSample]

    @model_validator(mode="after")
    def samples_are_unique(self) -> InspectLog:
        names = [(sample.id, sample.epoch) for sample in self.samples]
        assert len(set(names)) == len(names)
        assert {"created", "task", "dataset", "model", "config"} <= self.eval.keys()
        return self


RULES: dict[str, type[BaseModel]] = {
    "sft": SFTRow,
    "openai": OpenAIRow,
    "hf": HuggingFaceRow,
    "atif": ATIFDocument,
    "verifiers": VerifiersEpisode,
    "inspect": InspectLog,
}
