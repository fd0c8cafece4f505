"""``rllm-core export-model`` with backend ``local``: exports give the log-probabilities of the last validation."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from local_runs import train
from rllm_local.starter import starter_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm_core.cli import Session
from rllm_core.errors import ConfigError, RunError, UserError
from rllm_core.plugins import PluginManager
from rllm_core.providers import BackendProvider
from rllm_core.run_folder import checkpoint
from rllm_core.types import Episode
from rllm_viewer.commands.export_model import export_model
from rllm_viewer.exporting import export
from rllm_viewer.merging import merge_adapters

STEPS = 3
GREATEST_GAP = 1e-5
SETTINGS = (
    f"training.steps={STEPS}",
    "training.groups_per_step=4",
    "training.validation_rollouts=16",
    f"training.validate_every_steps={STEPS}",
    "training.trajectories_per_step=16",
    "training.checkpoint_every_steps=2",
    "training.keep_checkpoints=2",
    "optimizer.learning_rate=0.01",
    "optimizer.warmup_steps=0",
)
LORA = ("local.lora.rank=4",)
LORA_OF_TIED_HEAD = (*LORA, "local.lora.target_modules=['q_proj', 'lm_head']")
LORA_OF_TIED_EMBEDDING = (*LORA, "local.lora.target_modules=['q_proj', 'embed_tokens']")


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager.from_environment()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, plugins: PluginManager) -> Callable[[tuple[str, ...]], Path]:
    """Trains the starter model for a few steps, once for each tuple of further settings."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(overrides: tuple[str, ...]) -> Path:
        if overrides not in runs:
            runs[overrides] = train(tmp_path_factory.mktemp("run") / "first", plugins, "sort", *SETTINGS, *overrides)
        return runs[overrides]

    return run


def called(plugins: PluginManager, *arguments: object) -> Result:
    session = Session()
    vars(session)["plugins"] = plugins
    return CliRunner().invoke(export_model, [str(argument) for argument in arguments], obj=session)


def validated(run: Path) -> list[Episode]:
    """Episodes of the last validation."""
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    episodes = [Episode.model_validate(line["episode"]) for line in lines if line["step"] == STEPS]
    return [episode for episode in episodes if episode.is_validation]


def greatest_gap(model: Any, run: Path) -> float:
    """Compares the log-probabilities of all sampled tokens of the last validation with those of a model."""
    gaps = []
    for episode in validated(run):
        for step in episode.trajectories[0].steps:
            ids = torch.tensor([*step.prompt_ids, *step.completion_ids])
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].log_softmax(-1)
            sampled = ids[len(step.prompt_ids) :]
            found = logprobs[len(step.prompt_ids) - 1 : -1].gather(-1, sampled[:, None])[:, 0]
            gaps.append(float((found - torch.from_numpy(step.logprobs.copy())).abs().max()))
    assert len(gaps) == 16
    return max(gaps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of transformers' own loading
@pytest.mark.parametrize(
    ("overrides", "options", "kind"),
    [
        ((), (), "model"),
        (LORA, (), "adapter"),
        (LORA, ("--merge",), "model"),
        (LORA_OF_TIED_HEAD, (), "adapter"),
        (LORA_OF_TIED_HEAD, ("--merge",), "model"),
        (LORA_OF_TIED_EMBEDDING, (), "adapter"),
        (LORA_OF_TIED_EMBEDDING, ("--merge",), "model"),
        ((), ("--merge",), "model"),
    ],
    ids=[
        "full",
        "adapter",
        "merged",
        "adapter_of_head",
        "merged_head",
        "adapter_of_embedding",
        "merged_embedding",
        "nothing_to_merge",
    ],
)
def test_an_export_gives_the_log_probabilities_of_the_last_validation(
    trained, plugins: PluginManager, tmp_path: Path, overrides, options, kind: str
) -> None:
    run, folder = trained(overrides), tmp_path / "models" / "first"
    result = called(plugins, run, folder, *options, "--json")
    assert result.exit_code == 0, result
    printed = json.loads(result.stdout)
    base = AutoModelForCausalLM.from_pretrained(printed["base_model"]) if kind == "adapter" else None
    assert printed["kind"] == kind
    assert (printed["step"], printed["weight_version"], printed["backend"]) == (STEPS, STEPS, "local")
    assert [path.name for path in folder.parent.iterdir()] == ["first"]
    assert not (folder / "optimizer.safetensors").exists()
    model, tokenizer = (evaluated(line) for line in printed["load"])
    assert greatest_gap(model, run) < GREATEST_GAP
    assert base is None or greatest_gap(base, run) > 100 * GREATEST_GAP
    [episode, *_] = validated(run)
    step = episode.trajectories[0].steps[0]
    asked = tokenizer.apply_chat_template(
        [dict(message) for message in step.messages], add_generation_prompt=True, return_dict=False
    )
    assert asked == list(step.prompt_ids)


def evaluated(line: str) -> Any:
    """Does what a line that the command prints does."""
    called = re.fullmatch(r"\w+ = transformers\.(\w+)\.from_pretrained\('(.+)'(, trust_remote_code=True)?\)", line)
    assert called
    return getattr(transformers, called[1]).from_pretrained(called[2], trust_remote_code=called[3] is not None)


def test_adapters_of_layers_that_share_weights_are_not_merged(tmp_path: Path) -> None:
    config = transformers.Zamba2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        adapter_rank=4,
    )
    base, folder = tmp_path / "base", tmp_path / "adapters"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder)
    with pytest.raises(RunError, match="share weights and have adapters of their own"):
        merge_adapters(folder, trust_remote_code=False)
    assert not (folder / "config.json").exists()


CODE_OF_A_MODEL = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.slow
def test_adapters_of_a_model_with_its_own_code_are_merged(
    plugins: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    base = tmp_path / "base"
    shutil.copytree(starter_model(), base)
    (base / "own.py").write_text(CODE_OF_A_MODEL, encoding="utf-8")
    file = base / "config.json"
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "own", "auto_map": own}))
    settings = (f"model.path={base}", "local.trust_remote_code=true")
    run = train(tmp_path / "run", plugins, "sort", *SETTINGS, *LORA, *settings)
    result = called(plugins, run, tmp_path / "merged", "--merge", "--json")
    assert result.exit_code == 0, result
    model, _ = (evaluated(line) for line in json.loads(result.stdout)["load"])
    assert type(model).__name__ == "OwnForCausalLM"
    assert greatest_gap(model, run) < GREATEST_GAP


@pytest.mark.slow
def test_the_command_prints_how_to_load_the_folder(trained, plugins: PluginManager, tmp_path: Path) -> None:
    result = called(plugins, trained(()), tmp_path / "model")
    assert result.stdout.splitlines() == [
        f"step {STEPS} (weight version {STEPS}) of {trained(())}: model",
        "to load it, after import transformers:",
        f"  model = transformers.AutoModelForCausalLM.from_pretrained('{tmp_path / 'model'}')",
        f"  tokenizer = transformers.AutoTokenizer.from_pretrained('{tmp_path / 'model'}')",
        f"model: {tmp_path / 'model'}",
    ]


def test_an_earlier_checkpoint_can_be_exported(trained, plugins: PluginManager, tmp_path: Path) -> None:
    found = export(trained(()), tmp_path / "model", plugins, step=2, merge=False)
    assert found["step"] == 2
    assert greatest_gap(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), trained(())) > 100 * GREATEST_GAP
    with pytest.raises(ConfigError, match=r"no complete checkpoint of step 1, only of 2, 3"):
        export(trained(()), tmp_path / "other", plugins, step=1, merge=False)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "adapter"])
def test_the_model_card_names_the_run_and_no_path(trained, plugins: PluginManager, tmp_path: Path, overrides) -> None:
    run = trained(overrides)
    export(run, tmp_path / "model", plugins, step=None, merge=False)
    card = (tmp_path / "model" / "README.md").read_text()
    [*_, last] = json.loads((run / "summary.json").read_text())["validation"]
    assert "| run | first |" in card
    assert f"| step | {STEPS} |" in card
    assert f"reward {last['reward_mean']:.4g}, solved {last['solved']:.4g} (16 rollouts at step {STEPS})" in card
    assert "/" not in card.replace("| |", "")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_nothing_is_overwritten(trained, plugins: PluginManager, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="model exists and is not an empty folder"):
        export(trained(()), target, plugins, step=None, merge=False)
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ConfigError, match=r"other.partial exists: another export is running"):
        export(trained(()), tmp_path / "other", plugins, step=None, merge=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "notes.txt", "other.partial"]
    (target / "notes.txt").unlink()
    export(trained(()), target, plugins, step=None, merge=False)
    assert (target / "config.json").exists()


def test_a_folder_that_cannot_be_created_is_one_line(trained, plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"^/proc/x/model cannot be written: "):
        export(trained(()), Path("/proc/x/model"), plugins, step=None, merge=False)


def test_a_disk_without_space_is_one_line(trained, plugins: PluginManager, tmp_path: Path) -> None:
    run, limits = trained(()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"cannot be copied to .*: \[Errno"):
            export(run, tmp_path / "model", plugins, step=None, merge=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def changed(backend: Path) -> None:
    (backend / "config.json").write_text("{}")


def added(backend: Path) -> None:
    (backend / "more.safetensors").write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(changed, "backend/config.json does not match"), (added, "backend/more.safetensors is not in its manifest")],
)
def test_a_damaged_checkpoint_leaves_nothing(
    trained, plugins: PluginManager, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained(()), run)
    damage(checkpoint.complete(run / "checkpoints")[-1] / "backend")
    with pytest.raises(RunError, match=message):
        export(run, tmp_path / "model", plugins, step=None, merge=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_without_a_run_or_a_checkpoint(trained, plugins: PluginManager, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no run\.toml"):
        export(tmp_path, tmp_path / "model", plugins, step=None, merge=False)
    shutil.copy(trained(()) / "run.toml", tmp_path)
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        export(tmp_path, tmp_path / "model", plugins, step=None, merge=False)


def with_export(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    """Gives the record of backend ``local`` another export function."""
    monkeypatch.setitem(vars(plugins.select(BackendProvider, "local").record), "export", path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, r"backend 'local' \(rllm-local .*\) does not export models"),
        ("bad_exports:write_nothing", "its export wrote neither config.json nor adapter_config.json"),
        ("bad_exports:raise_an_error", "export failed: .*ZeroDivisionError: no weights"),
        ("rllm_local.export:missing", "missing"),
    ],
)
def test_a_backend_that_cannot_export_is_named(
    trained, plugins: PluginManager, tmp_path: Path, monkeypatch, path: str | None, message: str
) -> None:
    with_export(plugins, monkeypatch, path)
    with pytest.raises(UserError, match=message):
        export(trained(()), tmp_path / "model", plugins, step=None, merge=False)
    assert list(tmp_path.iterdir()) == []
