"""``export-model`` and ``verl-export``: checkpoints loaded by transformers, and rejected checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rank_runs import RANKS, Report
from rllm_verl.export import command, export
from safetensors.torch import load_file
from training_rank import batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder import checkpoint

SHARD = f"backend/actor/model_world_size_{RANKS}_rank_0.pt"


@pytest.fixture(scope="module")
def trained(two_ranks: Report) -> Path:
    """Output of ``training_rank.py``: ``checkpoint``, and its weights as ``updated.safetensors``."""
    return two_ranks.folder


def write_checkpoint(run: Path, step: int, weights: Path, strategy: str = "fsdp2") -> Path:
    saved = checkpoint.begin(run / "checkpoints", step)
    shutil.copytree(weights, saved / "backend" / "actor")
    (saved / "backend" / "verl.json").write_text(json.dumps({"step": step, "strategy": strategy, "trainers": RANKS}))
    checkpoint.commit(saved, {"step": step, "coordinator": {"weight_version": step + 1}})
    return saved


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    """A checkpoint folder, the only one in its run."""
    return write_checkpoint(tmp_path / "run", 7, trained / "checkpoint")


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    run, folder = root / "run", root / "model"
    write_checkpoint(run, 6, trained / "checkpoint" / "huggingface")  # older checkpoint, without weights
    newest = write_checkpoint(run, 7, trained / "checkpoint")
    result = CliRunner().invoke(command, [str(run), str(folder), "--json"])
    assert result.exit_code == 0, result
    assert result.stderr == "verl-export is now rllm-core export-model RUN FOLDER, for every backend\n"
    assert json.loads(result.stdout) == {
        "checkpoint": str(newest),
        "step": 7,
        "weight_version": 8,
        "strategy": "fsdp2",
        "folder": str(folder),
    }
    assert sorted(path.name for path in root.iterdir()) == ["model", "run"]
    return folder


def test_the_weights_are_those_of_the_checkpoint_in_bfloat16(exported: Path, trained: Path, model: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(exported, dtype="auto").state_dict()
    started = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    expected = load_file(trained / "updated.safetensors")
    assert set(expected) <= set(found)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.bfloat16()), name
    assert any(not torch.equal(found[name], started[name]) for name in expected), "nothing was trained"


def test_the_model_says_what_the_trainer_said(exported: Path, trained: Path) -> None:
    """With the weights before rounding, because one of a few random tokens may move much by rounding to bfloat16."""
    policy = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    missing, unexpected = policy.load_state_dict(load_file(trained / "updated.safetensors"), strict=False)
    assert set(missing) <= {"lm_head.weight"}, "it shares its weight with the embedding"
    assert unexpected == []
    rows = batch(policy.config.vocab_size)
    with torch.no_grad():
        logits = policy(**{name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
    logprobs = logits.log_softmax(-1)[:, rows["prompts"].shape[1] - 1 : -1]
    logprobs = logprobs.gather(-1, rows["responses"][..., None])[..., 0]
    reports = [json.loads((trained / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    expected = torch.tensor([row for report in reports for row in report["logprobs_after_update"]])
    present = rows["attention_mask"][:, rows["prompts"].shape[1] :] > 0
    torch.testing.assert_close(logprobs[present], expected[present], rtol=0, atol=1e-3)


def test_the_tokenizer_comes_along(exported: Path, model: Path) -> None:
    mine, original = AutoTokenizer.from_pretrained(exported), AutoTokenizer.from_pretrained(model)
    conversation = [{"role": "user", "content": "Sort: b a d c"}]
    assert mine.get_vocab() == original.get_vocab()
    assert mine.apply_chat_template(conversation) == original.apply_chat_template(conversation)


def test_weights_that_megatrons_bridge_wrote_are_taken_as_they_are(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "written" / "model" / "huggingface")
    saved = write_checkpoint(tmp_path / "run", 3, tmp_path / "written", strategy="megatron")
    found = export(saved, tmp_path / "model")
    assert found["strategy"] == "megatron"
    original = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().items():
        assert torch.equal(weight, original[name]), name


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def damaged(saved: Path) -> None:
    (saved / SHARD).write_bytes(pickle.dumps(Bomb(saved / "unpickled")))


def with_a_shard_more(saved: Path) -> None:
    (saved / "backend" / "actor" / "model_world_size_9_rank_0.pt").write_bytes(pickle.dumps(Bomb(saved / "unpickled")))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda saved: (saved / "manifest.json").unlink(), "step-000007 is not a complete checkpoint"),
        (lambda saved: (saved / SHARD).unlink(), f"step-000007 is damaged: {SHARD} is missing"),
        (damaged, f"step-000007 is damaged: {SHARD} does not match its manifest"),
        (with_a_shard_more, "step-000007 is damaged: .*world_size_9_rank_0.pt is not in its manifest"),
    ],
)
def test_what_is_not_as_it_was_saved_is_not_loaded(
    saved: Path, tmp_path: Path, break_it: Callable[[Path], None], message: str
) -> None:
    break_it(saved)
    with pytest.raises(RunError, match=message):
        export(saved, tmp_path / "model")
    assert not (saved / "unpickled").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_without_a_complete_checkpoint_says_so(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"run folder .*run has no complete checkpoint"):
        export(tmp_path / "run", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"runs is not a folder; name a run folder"):
        export(tmp_path / "runs", tmp_path / "model")


def test_a_checkpoint_of_another_backend_is_refused(tmp_path: Path) -> None:
    saved = checkpoint.begin(tmp_path / "run" / "checkpoints", 1)
    (saved / "policy.json").write_text("{}")
    checkpoint.commit(saved, {"step": 1})
    with pytest.raises(ConfigError, match="was not written by backend 'verl'"):
        export(tmp_path / "run", tmp_path / "model")


def test_nothing_is_overwritten(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"model exists and is not an empty folder"):
        export(saved, target)
    with pytest.raises(ConfigError, match=r"notes.txt exists and is not an empty folder"):
        export(saved, target / "notes.txt")
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ConfigError, match=r"other.partial exists: another export is running or was interrupted"):
        export(saved, tmp_path / "other")
    assert (target / "notes.txt").read_text() == "mine"


def test_what_the_merger_says_is_shown_and_nothing_is_left(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "checkpoint", tmp_path / "written")
    (tmp_path / "written" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS + 1}))
    saved = write_checkpoint(tmp_path / "run", 7, tmp_path / "written")
    with pytest.raises(RunError, match=r"verl's model merger failed: .*model_world_size_3_rank_0.pt"):
        export(saved, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "written"]
