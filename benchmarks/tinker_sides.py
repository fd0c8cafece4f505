"""Three ways to train the starter task on one Tinker server, each in a process that waits between steps (see `sides`).

``ours`` is ``rllm-core train sort --backend tinker``. ``cookbook`` is the unmodified `tinker_cookbook.rl.train.main`,
with the same tasks and rewards as its environment. ``floor`` is the minimum a step needs, with the bare SDK.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import chz
import tinker
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_workflows.sort import SortWorkflow, prompt, score
from tinker_cookbook.rl import train as cookbook_train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

from benchmarks.core_side import train_gated
from benchmarks.sides import Gate, serve
from benchmarks.trials import Row
from benchmarks.workloads import training_tasks
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.types import Task

GROUPS, ROLLOUTS = 16, 16
"""Same as in ``rllm-core train sort``."""
RANK = 8
SETTINGS: dict[str, Any] = {
    "training.groups_per_step": GROUPS,
    "training.rollouts_per_group": ROLLOUTS,
    "training.validation_rollouts": 0,
    "rollout.max_response_tokens": 6,
    "algorithm.loss": "importance_sampling",
    "algorithm.entropy_coefficient": 0.0,
    # Low enough for completions, and so the work, to stay the same over time and on every side.
    "optimizer.learning_rate": 1e-5,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.max_grad_norm": 1e6,
    "tinker.service": "skyrl",
    "tinker.rank": RANK,
}


@dataclass(frozen=True)
class Workload:
    """Workload of all sides.

    Attributes:
        model: Folder of the model, also its name on the server.
        base_url: URL of the server.
        steps: Number of steps.
        seed: Seed of the tasks.
    """

    model: str
    base_url: str
    steps: int
    seed: int

    @cached_property
    def plugins(self) -> PluginManager:
        """Installed plugins."""
        return PluginManager.from_environment()

    @cached_property
    def config(self) -> RunConfig:
        """Our run file."""
        settings = {
            **SETTINGS,
            "model.path": f'"{self.model}"',
            "tinker.base_url": f'"{self.base_url}"',
            "training.steps": self.steps,
            "training.seed": self.seed,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return load_run_config("sort", self.plugins, overrides=overrides, backend="tinker", parser="chat_template")

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """Tasks of all steps, in our order."""
        return training_tasks(SortWorkflow(), self.config)

    @cached_property
    def parser(self) -> ChatTemplateParser:
        """Parser for the prompts of all sides."""
        return ChatTemplateParser.from_model(self.model)

    @cached_property
    def stops(self) -> list[int]:
        """Stop tokens."""
        return list(self.parser.get_stop_token_ids())

    def prompt_ids(self, task: Task) -> list[int]:
        """Renders the prompt of a task."""
        return self.parser.render([{"role": "user", "content": prompt(task.data["word"])}])

    def reward(self, task: Task, completion: Sequence[int]) -> float:
        """Computes the workflow's reward."""
        if not completion or completion[-1] not in self.stops:
            return 0.0
        return score(self.parser.parse_completion(list(completion)).content.strip(), task.data["answer"])


# --------------------------------------------------------------------------------------------------------------------
# The cookbook's loop


@dataclass
class _SortEnv(Env):
    workload: Workload
    task: Task

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints(self.workload.prompt_ids(self.task)), self.workload.stops

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        return StepResult(
            reward=self.workload.reward(self.task, action),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.workload.stops,
        )


@dataclass
class _SortGroup(EnvGroupBuilder):
    workload: Workload
    task: Task

    async def make_envs(self) -> list[Env]:
        return [_SortEnv(self.workload, self.task) for _ in range(ROLLOUTS)]


@dataclass
class _GatedDataset(RLDataset):
    """Waits at the gate when the loop fetches a batch, at the start of a step."""

    workload: Workload
    gate: Gate

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if index:
            self.gate.step_ended(index)
        else:
            self.gate.open_first()
        return [_SortGroup(self.workload, task) for task in self.workload.tasks[index * GROUPS : (index + 1) * GROUPS]]

    def __len__(self) -> int:
        return self.workload.steps


def _dataset_builder(workload: Workload, gate: Gate) -> RLDatasetBuilder:
    """Creates a builder without fields, because the cookbook copies and logs the fields of its configuration."""

    @chz.chz
    class Builder(RLDatasetBuilder):
        async def __call__(self) -> tuple[RLDataset, None]:
            return _GatedDataset(workload, gate), None

    return Builder()


def train_cookbook(workload: Workload, gate: Gate) -> Row:
    """Runs the cookbook's synchronous loop without its default reports, which would cost it a fifth more."""
    with tempfile.TemporaryDirectory() as folder:
        config = cookbook_train.Config(
            learning_rate=SETTINGS["optimizer.learning_rate"],
            dataset_builder=_dataset_builder(workload, gate),
            model_name=workload.model,
            recipe_name="sort",
            max_tokens=SETTINGS["rollout.max_response_tokens"],
            log_path=folder,
            lora_rank=RANK,
            base_url=workload.base_url,
            loss_fn=SETTINGS["algorithm.loss"],
            eval_every=0,
            save_every=0,
            num_groups_to_log=0,
            rollout_json_export=False,
        )
        asyncio.run(cookbook_train.main(config))
    return {}


# --------------------------------------------------------------------------------------------------------------------
# The floor


def train_floor(workload: Workload, gate: Gate) -> Row:
    """One request per group, one ``forward_backward``, one ``optim_step``; no checks, records or output."""
    asyncio.run(_floor(workload, gate))
    return {}


async def _floor(workload: Workload, gate: Gate) -> None:
    service = tinker.ServiceClient(base_url=workload.base_url)
    trainer = await service.create_lora_training_client_async(workload.model, rank=RANK)
    adam = tinker.AdamParams(learning_rate=SETTINGS["optimizer.learning_rate"])
    params = tinker.SamplingParams(
        max_tokens=SETTINGS["rollout.max_response_tokens"], temperature=1.0, stop=workload.stops
    )
    gate.open_first()
    for step in range(workload.steps):
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        tasks = workload.tasks[step * GROUPS : (step + 1) * GROUPS]
        prompts = [workload.prompt_ids(task) for task in tasks]
        answers = await asyncio.gather(
            *(sampler.sample_async(tinker.ModelInput.from_ints(ids), ROLLOUTS, params) for ids in prompts)
        )
        data = []
        for task, ids, answer in zip(tasks, prompts, answers, strict=True):
            rewards = [workload.reward(task, sequence.tokens) for sequence in answer.sequences]
            mean = statistics.fmean(rewards)
            for sequence, reward in zip(answer.sequences, rewards, strict=True):
                data.append(_datum(ids, sequence.tokens, sequence.logprobs, reward - mean))
        losses, optimized = trainer.forward_backward(data, SETTINGS["algorithm.loss"]), trainer.optim_step(adam)
        await losses.result_async()
        await optimized.result_async()
        gate.step_ended(step + 1)


def _datum(ids: list[int], sampled: list[int], logprobs: Sequence[float], advantage: float) -> tinker.Datum:
    whole, before = [*ids, *sampled], [0.0] * (len(ids) - 1)

    def floats(values: Sequence[float]) -> tinker.TensorData:
        return tinker.TensorData(data=[*before, *values], dtype="float32")

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=whole[1:], dtype="int64"),
            "logprobs": floats(logprobs),
            "advantages": floats([advantage] * len(sampled)),
        },
    )


# --------------------------------------------------------------------------------------------------------------------
# All sides


def train_ours(workload: Workload, gate: Gate) -> Row:
    """Runs ``rllm-core train``."""
    return train_gated(workload.config, workload.plugins, gate)


SIDES = {"ours": train_ours, "cookbook": train_cookbook, "floor": train_floor}


def train(request: Row, gate: Gate) -> Row:
    """Trains one side; the request has its name and the fields of `Workload`."""
    name = request.pop("side")
    return SIDES[name](Workload(**request), gate)


if __name__ == "__main__":
    serve(train)
