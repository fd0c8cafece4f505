"""Memory by arithmetic: against what verl's workers allocate on the CPU, and for the example run files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conversations import conversations, written
from rank_runs import RANKS, train
from rllm_verl.config import LoRAConfig, VerlConfig
from rllm_verl.memory import estimate, installed_bytes
from training_rank import LORA_RANK
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from verl_runs import overrides

from rllm_core.cli import Session, cli
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.memory.transformer import TransformerShape

WITHIN = 0.15  # of what is measured
MEMORY_RANK = Path(__file__).with_name("support") / "memory_rank.py"
EXAMPLES = sorted((Path(__file__).parents[2] / "plugins" / "rllm-verl" / "examples").glob("*.toml"))

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 5003,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "intermediate_size": 256,
        "vocab_size": 2999,
        "tie_word_embeddings": False,
    },
    "llama": {
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 352,
        "vocab_size": 8009,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
}


# Configurations of the models in the example run files, without what has no influence on sizes.
def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    """Configuration of a Qwen2.5 model; the small ones have the smaller vocabulary and share embedding and head."""
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": vocabulary == 151936,
    }


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}

MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": qwen2(896, 24, 14, 2, 4864, 151936),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen2(1536, 28, 12, 2, 8960, 151936),
    "Qwen/Qwen2.5-3B-Instruct": qwen2(2048, 36, 16, 2, 11008, 151936),
    "Qwen/Qwen2.5-7B-Instruct": qwen2(3584, 28, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5-14B-Instruct": qwen2(5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-32B-Instruct": qwen2(5120, 64, 40, 8, 27648, 152064),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": QWEN3_30B_A3B,
}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 8], ids=["all-weights", "adapters"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_workers_allocate_what_is_predicted(
    model_type: str, lora_rank: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lora_rank:
        monkeypatch.setenv(LORA_RANK, str(lora_rank))
    folder, output = tmp_path / "model", tmp_path / "output"
    output.mkdir()
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    shape = TransformerShape.of(config.to_dict())
    assert shape is not None
    for measured in train(folder, output, RANKS, MEMORY_RANK).ranks:
        section = VerlConfig(
            device="cpu",
            devices_per_node=RANKS,
            dtype="float32",
            attention="sdpa",
            max_tokens_per_device=measured["tokens"],
            max_model_tokens=64,
            lora=LoRAConfig(rank=lora_rank) if lora_rank else None,
        )
        run = RunConfig(workflow="any", backend="verl")
        found = estimate(run, section, {"fsdp_config": {}}, shape, None).devices[0]
        predicted = {use.what: use.size_bytes for use in found.uses if use.phase == "training"}
        print(json.dumps({what: [predicted[what], measured[what]] for what in measured if what != "tokens"}))
        for what in ("weights", "gradients", "optimizer", "logits"):
            assert predicted[what] == pytest.approx(measured[what], rel=WITHIN), what


def dry_run(path: Path, folder: Path, *options: str) -> Any:
    """Runs ``train --dry-run`` on an example, with a model folder that has the configuration of its model."""
    model = tomllib.loads(path.read_text(encoding="utf-8"))["model"]["path"]
    (folder / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    arguments = ["train", str(path), "--dry-run", "-o", f"model.path={folder}", *options]
    return CliRunner().invoke(cli, arguments, obj=Session(), catch_exceptions=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_80_gb(path: Path, tmp_path: Path) -> None:
    done = dry_run(path, tmp_path, "--device-memory", "80GB", "--json")
    assert done.exit_code == 0, done.output
    devices = json.loads(done.stdout)["memory"]["devices"]
    for device in devices:
        for phase, uses in device["phases"].items():
            assert device["capacity_bytes"] is None or sum(uses.values()) <= device["capacity_bytes"], phase
    [training] = [device["phases"]["training"] for device in devices if device["name"].startswith("trainer")]
    assert {"weights", "gradients", "optimizer", "logits", "activations"} <= set(training)
    syncs = [device["phases"]["weight sync"] for device in devices if "weight sync" in device["phases"]]
    assert all(sync["sync buffers"] > 0 for sync in syncs)
    text = dry_run(path, tmp_path, "--device-memory", "80GB").stdout
    assert "each with 80 GB" in text
    assert text.count("#   generation: ") == 2


REFUSED = {
    "training state": (
        "1x8-7b-colocated",
        ["verl.devices_per_node=2"],
        "80GB",
        r"memory of a trainer with its server during training: .*it has 80 GB: lower verl.max_tokens_per_device",
    ),
    "logits": (
        "1x8-7b-separated",
        ["verl.max_tokens_per_device=65536", "algorithm.entropy_coefficient=0.001"],
        "80GB",
        r"memory of a trainer during training: .*logits [\d.]+, .*it has 80 GB",
    ),
    "the first weight sync": (
        "1x8-7b-separated",
        ["verl.sync_bucket_mb=2048"],
        "80GB",
        r"memory of a server during weight sync: .*sync buffers 10.8, .*lower verl.sync_bucket_mb",
    ),
    "a server beside its trainer": (
        "4x8-30b-a3b-colocated",
        ["verl.server_memory_share=0.95"],
        "80GB",
        r"memory of a trainer with its server during generation: .*lower verl.server_memory_share",
    ),
    "a server that cannot hold the model": (
        "4x8-30b-a3b-colocated",
        ["verl.tensor_parallel=1"],
        "80GB",
        r"memory of a server within its share of 0.6 during generation: .*it has 48 GB: raise verl.server_memory_share",
    ),
    "smaller devices": (
        "1x8-7b-separated",
        [],
        "40GB",
        r"memory of a trainer during training: .*it has 40 GB",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    example, overrides, size, message = REFUSED[name]
    [path] = [path for path in EXAMPLES if path.stem == example]
    options = [part for override in overrides for part in ("-o", override)]
    with pytest.raises(ConfigError, match=message) as caught:
        dry_run(path, tmp_path, *options, "--device-memory", size)
    assert "\n" not in str(caught.value)


def test_offload_does_not_lower_the_peak_of_training_but_makes_room_for_servers(tmp_path: Path) -> None:
    [path] = [path for path in EXAMPLES if path.stem == "1x8-7b-colocated"]
    totals = []
    for offload in ("[]", '["parameters", "optimizer"]'):
        done = dry_run(path, tmp_path, "--json", "-o", f"verl.offload={offload}", "--device-memory", "80GB")
        totals.append(json.loads(done.stdout)["memory"]["devices"][0]["phases"])
    kept, offloaded = totals
    assert offloaded["training"] == kept["training"]
    assert {"weights", "optimizer"} <= set(kept["generation"])
    assert not {"weights", "optimizer"} & set(offloaded["generation"])


def test_a_supervised_run_has_no_servers(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", conversations(3))
    model = tmp_path / "model"
    model.mkdir()
    described = {"model_type": "qwen2", "max_position_embeddings": 512, **SHAPES["qwen2"]}
    (model / "config.json").write_text(json.dumps(described), encoding="utf-8")
    arguments = ["train", "sft", "--backend", "verl", "--parser", "chat_template", "--dry-run", "--json"]
    for override in overrides(model, f"sft.train={rows}", "training.rollouts_per_group=1"):
        arguments += ["-o", override]
    done = CliRunner().invoke(cli, arguments, obj=Session(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    devices = json.loads(done.stdout)["memory"]["devices"]
    assert [device["name"] for device in devices] == ["trainer", "host memory of a training machine"]
    assert set(devices[0]["phases"]) == {"training"}
    assert "server weights" not in devices[0]["phases"]["training"]


def test_a_model_that_is_not_here_is_not_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["train", str(EXAMPLES[0]), "--dry-run", "--json"], obj=Session(), catch_exceptions=False
    )
    found = json.loads(done.stdout)
    assert found["memory"] is None
    [line] = [line for line in found["not_checked"] if line.startswith("memory")]
    assert "hf download Qwen/Qwen2.5-0.5B-Instruct" in line


def test_the_smallest_gpu_of_this_machine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_bytes() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 40960\n", encoding="utf-8")
    tool.chmod(0o700)
    assert installed_bytes() == 40960 * 2**20
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n", encoding="utf-8")
    assert installed_bytes() is None
