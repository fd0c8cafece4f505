"""Plants mistakes of newcomers in real runs: the first line that a user sees of each names its cause."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from rllm_local.starter import starter_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm_core.assembly.parts import parts_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.errors import UserError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch

SMALL = (
    "training.steps=6",
    "training.groups_per_step=4",
    "training.rollouts_per_group=8",
    "training.validation_rollouts=16",
)
ON_ROWS = ("rollout.max_response_tokens=8", "optimizer.warmup_steps=1")


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    closing = note


def warnings(path: Path, caplog: pytest.LogCaptureFixture, workflow: str, *overrides: str) -> list[str]:
    """Trains, and returns the warnings that were shown, in order; of a run that is refused, its error."""
    caplog.clear()
    heard = Heard()
    plugins = PluginManager.from_environment()
    try:
        parts = parts_of(resolve_run(workflow, plugins, overrides=overrides, backend="local"))
        asyncio.run(launch.train(parts, path, resume=False, progress=heard))
    except UserError as refused:
        return [str(refused)]
    logged = [record.getMessage() for record in caplog.records]  # before the first step
    # A warning has several lines, of which the later ones are indented.
    text = "\n".join(heard.lines).replace("\n  ", " ")
    return logged + [line for line in text.splitlines() if line.startswith(("warning", "NOTHING"))]


def rows(count: int = 120, letters: int = 4) -> list[dict[str, str]]:
    """Returns tasks in random order; the starter model solves one in 24 of those with 4 letters, and no others."""
    words = ["".join(word) for word in itertools.permutations("abcdefgh", letters)]
    chosen = random.Random(0).sample(words, count)
    return [{"question": f"sort: {word}", "answer": "".join(sorted(word))} for word in chosen]


def written(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def swapped(path: Path) -> Path:
    """Writes rows whose answers belong to others; without the rows whose letters are those of the other, by chance."""
    right = rows()
    pairs = [(row, right[place - 7]["answer"]) for place, row in enumerate(right)]
    return written(path, [row | {"answer": answer} for row, answer in pairs if answer != row["answer"]])


def function(path: Path, returned: str) -> str:
    path.write_text(f"def score(task, text):\n    return {returned}\n", encoding="utf-8")
    return f"dataset.reward={path}:score"


def model_with(path: Path, replaced: str, by: str) -> str:
    """Copies the starter model with another chat template."""
    shutil.copytree(starter_model(0), path)
    changed = 0
    for file in path.iterdir():
        if file.suffix in (".json", ".jinja") and "template" in (text := file.read_text(encoding="utf-8")) + file.name:
            changed += text.count(replaced)
            if file.name in ("tokenizer_config.json", "chat_template.jinja"):
                file.write_text(text.replace(replaced, by), encoding="utf-8")
    assert changed
    return f"model.path={path}"


def with_another_end(path: Path) -> str:
    """Copies the starter model, with an end of sequence that is not the one that its template and it write."""
    shutil.copytree(starter_model(0), path)
    for name, key, value in (
        ("config.json", "eos_token_id", 0),
        ("generation_config.json", "eos_token_id", 0),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):
        settings = json.loads((path / name).read_text(encoding="utf-8"))
        assert settings[key] != value
        (path / name).write_text(json.dumps(settings | {key: value}), encoding="utf-8")
    return f"model.path={path}"


def trained_without_end(path: Path) -> str:
    """Trains the starter model on answers that go on, and have no stop token among the targets."""
    shutil.copytree(starter_model(0), path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompt = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    start = len(tokenizer.encode(prompt.format(**rows(1)[0])))
    for seed in range(20):
        chosen = random.Random(seed).sample(rows(1000), 32)
        ids = torch.tensor([tokenizer.encode(prompt.format(**row) + f"{row['answer']}\n" * 5) for row in chosen])
        logits = model(ids).logits[:, start - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return f"model.path={path}"


LONG = "rollout.max_response_tokens=24"
MISTAKES = {
    "reward-always-0": ("is it always the same", lambda d: [function(d / "f.py", "0.0")]),
    "stop-token-missing-in-the-settings": (
        "lacks the token that ends an answer",
        lambda d: [with_another_end(d / "m"), LONG],
    ),
    "stop-token-missing-in-the-answers": ("the stop token is missing", lambda d: [trained_without_end(d / "m"), LONG]),
    "answers-cut": ("max_response_tokens is too small", lambda d: ["rollout.max_response_tokens=2"]),
    "warm-up": ("warm-up", lambda d: ["optimizer.warmup_steps=50"]),
    "template-without-end": ("the template is wrong", lambda d: [model_with(d / "m", "<|im_end|>", "")]),
    "template-of-another-model": (
        "the chat template is of another model",
        lambda d: [model_with(d / "m", "<|im_", "<|turn_")],
    ),
    "template-with-another-role": (
        "the chat template is wrong for this model",
        lambda d: [model_with(d / "m", "assistant", "robot")],
    ),
    "labels-swapped": (
        "the expected answers belong to other rows",
        # One answer in 24 is right for the question, so it takes many to meet expected answers of other rows.
        lambda d: [f"dataset.train_file={swapped(d / 's.jsonl')}", "training.groups_per_step=16"],
    ),
    "duplicates": ("is the same as", lambda d: [f"dataset.train_file={written(d / 'd.jsonl', rows() + rows()[:3])}"]),
    "one-rollout": ("rollouts_per_group = 1 is too small", lambda d: ["training.rollouts_per_group=1"]),
    "reward-of-wrong-type": ("dataset.reward", lambda d: [function(d / "f.py", "'right'")]),
    "validation-is-training": ("must not overlap", lambda d: [f"dataset.validation_file={d / 'rows.jsonl'}"]),
    "unsolvable": (
        "the tasks are too hard for the model",
        lambda d: [f"dataset.train_file={written(d / 'u.jsonl', rows(letters=3))}"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_first_warning_names_the_mistake(mistake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cause, plant = MISTAKES[mistake]
    source = written(tmp_path / "rows.jsonl", rows())
    shown = warnings(
        tmp_path / "run", caplog, "dataset", f"dataset.train_file={source}", *SMALL, *ON_ROWS, *plant(tmp_path)
    )
    assert cause in shown[0]
    assert shown[0].count("; or ") <= 1  # at most two causes


@pytest.mark.slow
def test_a_learning_rate_100_times_too_high_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = warnings(tmp_path / "run", caplog, "sort", *SMALL, "training.steps=12", "optimizer.learning_rate=0.1")
    assert "the learning rate is too high" in shown[0]


@pytest.mark.slow
def test_rows_that_the_model_sometimes_solves_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = written(tmp_path / "rows.jsonl", rows())
    assert warnings(tmp_path / "run", caplog, "dataset", f"dataset.train_file={source}", *SMALL, *ON_ROWS) == []


HEALTHY = (("sort", 0), ("guess", 1), ("calculator", 1), ("solver_judge", 0))
MORE_SEEDS = (("sort", 1), ("sort", 2), ("guess", 0), ("guess", 2), ("calculator", 0), ("solver_judge", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "seed"), [*HEALTHY, *(pytest.param(*one, marks=pytest.mark.by_hand) for one in MORE_SEEDS)]
)
def test_the_first_steps_of_a_shipped_recipe_give_no_warning(
    workflow: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = ("training.steps=12", "training.validation_rollouts=32", f"training.seed={seed}")
    assert warnings(tmp_path / "run", caplog, workflow, *few) == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
