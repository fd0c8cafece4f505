"""Scripted engine, backend, parser and workflow for fast tests without torch.

The policy is one number, ``skill``: the probability that the engine answers with the ``good`` text. A training step
changes it by the mean of advantage times +1 for good answers and -1 for others. It thus learns if and only if the loop
assigns the right advantages to the right tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from rllm_core.backend import BackendProtocol, Capabilities, OptimizerStep, Policy, PolicyUpdate, UpdateResult
from rllm_core.engine import Completer, RolloutEngine
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, Termination, ToolSpec, Vocabulary
from rllm_core.types import (
    Episode,
    FinishReason,
    Floats,
    MessageLike,
    Messages,
    SamplingParams,
    Step,
    Task,
    TerminationReason,
    TokenIds,
    TokenInput,
    TokenOutput,
    TrainingSample,
    text_only,
    token_ids,
)
from rllm_core.workflow import Split, Workflow, WorkflowConfig

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rllm_core.config import RunConfig
    from rllm_core.plugins import PluginManager


class ByteParser(BaseParser):
    r"""UTF-8 bytes as token ids, with control tokens; every text has exactly one tokenization.

    A message is ``<start> role \\n content <end>``; a prompt ends with an open assistant message.
    """

    name: ClassVar[str] = "bytes"
    supports_bridge = True
    START, END = 256, 257
    vocab_size = 258

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> ByteParser:
        """Ignores the model; there is nothing to read."""
        return cls()

    @property
    def tokenizer(self) -> Any:
        """None, because bytes need no tokenizer."""
        return None

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `BaseParser.render`."""
        ids: list[int] = []
        for message in messages:
            text = message.get("content")
            body = text if isinstance(text, str) else json.dumps(text)
            ids += [self.START, *f"{message['role']}\n{body}".encode(), self.END]
        if add_generation_prompt:
            ids += [self.START, *b"assistant\n"]
        return ids

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """See `BaseParser.parse_completion`."""
        ids = [int(token) for token in completion_ids]
        stopped = self.END in ids
        body = ids[: ids.index(self.END)] if stopped else ids
        text = bytes(token for token in body if token < 256).decode(errors="replace")
        return ParsedCompletion(text, termination=Termination.STOP if stopped else Termination.TRUNCATED)

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """See `BaseParser.get_stop_token_ids`."""
        return (self.END,)

    def vocabulary(self) -> Vocabulary:
        """See `BaseParser.vocabulary`."""
        spellings = [*(bytes([byte]) for byte in range(256)), None, None]
        return Vocabulary(spellings, {"<start>": self.START, "<end>": self.END}, lambda text: list(text.encode()))

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Appended:
        """See `BaseParser.bridge_to_next_turn`; adds the end token to a truncated completion."""
        close = [] if self.END in completion_ids else [self.END]
        return Appended(prompt_ids, completion_ids, [*close, *self.render(new_messages, tools=tools)])


@dataclass
class Script:
    """Behavior of a scripted engine.

    Attributes:
        good: Answer given with probability ``skill``.
        bad: Answer given otherwise.
        latency_seconds: Duration of a call, in seconds, drawn from the call's random generator.
        unscored: Whether scoring leaves out the log-probability at a position, as some engines do at the first one.
        failure: Called with the request number; an exception it returns is raised instead of answering.
    """

    good: str = "yes"
    bad: str = "no"
    latency_seconds: Callable[[random.Random], float] | None = None
    unscored: Callable[[int], bool] | None = None
    failure: Callable[[int], Exception | None] | None = None


class ScriptedEngine(RolloutEngine):
    """Answers ``good`` with probability ``skill``; deterministic per seed."""

    name: ClassVar[str] = "scripted"
    computes_logprobs: ClassVar[bool] = True

    def __init__(self, parser: BaseParser | None = None, script: Script | None = None, *, skill: float = 0.5) -> None:
        self.parser = parser or ByteParser()
        self.script = script or Script()
        self.skill = skill
        self.requests = 0
        self.calls = 0

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> ScriptedEngine:
        """See `RolloutEngine.from_config`."""
        return cls(parser)

    @property
    def supports_token_in_token_out(self) -> bool:
        """True."""
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        [output] = await self.get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=[seed], is_validation=is_validation
        )
        return output

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """See `RolloutEngine.get_token_outputs_from_token_input`."""
        text_only(token_input, f"engine {self.name!r}")
        self.calls += 1
        version, skill = self.weight_version, self.skill
        if self.script.latency_seconds is not None:
            await asyncio.sleep(self.script.latency_seconds(random.Random(seeds[0])))
        outputs = []
        for seed in seeds:
            self.requests += 1
            error = self.script.failure(self.requests) if self.script.failure is not None else None
            if error is not None:
                raise error
            outputs.append(self._answer(seed, sampling_params, version, skill))
        return outputs

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        """See `RolloutEngine.compute_logprobs`; scores each answer with its probability of being given."""
        self.requests += 1
        error = self.script.failure(self.requests) if self.script.failure is not None else None
        if error is not None:
            raise error
        known = np.full(len(tokens) - start, np.nan, np.float32)
        for begin, end in self._answers(tokens, start):
            known[begin - start : end - start] = text_logprobs(self.script, self.skill, tokens[begin:end])
        if self.script.unscored is not None:
            known[[place for place in range(len(known)) if self.script.unscored(place)]] = np.nan
        return known

    @staticmethod
    def _answers(tokens: TokenIds, start: int) -> Iterator[tuple[int, int]]:
        """Yields the spans of the answers from ``start`` on, as `ByteParser` renders them."""
        opening = [ByteParser.START, *b"assistant\n"]
        ids, begin = tokens.tolist(), start
        while begin < len(ids):
            end = ids.index(ByteParser.END, begin) + 1 if ByteParser.END in ids[begin:] else len(ids)
            yield begin, end
            openings = (at for at in range(end, len(ids)) if ids[at : at + len(opening)] == opening)
            begin = next(openings, len(ids)) + len(opening)

    def _answer(self, seed: int, sampling_params: SamplingParams, version: int, skill: float) -> TokenOutput:
        good = random.Random(seed).random() < skill if sampling_params.temperature else skill >= 0.5
        ids = [*(self.script.good if good else self.script.bad).encode(), *sampling_params.stop_token_ids[:1]]
        cut = ids[: sampling_params.max_response_tokens]
        probability = skill if good else 1 - skill
        return TokenOutput(
            token_ids=token_ids(cut),
            logprobs=np.full(len(cut), math.log(max(probability, 1e-6)) / len(cut), np.float32),
            finish_reason=FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH,
            weight_version=version,
        )


def text_logprobs(script: Script, skill: float, completion: TokenIds) -> Floats:
    """Returns ``(tokens,)`` log-probabilities: the text's own, spread evenly; very low for unknown texts."""
    text = bytes(int(token) for token in completion if token < 256).decode(errors="replace")
    probability = {script.good: skill, script.bad: 1 - skill}.get(text, 0.0)
    return np.full(len(completion), math.log(max(probability, 1e-6)) / max(1, len(completion)), np.float32)


@dataclass
class ScriptedBatch:
    """Batch of the scripted backend: the sum of advantage times direction, and the token count."""

    push: float
    sampled_tokens: int


@dataclass
class Calls:
    """Calls of a scripted backend, in order."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def names(self) -> list[str]:
        """Returns the names of the called methods, in order."""
        return [call[0] for call in self.log]


class ScriptedBackend(BackendProtocol[ScriptedBatch]):
    """Trains the scripted policy; records every call in ``calls``.

    Tests configure it with class attributes of a subclass: ``script``, ``capability_overrides``, ``speed`` (change of
    the skill per step) and ``seconds_per_step``.
    """

    name: ClassVar[str] = "scripted"
    script: ClassVar[Script] = Script()
    capability_overrides: ClassVar[dict[str, Any]] = {}
    speed: ClassVar[float] = 0.05
    seconds_per_step: ClassVar[float] = 0.0

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self.calls = Calls()
        self.skill = 0.5
        self.steps = 0
        self._push = 0.0
        self._tokens = 0
        self.rollout_engine: ScriptedEngine | None = None
        self.reference_engine: ScriptedEngine | None = None
        self._skill_at_start = self.skill

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """See `BackendProtocol.capabilities`."""
        defaults: dict[str, Any] = {
            "losses": frozenset({"reinforce", "cross_entropy"}),
            "deferred_normalisation": True,
            "deterministic": True,
            "entropy_bonus": True,
        }
        return Capabilities(**{**defaults, **cls.capability_overrides})

    def validate_config(self) -> list[str]:
        """See `BackendProtocol.validate_config`."""
        return []

    async def init_rollout_engine(self, parser: BaseParser) -> ScriptedEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        self.rollout_engine = ScriptedEngine(parser, self.script, skill=self.skill)
        return self.rollout_engine

    async def init_reference_engine(self) -> ScriptedEngine:
        """See `BackendProtocol.init_reference_engine`."""
        assert self.rollout_engine is not None
        self.reference_engine = ScriptedEngine(self.rollout_engine.parser, self.script, skill=self._skill_at_start)
        return self.reference_engine

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> ScriptedBatch:
        """See `BackendProtocol.transform_to_backend_batch`."""
        good = self.script.good.encode()
        push, tokens = 0.0, 0
        for sample in samples:
            position = 0
            for start, stop in sample.turn_spans:
                said = bytes(int(t) for t in sample.token_ids[start:stop] if t < 256)
                direction = 1.0 if said == good else -1.0
                push += direction * float(sample.advantages[position : position + stop - start].sum())
                position += stop - start
            tokens += sample.sampled_tokens
        return ScriptedBatch(push, tokens)

    async def process_backend_batch(self, batch: ScriptedBatch) -> None:
        """See `BackendProtocol.process_backend_batch`."""
        self.calls.log.append(("process_backend_batch", batch.sampled_tokens))
        self._push += batch.push
        self._tokens += batch.sampled_tokens

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """See `BackendProtocol.update_policy`."""
        if self.seconds_per_step:
            await asyncio.sleep(self.seconds_per_step)
        if self._tokens != step.sampled_tokens:
            raise RuntimeError(f"{self._tokens} tokens were processed, but the step has {step.sampled_tokens}")
        self.calls.log.append(("update_policy", step.step))
        self.skill = min(max(self.skill + self.speed * self._push / max(step.sampled_tokens, 1), 0.01), 0.99)
        self.steps += 1
        self._push, self._tokens = 0.0, 0
        return UpdateResult({"skill": self.skill})

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """See `BackendProtocol.on_policy_updated`."""
        self.calls.log.append(("on_policy_updated", update.version, update.reason))
        if self.rollout_engine is not None:
            self.rollout_engine.skill = self.skill
            self.rollout_engine.weight_version = update.version

    async def enter_generation(self) -> None:
        """See `BackendProtocol.enter_generation`."""
        self.calls.log.append(("enter_generation",))

    async def enter_training(self) -> None:
        """See `BackendProtocol.enter_training`."""
        self.calls.log.append(("enter_training",))

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """See `BackendProtocol.compute_logprobs`; equals the engine's values, also for target tokens."""
        return [self._of_written(sample) if sample.logprobs is None else sample.logprobs for sample in samples]

    def _of_written(self, sample: TrainingSample) -> Floats:
        spans = [sample.token_ids[start:stop] for start, stop in sample.turn_spans]
        return np.concatenate([text_logprobs(self.script, self.skill, span) for span in spans])

    async def save_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.save_checkpoint`."""
        self.calls.log.append(("save_checkpoint", self.steps))
        state = {"skill": self.skill, "steps": self.steps}
        (directory / "policy.json").write_text(json.dumps(state), encoding="utf-8")

    async def load_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.load_checkpoint`."""
        state = json.loads((directory / "policy.json").read_text(encoding="utf-8"))
        self.skill, self.steps = state["skill"], state["steps"]
        self.calls.log.append(("load_checkpoint", self.steps))

    async def load_weights(self, directory: Path) -> None:
        """See `BackendProtocol.load_weights`."""
        self.skill = self._skill_at_start = json.loads((directory / "policy.json").read_text(encoding="utf-8"))["skill"]
        if self.reference_engine is not None:
            self.reference_engine.skill = self.skill
        self.calls.log.append(("load_weights", self.skill))

    async def shutdown(self) -> None:
        """See `BackendProtocol.shutdown`."""
        self.calls.log.append(("shutdown",))


class ScriptedColocatedBackend(ScriptedBackend):
    """Scripted backend that shares its devices with its engine; asserts that the two never run at the same time."""

    name: ClassVar[str] = "scripted_colocated"
    capability_overrides: ClassVar[dict[str, Any]] = {"colocated": True}

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self._generating = False

    async def enter_generation(self) -> None:
        """See `BackendProtocol.enter_generation`."""
        await super().enter_generation()
        self._generating = True

    async def enter_training(self) -> None:
        """See `BackendProtocol.enter_training`."""
        await super().enter_training()
        self._generating = False

    async def process_backend_batch(self, batch: ScriptedBatch) -> None:
        """See `BackendProtocol.process_backend_batch`."""
        if self._generating:
            raise RuntimeError("training while the engine is using the devices")
        await super().process_backend_batch(batch)


class ScriptedWorkflowConfig(WorkflowConfig):
    """``[say_yes]``."""

    tasks: Annotated[int, Field(description="Number of training tasks.")] = 20
    validation_tasks: Annotated[int, Field(description="Number of validation tasks.")] = 5
    turns: Annotated[int, Field(description="Model calls per rollout.")] = 1
    wait_seconds: Annotated[float, Field(description="Delay between turns, in seconds.")] = 0.0


class ScriptedWorkflow(Workflow):
    """Asks the model ``turns`` times to say yes; the reward is the share of yes answers."""

    name: ClassVar[str] = "say_yes"
    config_model: ClassVar[type[WorkflowConfig]] = ScriptedWorkflowConfig
    config: ScriptedWorkflowConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`."""
        count = self.config.tasks if split == "train" else self.config.validation_tasks
        return [Task(task_id=f"{split}-{number}", data={"number": number}) for number in range(count)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """See `Workflow.run`."""
        messages = Messages([{"role": "user", "content": f"task {task.task_id}: say yes"}])
        steps: list[Step] = []
        for turn in range(self.config.turns):
            if turn:
                if self.config.wait_seconds:
                    await asyncio.sleep(self.config.wait_seconds)
                messages.append({"role": "user", "content": "again"})
            step = await completer.complete(messages)
            messages.append(step.response)
            steps.append(step)
        share = sum(step.text == "yes" for step in steps) / len(steps)
        is_cut_off = any(step.finish_reason is FinishReason.LENGTH for step in steps)
        reason = TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE
        return self.episode(task, steps, reward=share, is_correct=share == 1, termination_reason=reason)
