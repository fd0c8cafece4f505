"""Starter models of workflows that bring their own conversations (`Workflow.warm_start`)."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rllm_local import starter, warm_start
from transformers import AutoTokenizer

import rllm_core
from rllm_core.assembly.parts import Parts, parts_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.cli import Session, cli
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins import PluginManager

WORKFLOW = """
from rllm_core.types import Task
from rllm_core.workflow import Workflow, WorkflowConfig


class GameConfig(WorkflowConfig):
    word: str = "northwards"
    kind: str = "endless"


class Game(Workflow):
    name = "game"
    config_model = GameConfig

    def tasks(self, split):
        return [Task(task_id=f"{split}-{number}", data={}) for number in range(4)]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": "go"}])
        return self.episode(task, [step], reward=float("n" in step.text))

    def warm_start(self, rng):
        return None if self.config.kind == "none" else self.conversations(rng)

    def conversations(self, rng):
        while True:
            answer = rng.choice(["a", "b", self.config.word])
            yield [{"role": "user", "content": "go"}, {"role": "assistant", "content": answer}]
            if self.config.kind == "ends":
                return
            if self.config.kind == "fails":
                raise RuntimeError("no move left")
            if self.config.kind == "odd":
                yield [{"role": "user", "content": "go"}]
"""
RUN: dict[str, Any] = {
    "training": {"steps": 2, "groups_per_step": 2, "rollouts_per_group": 2, "validation_rollouts": 2},
    "training.checkpoint_every_steps": 1,
    "rollout.max_response_tokens": 4,
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Warm starts that end at once, in a cache of their own."""
    monkeypatch.setenv("RLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(starter.RECIPE["warm_start"], "cool_down_steps", 2)
    monkeypatch.setitem(starter.RECIPE["warm_start"], "max_steps", 4)


@pytest.fixture
def game(tmp_path: Path) -> str:
    path = tmp_path / "game.py"
    path.write_text(WORKFLOW, encoding="utf-8")
    return str(path)


def parts(game: str, **settings: Any) -> Parts:
    plugins = PluginManager.from_environment()
    given = {**RUN, **{f"game.{key}": value for key, value in settings.items()}}
    return parts_of(resolve_run(game, plugins, settings=given, backend="local"))


def test_the_loss_has_ended_when_it_no_longer_falls() -> None:
    settings = starter._warm_start_settings(starter.NO_TARGET)
    falling = [4.0 * 0.99**step for step in range(200)]
    flat = [falling[-1]] * 1000

    def ended(losses: list[float], max_steps: int = 1000) -> int | None:
        progress = warm_start._Progress({**settings, "max_steps": max_steps, "cool_down_steps": 40})
        return next((step for step, loss in enumerate(losses, 1) if progress.has_ended(step, loss)), None)

    assert ended(falling) is None
    stopped = ended(falling + flat)
    assert stopped is not None
    assert 200 < stopped <= 280
    noise = random.Random(0)
    noisy = [loss * noise.uniform(0.8, 1.2) for loss in falling + flat]
    assert 160 < (ended(noisy) or 0) <= 600
    assert ended(falling, max_steps=140) == 100, "cooling down takes the last steps"


@pytest.mark.slow
def test_a_run_starts_from_the_model_of_its_workflow(game: str, tmp_path: Path) -> None:
    """A word of its conversations is one token; the run's checkpoints, its export and its adapters know that model."""
    settings = {**RUN, "local.lora.rank": 2}
    run = rllm_core.train(game, settings, backend="local", run_dir=tmp_path / "run")
    assert json.loads((run.path / "summary.json").read_text())["status"] == "completed"
    [folder] = (tmp_path / "cache" / "starter").iterdir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode("northwards")) == 1
    assert json.loads((folder / "starter_recipe.json").read_text())["warm_start"]["target_loss"] == 0.0
    assert parts(game).backend.model_path() == str(folder)

    exported = CliRunner().invoke(cli, ["export-model", str(run.path), str(tmp_path / "out"), "--json"], obj=Session())
    assert json.loads(exported.stdout)["base_model"] == str(folder)
    evaluated = rllm_core.evaluate(checkpoint=run.path, tasks=2)
    assert evaluated["failed"] == 0
    resumed = rllm_core.train(None, {"training.steps": 3}, run_dir=run.path, resume=True)
    assert json.loads((resumed.path / "summary.json").read_text())["optimizer_steps"] == 3

    folder.rename(tmp_path / "elsewhere")
    lost = CliRunner().invoke(cli, ["export-model", str(run.path), str(tmp_path / "more")], obj=Session())
    assert isinstance(lost.exception, UserError)
    assert "eval --checkpoint" in str(lost.exception)


@pytest.mark.slow
def test_other_conversations_make_another_model(game: str, tmp_path: Path) -> None:
    made = [parts(game, word=word).backend.model_path() for word in ("northwards", "southwards", "northwards")]
    assert made[0] == made[2] != made[1]
    run = rllm_core.train(game, RUN, backend="local", run_dir=tmp_path / "run")
    other = {**RUN, "game.word": "southwards", "training.init_from": str(run.path)}
    with pytest.raises(ConfigError, match="another starter model"):
        rllm_core.train(game, other, backend="local", run_dir=tmp_path / "other")


def test_without_conversations_it_is_the_shared_model(game: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("rllm_local.backend.starter_model", lambda seed, conversations: asked.append(conversations))
    parts(game, kind="none").backend.model_path()
    assert asked == [None]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ends", "ended after 1 conversation;"),
        ("fails", r"failed: .*no move left"),
        ("odd", "from the assistant"),
    ],
)
def test_wrong_conversations_are_the_workflows_fault_in_one_line(game: str, kind: str, error: str) -> None:
    with pytest.raises(PluginError, match=error) as raised:
        parts(game, kind=kind).backend.model_path()
    assert "game" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_equal_states_yield_equal_conversations(game: str) -> None:
    made = []
    for _ in range(2):
        conversations = parts(game).backend.warm_start
        assert conversations is not None
        found = conversations(random.Random(3))
        assert found is not None
        made.append(list(islice(found, 20)))
    assert made[0] == made[1]
