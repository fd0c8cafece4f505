"""A taskset with two agents: one says a number, the other one must say a higher one. The first is not trained."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

__all__ = ["Higher", "HigherEnv"]


class HigherData(vf.TaskData):
    """What the first agent is asked."""

    top: int


def number(trace: vf.Trace) -> int:
    """Returns what was said as a number; -1 if it is none, or has more digits than Python reads."""
    said = trace.last_reply.strip()
    return int(said) if said.isdecimal() and len(said) < 10 else -1


class HigherTask(vf.Task[HigherData]):
    """Each agent's own reward: whether it said a number up to the top."""

    @vf.reward(weight=0.5)
    async def is_number(self, trace: vf.Trace) -> float:
        """Whether the last answer is a number in the range."""
        return float(0 <= number(trace) <= self.data.top)


class HigherConfig(vf.EnvConfig):
    """The two agents."""

    first: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="null"))
    second: vf.AgentConfig = vf.AgentConfig(max_turns=2)


class HigherEnv(vf.Env[HigherConfig]):
    """The second agent gets two turns."""

    async def setup(self, agents: Any) -> None:
        """The first agent is part of the world."""
        agents.first.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        """Both play."""
        trace = await agents.first.run(task)
        said = trace.last_reply
        question = type(task)(task.data.model_copy(update={"prompt": f"Say a number higher than {said}."}), task.config)
        async with agents.second.interaction(question) as talk:
            await talk.turn()
            await talk.turn("Are you sure? Say it again.")

    async def finalize(self, task: Any, episode: Any) -> None:
        """Compares the numbers."""
        numbers = {trace.agent.name: number(trace) for trace in episode.traces}
        for trace in episode.traces:
            if trace.agent.name == "second":
                trace.record_reward("higher", float(numbers["second"] > numbers["first"]), 0.5)


class Higher(vf.Taskset[HigherTask]):
    """Ten tasks."""

    def load(self) -> list[HigherTask]:
        """Returns them."""
        return [HigherTask(HigherData(prompt=f"Say a number up to {top}.", top=top)) for top in range(10, 20)]
