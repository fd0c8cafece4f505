"""Workflows that run in workers. The id of a task says what its rollout does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rllm_core.engine import Completer, EngineError, Terminated
from rllm_core.errors import ConfigError
from rllm_core.scope import timed
from rllm_core.seeds import derive_seed
from rllm_core.types import Episode, Messages, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import Workflow, WorkflowConfig

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

CALLED = "TEST_CALLED"  # path of a file that a test creates once its engine has been called


class TalkConfig(WorkflowConfig):
    """Settings of `Talk`."""

    greeting: str = "say yes"


class Talk(Workflow):
    """Uses everything that a completer and a step offer."""

    name = "talk"
    config_model = TalkConfig

    def tasks(self, split: Any) -> list[Task]:
        """Two tasks per split."""
        return [Task(task_id=f"{split}-{number}", data={"number": number}) for number in range(2)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays what the task's id says."""
        step: Step = await getattr(self, f"_{task.task_id}", self._plain)(task, completer)
        if isinstance(step, Step):
            return self.episode(task, [step], reward=float(len(step.text)))
        return step  # type: ignore[unreachable]

    async def _plain(self, task: Task, completer: Completer) -> Step:
        return await completer.complete([{"role": "user", "content": self.config.greeting}])  # type: ignore[attr-defined]

    async def _turns(self, task: Task, completer: Completer) -> Episode:
        messages, steps = Messages([{"role": "user", "content": "go on"}]), []
        for turn in range(4):
            step = await completer.complete(messages)
            step.reward = turn / 4
            steps.append(step)
            messages += [step.response, {"role": "user", "content": f"turn {turn} ünï 🎲"}]
        return self.episode(task, steps, metrics={"turns": 4.0}, metadata={"big": 10**30, "none": None})

    async def _list(self, task: Task, completer: Completer) -> Episode:
        """Plain lists and dictionaries, copied in every turn."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1"}]
        steps = []
        for turn in range(3):
            step = await completer.complete([dict(message) for message in messages])
            steps.append(step)
            messages += [dict(step.response), {"role": "user", "content": str(turn)}]
        return self.episode(task, steps, reward=1.0, is_correct=True)

    async def _edited(self, task: Task, completer: Completer) -> Episode:
        """A history that is edited, which starts a new segment."""
        messages = [{"role": "user", "content": "first"}]
        first = await completer.complete(messages)
        second = await completer.complete([{"role": "user", "content": "other"}, first.response, *messages])
        third = await completer.complete(
            [{"role": "user", "content": "other"}, first.response, *messages, second.response, *messages]
        )
        return self.episode(task, [first, second, third], reward=0.5)

    async def _forks(self, task: Task, completer: Completer) -> Episode:
        """Forks of forks, asked in parallel and out of order, with an answer of one in the prompt of another."""
        forks = [completer.fork() for _ in range(3)]
        inner = forks[1].fork()
        ask = [{"role": "user", "content": "who"}]
        last, deep = await asyncio.gather(forks[2].complete(ask), inner.complete(ask))
        first = await forks[0].complete([*ask, deep.response, {"role": "user", "content": "and you"}])
        judge = await completer.complete([{"role": "user", "content": f"{last.text} {first.text}"}])
        trajectories = [
            Trajectory(role="solver", steps=[step], reward=float(number))
            for number, step in enumerate((last, deep, first))
        ]
        seeds = [fork.seed for fork in (*forks, inner)]
        return Episode(
            task_id=task.task_id,
            trajectories=[*trajectories, Trajectory(role="judge", steps=[judge], reward=2.0, trainable=False)],
            metadata={"seeds": seeds, "mine": derive_seed(completer.seed, "environment")},
        )

    async def _branches(self, task: Task, completer: Completer) -> Episode:
        """Forks after steps, with names and without; alternatives; stop texts and metadata."""
        messages = Messages([{"role": "user", "content": "go on"}])
        one = await completer.complete(messages, tools=TOOLS, metadata={"call": 1})
        messages += [one.response, {"role": "user", "content": "more"}]
        two = await completer.complete(messages)
        named, numbered, empty = completer.fork(after=one, key="left"), completer.fork(after=one), completer.fork()
        again = completer.fork(after=one, key="left")
        asked = [*one.messages, one.response, {"role": "user", "content": "other"}]
        left, right, same = await asyncio.gather(*(fork.complete(asked) for fork in (named, numbered, again)))
        deep = await named.fork(key="deep", after=two).complete([*two.messages, two.response, *messages[:1]])
        cut = await empty.complete(messages[:1], stop_texts=["e", "o"], max_response_tokens=30)
        ways = await named.complete_many([*left.messages, left.response, *messages[:1]], 2, metadata={"way": True})
        steps = [one, two, left, right, same, deep, cut, *ways]
        seeds = [fork.seed for fork in (named, numbered, again, empty)]
        breaks = [step.break_reason for step in steps]
        return self.episode(task, steps, reward=1.0, metadata={"seeds": seeds, "breaks": breaks})

    async def _tokens(self, task: Task, completer: Completer) -> Episode:
        """Reads and sets tokens of steps."""
        messages = Messages([{"role": "user", "content": "count"}])
        one = await completer.complete(messages)
        messages += [one.response, {"role": "user", "content": "again"}]
        two = await completer.complete(messages, max_response_tokens=5)
        assert two.logprobs is not None
        two.token_rewards = np.linspace(0, 1, len(two.completion_ids))
        one.metadata = {"prompt": one.prompt_ids.tolist(), "continues": two.continues(one)}
        said = {"ids": two.prompt_ids.tolist(), "logprobs": two.logprobs.tolist(), "finish": two.finish_reason.value}
        return self.episode(task, [one, two], reward=0.0, metadata=said)

    async def _tools(self, task: Task, completer: Completer) -> Episode:
        messages = Messages([{"role": "user", "content": "add"}])
        one = await completer.complete(messages, tools=TOOLS)
        with timed("tool", "add"):
            await asyncio.sleep(0)
        messages += [one.response, {"role": "user", "content": "more"}]
        two = await completer.complete(messages, tools=TOOLS)
        three = await completer.complete([*messages, two.response, {"role": "user", "content": "none"}])
        return self.episode(task, [one, two, three], reward=1.0)

    async def _looks(self, task: Task, completer: Completer) -> Episode:
        """Looks at the completer."""
        step = await self._plain(task, completer)
        params = completer.sampling_params.model_dump(mode="json")
        said = {"validation": completer.is_validation, "longest": completer.max_prompt_tokens, "params": params}
        return self.episode(task, [step], reward=0.0, metadata=said)

    async def _forks_another(self, task: Task, completer: Completer) -> Step:
        """Forks after a step that the run does not know."""
        said = [{"role": "user", "content": "x"}]
        step = Step(step_id="another", prompt_ids=[1, 2], completion_ids=[3], messages=said)
        return await completer.fork(after=step).complete([{"role": "user", "content": "x"}])

    async def _counts(self, task: Task, completer: Completer) -> Episode:
        """The length of a prompt before it is sampled from, and the bytes of what was sampled."""
        messages = Messages([{"role": "user", "content": "count"}])
        steps, found = [], []
        for tools in (None, TOOLS, None):
            counted = await completer.count_prompt_tokens(messages, tools=tools)
            step = await completer.complete(messages, tools=tools)
            assert counted == len(step.prompt_ids)
            spelled = await completer.fork().spell(step)
            assert [bytes([one]) for one in step.completion_ids[:-1]] == spelled[:-1]
            found.append(b"".join(spelled).decode(errors="replace"))
            steps.append(step)
            messages += [step.response, {"role": "user", "content": "and now"}]
        return self.episode(task, steps, reward=1.0, metadata={"found": found})

    async def _gives_up(self, task: Task, completer: Completer) -> Step:
        """Cancels a call, which may have been answered, and asks again."""
        asking = asyncio.create_task(completer.complete([{"role": "user", "content": "slow"}]))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        return await self._plain(task, completer)

    async def _gives_up_in_engine(self, task: Task, completer: Completer) -> Step:
        """Cancels a call that the engine is answering, and asks again."""
        asking = asyncio.create_task(completer.complete([{"role": "user", "content": "slow"}]))
        while not Path(os.environ[CALLED]).exists():
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        return await self._plain(task, completer)

    async def _written(self, task: Task, completer: Completer) -> Episode:
        """Target tokens that the model did not sample."""
        step = Step(prompt_ids=[1, 2], completion_ids=[3], messages=[{"role": "user", "content": "x"}])
        return self.episode(task, [step], reward=1.0)

    # What goes wrong

    async def _raises(self, task: Task, completer: Completer) -> Step:
        raise ZeroDivisionError("reward is broken")

    async def _exits(self, task: Task, completer: Completer) -> Step:
        sys.exit(2)

    async def _terminates(self, task: Task, completer: Completer) -> Step:
        raise Terminated(TerminationReason.MAX_TURNS, "enough")

    async def _times_out(self, task: Task, completer: Completer) -> Step:
        raise TimeoutError("a tool timed out")

    async def _engine_error(self, task: Task, completer: Completer) -> Step:
        raise EngineError("of its own")

    async def _cancelled(self, task: Task, completer: Completer) -> Step:
        raise asyncio.CancelledError

    async def _config_error(self, task: Task, completer: Completer) -> Step:
        raise ConfigError("the data are wrong; fix them")

    async def _none(self, task: Task, completer: Completer) -> None:
        await self._plain(task, completer)

    async def _nan(self, task: Task, completer: Completer) -> Episode:
        return self.episode(task, [await self._plain(task, completer)], reward=float("nan"))

    async def _no_reward(self, task: Task, completer: Completer) -> Episode:
        return self.episode(task, [await self._plain(task, completer)])

    async def _twice(self, task: Task, completer: Completer) -> Episode:
        step = await self._plain(task, completer)
        return self.episode(task, [step, step], reward=1.0)

    async def _foreign(self, task: Task, completer: Completer) -> Episode:
        """A step of another rollout."""
        step = await self._plain(task, completer)
        kept, self.kept = getattr(self, "kept", None), step
        return self.episode(task, [kept or step], reward=1.0)

    async def _changed(self, task: Task, completer: Completer) -> Episode:
        step = await self._plain(task, completer)
        step.completion_ids = [*step.completion_ids[:-1], 7]  # type: ignore[list-item]
        return self.episode(task, [step], reward=1.0)

    async def _too_many(self, task: Task, completer: Completer) -> Step:
        """Two calls of one conversation at once."""
        await asyncio.gather(self._plain(task, completer), self._plain(task, completer))
        return await self._plain(task, completer)

    async def _bad_message(self, task: Task, completer: Completer) -> Step:
        return await completer.complete([{"content": "no role"}])

    async def _surrogate(self, task: Task, completer: Completer) -> Step:
        return await completer.complete([{"role": "user", "content": "\ud800"}])

    async def _wrong_items(self, task: Task, completer: Completer) -> Episode:
        episode = self.episode(task, [await self._plain(task, completer)], reward=1.0)
        episode.__dict__["trajectories"] = [1]
        return episode


class Fault(Talk):
    """Damages its worker."""

    name = "fault"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays what the task's id says."""
        match task.task_id.partition("-")[0]:
            case "exit":
                os._exit(3)
            case "crash":
                print("the last words", file=sys.stderr, flush=True)
                ctypes.string_at(0)
            case "kill":
                print("the last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_once":
                marker = task.data["marker"]
                if not os.path.exists(marker):  # noqa: PTH110
                    with open(marker, "w"):  # noqa: PTH123
                        os._exit(3)
            case "spin":
                while True:
                    pass
            case "sleep":
                time.sleep(3600)
            case "stubborn":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except:  # noqa: E722
                        pass
            case "memory":
                kept = []
                while True:
                    kept.append(bytearray(1 << 24))
            case "flood":
                while True:
                    print("x" * 1000)
            case "prints":
                print("hello from a rollout")
            case "waits":
                await asyncio.sleep(3600)
            case "children":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
                with open(task.data["pids"], "a") as pids:  # noqa: PTH123
                    pids.write(f"{os.getpid()}\n{child.pid}\n")
                await asyncio.sleep(3600)
        step = await completer.complete([{"role": "user", "content": "say yes"}])
        about = {"pid": os.getpid(), "torch": "torch" in sys.modules, "python": sys.executable}
        return self.episode(task, [step], reward=1.0, metadata=about)


class Opens(Talk):
    """Owns something that each worker opens."""

    name = "opens"

    async def open(self) -> None:
        """Opens it."""
        self.opened = os.getpid()

    async def close(self) -> None:
        """Closes it."""
        raise RuntimeError("it does not close")

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Says where it was opened."""
        return self.episode(task, [await self._plain(task, completer)], reward=1.0, metadata={"pid": self.opened})


class DoesNotOpen(Talk):
    """Cannot be opened."""

    name = "does-not-open"

    async def open(self) -> None:
        """Fails."""
        raise OSError("no server")


class GlobalState(Talk):
    """Seeds the random numbers of its process, as some games do."""

    name = "global-state"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Draws numbers around calls."""
        random.seed(task.data["seed"])
        drawn, steps = [], []
        for turn in range(3):
            drawn.append(random.random())
            steps.append(await completer.complete([{"role": "user", "content": f"turn {turn}"}]))
        return self.episode(task, steps, reward=1.0, metadata={"drawn": drawn})
