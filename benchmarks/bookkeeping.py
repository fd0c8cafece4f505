"""CPU time of the core's own bookkeeping, measured with an engine that answers at once.

Per turn, three sides run the same rollouts of the same workflow:

* ``whole``: as in a run, with rollout runner, request merger, completer and session;
* ``completer``: a completer that calls the engine directly, without runner and merger;
* ``bare``: without the core: only the workflow's messages, the parser's tokens and the engine's answers.

The cost of a turn is a slope: a long conversation minus a short one, per turn. With an engine that answers at once, all
sides run conversations one after the other, except for a run's first turns, which wait for equal requests. So all sides
are measured again (``_suspended``) with an engine that lets others run before it answers, like every remote engine. Per
group, generation with coordinator, buffer, rollout accounting and journal gets recorded rollouts (``whole``); asyncio
tasks that only return them are the baseline (``bare``).
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import rllm_devkit.scripted_plugin
from benchmarks.simulated import OwnPrompts, SimulationPlugin
from benchmarks.trials import Figures, RawTrials, Row, of_kind
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.assembly.tasks import TaskStream
from rllm_core.config import RunConfig
from rllm_core.engine import TITOCompleter
from rllm_core.hosts.inline import Inline
from rllm_core.observers import Observers
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.tracking import Trackers
from rllm_core.training.generation import Generation
from rllm_core.training.rollouts import Rollout, RolloutKey, RolloutRunner
from rllm_core.training.run_parts import RunParts
from rllm_core.types import Episode, SamplingParams, Task, TokenOutput
from rllm_devkit.scripted import ByteParser, ScriptedEngine, ScriptedWorkflowConfig

SHORT_TURNS, LONG_TURNS = 2, 12
ROLLOUTS = 200
GROUPS = 200
ROLLOUTS_PER_GROUP = 8
GROUPS_PER_STEP = 50
PARAMS = SamplingParams(stop_token_ids=(ByteParser.END,))
Side = Callable[[], Coroutine[Any, Any, object]]


def measure(trials: RawTrials, count: int) -> None:
    """Alternates the sides, trial by trial; the first trial warms up."""
    groups = Groups()
    for trial in range(-1, count):
        rows = [*_turn_rows(), *groups.rows()]
        if trial >= 0:
            for row in rows:
                trials.add({**row, "trial": trial})


def _plugins() -> PluginManager:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(SimulationPlugin(), "simulation")
    return plugins


def _config(plugins: PluginManager) -> RunConfig:
    settings = {
        "training.steps": GROUPS // GROUPS_PER_STEP,
        "training.groups_per_step": GROUPS_PER_STEP,
        "training.rollouts_per_group": ROLLOUTS_PER_GROUP,
        "training.staleness_threshold": GROUPS // GROUPS_PER_STEP - 1,
        "training.partial_rollout": "true",
        "rollout.max_concurrent_requests": ROLLOUTS,
        "own_prompts.tasks": GROUPS,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_run_config("own_prompts", plugins, overrides=overrides, backend="punctual")


def cpu_seconds(side: Side) -> float:
    """Returns the CPU time of this process while ``side`` runs; collects garbage first."""
    gc.collect()

    async def timed() -> float:
        began = time.process_time()
        await side()
        return time.process_time() - began

    return asyncio.run(timed())


# --------------------------------------------------------------------------------------------------------------------
# Turns


class SuspendingEngine(ScriptedEngine):
    """Lets other tasks run before it answers."""

    name: ClassVar[str] = "suspending"

    async def get_token_outputs_from_token_input(self, *prompt: Any, **options: Any) -> list[TokenOutput]:
        """See `RolloutEngine.get_token_outputs_from_token_input`."""
        await asyncio.sleep(0)
        return await super().get_token_outputs_from_token_input(*prompt, **options)


def _turn_rows() -> list[Row]:
    sides = (("whole", whole_rollouts), ("completer", completer_rollouts), ("bare", bare_rollouts))
    rows = []
    for engine, turns, (side, play) in product((ScriptedEngine, SuspendingEngine), (SHORT_TURNS, LONG_TURNS), sides):
        about = {"kind": "turns", "suspended": engine is SuspendingEngine, "side": side, "turns": turns}
        rows.append({**about, "rollouts": ROLLOUTS, "cpu_seconds": cpu_seconds(play(turns, engine()))})
    return rows


def _workflow(turns: int) -> OwnPrompts:
    return OwnPrompts(ScriptedWorkflowConfig(turns=turns, tasks=ROLLOUTS))


def whole_rollouts(turns: int, engine: ScriptedEngine) -> Side:
    """Runs rollouts as in a run."""
    workflow, plugins = _workflow(turns), _plugins()
    config, tasks = _config(plugins), workflow.tasks("train")

    async def side() -> list[Rollout]:
        runner = RolloutRunner(Inline.of(workflow), engine, config, lockstep=False)
        played = (runner.run(task, RolloutKey("train", ordinal, 0)) for ordinal, task in enumerate(tasks))
        return await asyncio.gather(*played)

    return side


def completer_rollouts(turns: int, engine: ScriptedEngine) -> Side:
    """Runs rollouts with completers that call the engine directly."""
    workflow = _workflow(turns)
    tasks = workflow.tasks("train")

    async def side() -> list[Episode]:
        played = (
            workflow.run(task, TITOCompleter(engine, sampling_params=PARAMS, seed=seed))
            for seed, task in enumerate(tasks)
        )
        return await asyncio.gather(*played)

    return side


def bare_rollouts(turns: int, engine: ScriptedEngine) -> Side:
    """Runs rollouts without the core."""
    workflow, parser = _workflow(turns), ByteParser()
    tasks = workflow.tasks("train")

    async def play(task: Task, seed: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{task.task_id} {seed}"}]
        prompt = parser.render(messages)
        for turn in range(turns):
            [output] = await engine.get_token_outputs_from_token_input(
                prompt, sampling_params=PARAMS, seeds=[seed + turn]
            )
            parsed = parser.parse_completion(output.token_ids, prompt_ids=prompt)
            new = {"role": "user", "content": "again"}
            messages += [{"role": "assistant", "content": parsed.content}, new]
            if turn + 1 < turns:
                bridged = parser.bridge_to_next_turn(prompt, output.token_ids, [new])
                prompt = [*prompt, *output.token_ids.tolist(), *bridged.new_ids]
        return messages

    async def side() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(play(task, seed) for seed, task in enumerate(tasks)))

    return side


# --------------------------------------------------------------------------------------------------------------------
# Groups


class Played(RolloutRunner):
    """Returns recorded rollouts."""

    episodes: dict[tuple[int, int], Episode]

    async def attempt(self, task: Task, key: RolloutKey) -> Rollout:
        """See `RolloutRunner.attempt`."""
        return Rollout(self.episodes[key.ordinal, key.index])


class Groups:
    """Recorded rollouts for groups."""

    def __init__(self) -> None:
        self.plugins = _plugins()
        self.assembly = assemble(_config(self.plugins), self.plugins)
        self.engine = ScriptedEngine()
        self.runner = Played(self.assembly.host, self.engine, self.assembly.config, lockstep=False)
        self.stream = TaskStream(self.assembly.tasks.of("train"), self.assembly.config.training.seed)
        self.runner.episodes = asyncio.run(self._play())

    async def _play(self) -> dict[tuple[int, int], Episode]:
        return {
            (ordinal, index): (
                await RolloutRunner.attempt(self.runner, self.stream[ordinal], RolloutKey("train", ordinal, index))
            ).episode
            for ordinal in range(GROUPS)
            for index in range(ROLLOUTS_PER_GROUP)
        }

    def rows(self) -> list[Row]:
        """Measures one trial of both sides."""
        with tempfile.TemporaryDirectory() as temporary:
            run_dir = RunDir(Path(temporary) / "run", self.assembly.config, resume=False)
            seconds = {"whole": cpu_seconds(self.whole(run_dir)), "bare": cpu_seconds(self.bare)}
            run_dir.close()
        return [{"kind": "groups", "side": side, "groups": GROUPS, "cpu_seconds": cpu} for side, cpu in seconds.items()]

    def whole(self, run_dir: RunDir) -> Side:
        """Generates as in a run, until training has taken a step's groups."""
        parts = RunParts(
            config=self.assembly.config,
            host=self.assembly.host,
            tasks=self.assembly.tasks,
            sampler=self.assembly.sampler,
            backend=self.assembly.backend,
            engine=self.engine,
            algorithm=self.assembly.algorithm,
            observers=Observers(self.plugins),
            run_dir=run_dir,
            progress=Progress(),
            trackers=Trackers({}),
        )
        generation = Generation(parts)
        generation.runner = self.runner

        async def side() -> None:
            generating = asyncio.create_task(generation.run())
            for step in range(1, GROUPS // GROUPS_PER_STEP + 1):
                await parts.ledger.take()
                parts.coordinator.on_synced(step)
            await generating

        return side

    async def bare(self) -> None:
        """Runs only the asyncio tasks."""

        async def group(ordinal: int) -> None:
            async with asyncio.TaskGroup() as rollouts:
                for index in range(ROLLOUTS_PER_GROUP):
                    rollouts.create_task(self.runner.attempt(self.stream[ordinal], RolloutKey("train", ordinal, index)))

        await asyncio.gather(*(group(ordinal) for ordinal in range(GROUPS)))


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes medians over the trials of the differences between sides, in microseconds."""
    groups = of_kind(rows, "groups")
    if not groups:
        return {}
    seconds = {(row["trial"], row["side"]): row["cpu_seconds"] for row in groups}
    trials: list[int] = sorted({row["trial"] for row in groups})
    us_per_group = (
        1e6 / groups[0]["groups"] * statistics.median(seconds[t, "whole"] - seconds[t, "bare"] for t in trials)
    )
    return {
        **_turn_figures(of_kind(rows, "turns", suspended=False), ""),
        **_turn_figures(of_kind(rows, "turns", suspended=True), "_suspended"),
        "us_per_group": round(us_per_group, 1),
    }


def _turn_figures(turns: Sequence[Row], ending: str) -> Figures:
    cpu: dict[tuple[int, str, int], float] = {
        (row["trial"], row["side"], row["turns"]): row["cpu_seconds"] for row in turns
    }
    count: list[int] = sorted({row["trial"] for row in turns})
    played: int = turns[0]["rollouts"]
    lengths: set[int] = {row["turns"] for row in turns}
    short, long = min(lengths), max(lengths)

    def per_turn(side: str, trial: int) -> float:
        return 1e6 * (cpu[trial, side, long] - cpu[trial, side, short]) / (played * (long - short))

    def per_rollout(side: str, trial: int) -> float:
        return 1e6 * cpu[trial, side, short] / played - short * per_turn(side, trial)

    def less(cost: Callable[[str, int], float], one: str, other: str) -> float:
        return round(statistics.median(cost(one, trial) - cost(other, trial) for trial in count), 1)

    bare = round(statistics.median(per_turn("bare", trial) for trial in count), 1)
    return {
        f"us_per_turn{ending}": less(per_turn, "whole", "bare"),
        f"us_per_turn_orchestration{ending}": less(per_turn, "whole", "completer"),
        f"us_per_turn_tokens_and_records{ending}": less(per_turn, "completer", "bare"),
        f"us_per_turn_engine_and_parser{ending}": bare,
        f"us_per_rollout{ending}": less(per_rollout, "whole", "bare"),
    }
