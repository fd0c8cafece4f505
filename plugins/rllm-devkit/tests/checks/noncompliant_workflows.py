"""Workflows that break one rule each, with the check that must fail."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from rllm_core.engine import Completer, Terminated
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import Split, Workflow, WorkflowConfig

LIMIT_SECONDS = 2.0  # for rollouts of the workflows that hang
BLOCK_SECONDS = 0.5  # for workflows that block the event loop


class HonestConfig(WorkflowConfig):
    """``[honest]``."""

    tasks: Annotated[int, Field(ge=1, description="Tasks per split.")] = 4


TOOL = {
    "type": "function",
    "function": {
        "name": "twice",
        "description": "Doubles a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


class Honest(Workflow):
    """Asks for a number up to three times, offers a tool, and follows every rule."""

    name: ClassVar[str] = "honest"
    config_model: ClassVar[type[WorkflowConfig]] = HonestConfig
    config: HonestConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        first = 0 if split == "train" else 100
        return [
            Task(task_id=f"{split}-{number}", data={"number": number, "answer": str(2 * number)})
            for number in range(first, first + self.config.tasks)
        ]

    def prompt(self, task: Task) -> Messages:
        return Messages([{"role": "user", "content": f"twice {task.data['number']}?"}])

    def score(self, text: str, task: Task) -> float:
        return float(text.strip() == task.data["answer"])

    def call(self, call: Any) -> str:
        arguments = json.loads(call["function"]["arguments"])
        number = arguments.get("number")
        if call["function"]["name"] != "twice" or type(number) is not int or abs(number) > 10**6:
            return "error"
        return str(2 * number)

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages, steps = self.prompt(task), []
        for _ in range(3):
            step = await self.ask(messages, completer)
            steps.append(step)
            if step.finish_reason is FinishReason.LENGTH:
                return self.end(task, steps, 0.0, TerminationReason.MAX_RESPONSE_TOKENS)
            calls = step.response.get("tool_calls") or ()
            reward = self.score(step.text, task)
            if reward == 1 and not calls:
                return self.end(task, steps, reward, TerminationReason.DONE)
            messages.append(step.response)
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.call(call)})
            if not calls:
                messages.append({"role": "user", "content": "no"})
        return self.end(task, steps, 0.0, TerminationReason.MAX_TURNS)

    async def ask(self, messages: Messages, completer: Completer) -> Step:
        return await completer.complete(messages, tools=[TOOL])

    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return self.episode(
            task,
            steps,
            reward=reward,
            is_correct=reward == 1,
            termination_reason=reason,
            metrics={"turns": float(len(steps))},
        )


# --------------------------------------------------------------------------------------------------------------------
# Settings and tasks


class WithoutAName(Honest):
    name: ClassVar[str] = "No Name"


class NoWorkflow:
    def __init__(self) -> None:
        self.name = "none"

    async def close(self) -> None:
        pass


class LaxConfig(BaseModel):
    tasks: int = 4


class Lax(Honest):
    """Accepts unknown keys."""

    config_model: ClassVar[Any] = LaxConfig


class SilentConfig(WorkflowConfig):
    tasks: int = 4


class Silent(Honest):
    """Has a key without a description."""

    config_model: ClassVar[type[WorkflowConfig]] = SilentConfig


class Unstable(Honest):
    """Returns the tasks in another order at every call."""

    calls = 0

    def tasks(self, split: Split) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        self.calls += 1
        first = self.calls % len(tasks)
        return [*tasks[first:], *tasks[:first]]


class PerInstance(Honest):
    """Has different task ids in every instance, as ids made from a hash have in every process."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(task_id=f"{id(self)}-{task.task_id}", data=task.data) for task in super().tasks(split)]


class Doubled(Honest):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [*super().tasks(split), super().tasks(split)[0]]


class Unwritable(Honest):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task.model_construct(task_id=t.task_id, data={**t.data, "s": {1, 2}}) for t in super().tasks(split)]


class WithoutTasks(Honest):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [] if split == "train" else super().tasks(split)


class WalkedOnce(Honest):
    """Returns its tasks as one iterator, which is exhausted on the second call."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._walked = {"train": iter(super().tasks("train")), "validation": iter(super().tasks("validation"))}

    def tasks(self, split: Split) -> Any:
        return self._walked[split]


class WithoutSplits(Honest):
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks("train")


class Leaking(Honest):
    """Has one training task among the validation tasks, under another id."""

    def tasks(self, split: Split) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        if split == "validation":
            tasks[0] = Task(task_id=tasks[0].task_id, data=super().tasks("train")[0].data)
        return tasks


class Asking(Honest):
    """Has the same question in both splits, but for its case, among tasks with other data."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first = "Twice TWO?" if split == "train" else "twice  two?"
        rest = [(f"{split} {number}?", number) for number in range(3)]
        return [
            Task(task_id=f"{split}-{number}", data={"question": question, "number": number, "answer": "4"})
            for question, number in [(first, 7 if split == "train" else 8), *rest]
        ]


# --------------------------------------------------------------------------------------------------------------------
# Returned episodes


class Nothing(Honest):
    async def run(self, task: Task, completer: Completer) -> Any:
        await super().run(task, completer)


class OfAnotherTask(Honest):
    async def run(self, task: Task, completer: Completer) -> Episode:
        return (await super().run(task, completer)).model_copy(update={"task_id": "another"})


class Resigning(Honest):
    """Reports bad answers of the model as infrastructure errors."""

    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return super().end(task, steps, reward, reason if reward else TerminationReason.ERROR)


class NeverAsking(Honest):
    async def run(self, task: Task, completer: Completer) -> Episode:
        return self.episode(task, [], reward=1.0)


class Endless(Honest):
    """Asks until the answer is right."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages = self.prompt(task)
        while True:
            step = await completer.complete(messages)
            if step.text == "never":
                return self.episode(task, [step], reward=1.0)


class Hanging(Honest):
    async def ask(self, messages: Messages, completer: Completer) -> Step:
        await asyncio.Event().wait()
        raise AssertionError


class WithoutReward(Honest):
    async def run(self, task: Task, completer: Completer) -> Episode:
        return self.episode(task, [await completer.complete(self.prompt(task))])


class Astronomical(Honest):
    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return super().end(task, steps, 1e200, reason)


class WithNaN(Honest):
    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        episode = super().end(task, steps, reward, reason)
        trajectory = Trajectory.model_construct(**{**episode.trajectories[0].__dict__, "reward": float("nan")})
        return Episode.model_construct(**{**episode.__dict__, "trajectories": [trajectory]})


class WithObjects(Honest):
    """Puts an object into the episode that cannot be serialized."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        episode = await super().run(task, completer)
        return Episode.model_construct(**{**episode.__dict__, "metadata": {"completer": completer}})


class WithExtras(Honest):
    """Returns a metric that is not a number."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        episode = await super().run(task, completer)
        return Episode.model_construct(**{**episode.__dict__, "metrics": {"turns": "many"}})


class Retokenising(Honest):
    """Replaces the model's token ids with its own."""

    async def ask(self, messages: Messages, completer: Completer) -> Step:
        step = await super().ask(messages, completer)
        return step.model_copy(update={"completion_ids": step.completion_ids[::-1].copy()})


class Inventing(Honest):
    """Adds a step that the model did not sample."""

    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        more = Step(prompt_ids=[1], completion_ids=[2, 3], logprobs=[0.0, 0.0], weight_version=0)
        return super().end(task, [*steps, more], reward, reason)


class Padding(Honest):
    """Replaces log-probabilities by 0."""

    async def ask(self, messages: Messages, completer: Completer) -> Step:
        step = await super().ask(messages, completer)
        return step.model_copy(update={"logprobs": step.logprobs * 0})


class Repeating(Honest):
    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return super().end(task, [*steps, steps[-1]], reward, reason)


class Forgetful(Honest):
    """Returns no steps."""

    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return super().end(task, [], reward, reason)


class WithNamelessGroups(Honest):
    def group_of(self, episode: Episode, trajectory: Trajectory) -> Any:
        return None


class WithRandomGroups(Honest):
    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        return str(random.random())


class Vandal(Honest):
    """Writes to tasks that all rollouts share."""

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._kept: dict[Split, list[Task]] = {"train": [], "validation": []}

    def tasks(self, split: Split) -> Sequence[Task]:
        self._kept[split] = self._kept[split] or list(super().tasks(split))
        return self._kept[split]

    async def run(self, task: Task, completer: Completer) -> Episode:
        episode = await super().run(task, completer)
        task.data = {**task.data, "seen": True}
        return episode


# --------------------------------------------------------------------------------------------------------------------
# Many rollouts, one instance


class Dicing(Honest):
    """Draws from an unseeded random generator."""

    def prompt(self, task: Task) -> Messages:
        return Messages([{"role": "user", "content": f"{random.random()}"}])


class Counting(Honest):
    """Asks a question that depends on earlier rollouts."""

    rollouts = 0

    def prompt(self, task: Task) -> Messages:
        self.rollouts += 1
        return Messages([{"role": "user", "content": f"{self.rollouts}: twice {task.data['number']}?"}])


class Sharing(Honest):
    """Keeps rollout state on the shared instance."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        self.task = task
        step = await completer.complete(self.prompt(task))
        await asyncio.sleep(0)
        reward = self.score(step.text, self.task)
        reason = TerminationReason.DONE
        if step.finish_reason is FinishReason.LENGTH:
            reason = TerminationReason.MAX_RESPONSE_TOKENS
        return self.episode(
            task, [step], reward=reward, termination_reason=reason, metrics={"of": self.task.data["number"]}
        )


# --------------------------------------------------------------------------------------------------------------------
# Bad answers and engine failures


class NeverCutOff(Honest):
    def end(self, task: Task, steps: list[Step], reward: float, reason: TerminationReason) -> Episode:
        return super().end(task, steps, reward, TerminationReason.DONE)


class Trusting(Honest):
    """Treats any text of digits as a number."""

    def score(self, text: str, task: Task) -> float:
        return float(int(text) == int(task.data["answer"])) if text.isdigit() else 0.0


class Evaluating(Honest):
    def score(self, text: str, task: Task) -> float:
        match = re.fullmatch(r"\s*(\d{1,9})\s*\*\*\s*(\d{1,9})(?:\s*\*\*\s*(\d{1,9}))?\s*", text)
        if match is not None:
            return float(int(match[1]) ** int(match[2]) ** int(match[3] or 1) == 1)
        return super().score(text, task)


class Backtracking(Honest):
    """Parses answers with a pattern whose running time doubles with every letter."""

    def score(self, text: str, task: Task) -> float:
        re.fullmatch(r"(a+)+b", text)
        return super().score(text, task)


class Sleepy(Honest):
    """Blocks the event loop while it waits for a server."""

    def score(self, text: str, task: Task) -> float:
        if text == "exit()":
            time.sleep(10 * BLOCK_SECONDS)
        return super().score(text, task)


class Quitting(Honest):
    def score(self, text: str, task: Task) -> float:
        if "exit" in text:
            sys.exit(3)
        return super().score(text, task)


class Recursive(Honest):
    """Recurses as deep as the brackets are nested."""

    def score(self, text: str, task: Task) -> float:
        return self.score(text[1:-1], task) if text[:1] == "(" and text[-1:] == ")" else super().score(text, task)


class TrustingTools(Honest):
    """Assumes that tool arguments match the tool's schema."""

    def call(self, call: Any) -> str:
        return str(2 + json.loads(call["function"]["arguments"])["number"])


class LeavingCallsOpen(Honest):
    """Replies to tool calls with a user message instead of tool messages."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages, steps = self.prompt(task), []
        for _ in range(2):
            steps.append(await self.ask(messages, completer))
            messages.append(steps[-1].response)
            messages.append({"role": "user", "content": "go on"})
        cut = any(step.finish_reason is FinishReason.LENGTH for step in steps)
        reason = TerminationReason.MAX_RESPONSE_TOKENS if cut else TerminationReason.DONE
        return self.end(task, steps, 0.0, reason)


class Swallowing(Honest):
    """Turns an engine failure into a reward."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        try:
            return await super().run(task, completer)
        except Exception:
            return self.episode(task, [], reward=0.0)


class Wrapping(Honest):
    """Raises its own errors, so that an outage looks like a bug."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        try:
            return await super().run(task, completer)
        except Terminated:
            raise
        except Exception as error:
            raise ValueError("something went wrong") from error


class Uncancellable(Honest):
    async def run(self, task: Task, completer: Completer) -> Episode:
        asked = asyncio.ensure_future(super().run(task, completer))
        for _ in range(20):
            try:
                return await asyncio.shield(asked)
            except asyncio.CancelledError:
                if asked.cancelled():
                    raise
        asked.cancel()
        return await asked


class Unmoved(Honest):
    """Returns a reward when it is cancelled."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        try:
            return await super().run(task, completer)
        except asyncio.CancelledError:
            return self.episode(task, [], reward=0.0)


class LeavingTasks(Honest):
    """Starts a task for each rollout and leaves it running."""

    async def run(self, task: Task, completer: Completer) -> Episode:
        self._left = [*getattr(self, "_left", []), asyncio.create_task(asyncio.Event().wait())]
        return await super().run(task, completer)


class LeavingThreads(Honest):
    async def run(self, task: Task, completer: Completer) -> Episode:
        threading.Thread(target=threading.Event().wait, args=(20.0,), daemon=True).start()
        return await super().run(task, completer)


class LeavingChildren(Honest):
    """Starts a process per rollout and leaves it running if the rollout is cancelled."""

    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    async def run(self, task: Task, completer: Completer) -> Episode:
        child = subprocess.Popen(["sleep", "60"])
        self.left.append(child)
        episode = await super().run(task, completer)
        child.kill()
        child.wait()
        return episode


class Unopenable(Honest):
    async def open(self) -> None:
        raise OSError("no server")


class LeavingItsServer(Honest):
    async def open(self) -> None:
        self._server = asyncio.create_task(asyncio.Event().wait())


class Unclosable(Honest):
    """Closes resources it has not opened."""

    async def open(self) -> None:
        self._server = asyncio.create_task(asyncio.Event().wait())

    async def close(self) -> None:
        self._server.cancel()


NONCOMPLIANT: list[tuple[type[Any], str, str]] = [
    (WithoutAName, "construction", "'No Name' must match"),
    (NoWorkflow, "construction", "is not a Workflow"),
    (Lax, "settings", "must be a subclass of rllm_core.workflow.WorkflowConfig"),
    (Silent, "settings", "SilentConfig: add Field(description=...) to tasks"),
    (Unstable, "tasks", "is different on a second call"),
    (PerInstance, "tasks", "in another instance"),
    (Doubled, "tasks", "two 'train' tasks with the id 'train-0': task 0 and task 4"),
    (Unwritable, "tasks", "cannot be written as JSON"),
    (WithoutTasks, "tasks", "no training tasks"),
    (WalkedOnce, "tasks", "but 0 on a second call"),
    (WithoutSplits, "splits", "4 task ids are in both splits"),
    (Leaking, "splits", "1 of 4 validation tasks are training tasks"),
    (Asking, "splits", "1 of 4 questions of the validation tasks are in training, too"),
    (Nothing, "episodes", "must return an Episode, got NoneType"),
    (OfAnotherTask, "episodes", "an episode of 'another'"),
    (Resigning, "episodes", "termination_reason is 'error'"),
    (NeverAsking, "episodes", "never called the model"),
    (Endless, "episodes", "more than 1000 times"),
    (Hanging, "episodes", "did not end within 2 s"),
    (WithoutReward, "rewards", "has a reward"),
    (Astronomical, "rewards", "a reward is 1e+200"),
    (WithNaN, "rewards", "a reward is nan"),
    (WithObjects, "records", "cannot be written"),
    (WithExtras, "records", "cannot be written"),
    (Retokenising, "steps", "a step differs from the completer's"),
    (Inventing, "steps", "a step differs from the completer's"),
    (Padding, "steps", "a step differs from the completer's"),
    (Repeating, "steps", "repeated"),
    (Forgetful, "steps", "sampled steps"),
    (WithNamelessGroups, "groups", "got None"),
    (WithRandomGroups, "groups", "on a second call"),
    (Vandal, "tasks left alone", "was modified by its rollouts"),
    (Dicing, "determinism", "on a second run: episode.trajectories[0]"),
    (Counting, "determinism", "on a second run: episode.trajectories[0]"),
    (Sharing, "concurrency", "concurrent rollouts change the episode"),
    (NeverCutOff, "cut-off answers", "termination_reason is 'done'"),
    (Trusting, "hostile answers", "made run() raise ValueError"),
    (Evaluating, "hostile answers", "blocked the event loop"),
    (Backtracking, "hostile answers", "blocked the event loop"),
    (Sleepy, "hostile answers", "blocked the event loop"),
    (Quitting, "hostile answers", "made run() raise SystemExit: 3"),
    (Recursive, "hostile answers", "made run() raise RecursionError"),
    (TrustingTools, "tools", "made run() raise"),
    (LeavingCallsOpen, "tools", "has no tool message"),
    (Swallowing, "engine errors", "the completer raised EngineError, but run() returned an episode"),
    (Wrapping, "engine errors", "the completer raised EngineError, but run() raised ValueError"),
    (Uncancellable, "cancellation", "still runs after"),
    (Unmoved, "cancellation", "let CancelledError propagate"),
    (LeavingTasks, "leftovers", "leaves tasks behind"),
    (LeavingThreads, "leftovers", "leaves threads behind"),
    (LeavingChildren, "leftovers", "leaves child processes behind"),
    (Unopenable, "opening", "no server"),
    (LeavingItsServer, "closing", "leaves tasks behind"),
    (Unclosable, "closing", "raised AttributeError"),
]
HANGING = {Hanging, Uncancellable}
BLOCKING = {Evaluating, Backtracking, Sleepy}
