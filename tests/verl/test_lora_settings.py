"""``[verl.lora]``: what verl gets, what is refused, and what a dry run says about weight syncs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rllm_verl.checks import check
from rllm_verl.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rllm_verl.losses import VerlLoss
from rllm_verl.settings import verl_config
from verl_runs import SEPARATED, run_config

from rllm_core.config import ConfigError
from rllm_core.plugins import PluginManager

PLUGINS = PluginManager.from_environment()
GPU = ("verl.device=cuda", "verl.dtype=bfloat16", "verl.attention=flash_attention_2")


def composed(model: Path, *overrides: str) -> Any:
    """Section ``actor_rollout_ref`` of verl's configuration."""
    config = run_config(model, *overrides)
    return verl_config(config, VerlLoss(config, PLUGINS)).actor_rollout_ref


def notes(model: Path, *overrides: str) -> list[str]:
    config = run_config(model, *overrides)
    return check(config, VerlLoss(config, PLUGINS))


def write_adapter(folder: Path, **changes: Any) -> Path:
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described | changes), encoding="utf-8")
    (folder / ADAPTER_WEIGHTS).write_bytes(b"")
    return folder


def test_without_the_section_verl_trains_all_weights(model: Path) -> None:
    sections = composed(model)
    assert (sections.model.lora_rank, sections.model.lora_adapter_path) == (0, None)
    assert not sections.actor.checkpoint.save_lora_only
    assert not any("verl.lora" in note for note in notes(model))


@pytest.mark.parametrize(
    ("placement", "merges", "said"),
    [((), False, "send the adapters alone"), (SEPARATED, True, r"send merged weights.*verl#7495")],
)
def test_the_placement_decides_what_a_sync_sends(
    model: Path, placement: tuple[str, ...], merges: bool, said: str
) -> None:
    section = ("verl.lora.rank=8", "verl.lora.alpha=24", *placement)
    sections = composed(model, *section)
    assert (sections.model.lora_rank, sections.model.lora_alpha) == (8, 24)
    assert sections.model.target_modules == "all-linear"
    assert sections.model.lora.merge is merges
    assert sections.actor.checkpoint.save_lora_only
    [note] = [note for note in notes(model, *section) if "verl.lora" in note]
    assert all(part in note for part in said.split(".*"))


def test_an_adapter_brings_its_shape(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    sections = composed(model, f"verl.lora.adapter={folder}")
    assert (sections.model.lora_rank, sections.model.lora_alpha) == (4, 8)
    assert list(sections.model.target_modules) == ["q_proj", "v_proj"]
    assert sections.model.lora_adapter_path == str(folder)
    with pytest.raises(ConfigError, match=r"verl.lora.rank = 8, but the adapters in verl.lora.adapter have 4: remove"):
        composed(model, f"verl.lora.adapter={folder}", "verl.lora.rank=8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "has use_dora = True"),
        ({"use_rslora": True}, "has use_rslora = True"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"lora_dropout": 0.1}, "has lora_dropout = 0.1"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save = "),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern = "),
        ({"peft_type": "IA3"}, "has adapters of type 'IA3', not LORA"),
    ],
)
def test_adapters_that_servers_would_compute_differently_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", **changes)
    with pytest.raises(ConfigError, match=said):
        notes(model, f"verl.lora.adapter={folder}")


def test_adapters_for_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "other", base_model_name_or_path="someone/other-1b")
    with pytest.raises(ConfigError, match=r"has adapters for someone/other-1b, and model.path = .*: set model.path to"):
        notes(model, f"verl.lora.adapter={folder}")
    folder = write_adapter(tmp_path / "same", base_model_name_or_path=f"/elsewhere/{model.name}")
    assert notes(model, f"verl.lora.adapter={folder}")


def test_a_folder_without_adapters_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no adapter_config.json and no adapter_model.safetensors: name a folder"
    ):
        notes(model, f"verl.lora.adapter={tmp_path}")


def test_a_damaged_description_of_adapters_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / ADAPTER_CONFIG).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"adapter_config\.json of model .* cannot be read"):
        notes(model, f"verl.lora.adapter={adapter}")


def test_layers_are_those_of_the_model(model: Path) -> None:
    assert notes(model, 'verl.lora.target_modules=["q_proj", "down_proj"]')
    with pytest.raises(
        ConfigError,
        match=r"has no linear layer 'qproj', 'lm_head'; it has down_proj, gate_proj, k_proj, o_proj, q_proj",
    ):
        notes(model, 'verl.lora.target_modules=["qproj", "q_proj", "lm_head"]')


def test_a_model_that_is_not_here_is_asked_nothing() -> None:
    said = notes(Path("someone/else"), "verl.max_model_tokens=64", 'verl.lora.target_modules=["q_proj"]')
    assert any("whether 'someone/else' has these layers" in note for note in said)
    assert any("whether it has experts" in note for note in said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("verl.lora.rank=513",), "vLLM serves adapters of rank 512 at most"),
        (("verl.lora.alpha=12.5",), "verl.lora.alpha = 12.5: verl 0.9.1 takes whole numbers only; set it to 12"),
        (("verl.lora.rank=8", *GPU, "verl.strategy=megatron"), "does not work with verl.strategy = 'megatron'"),
        (
            ("verl.lora.rank=8", *GPU, "verl.strategy=fsdp", 'verl.offload=["parameters"]'),
            "cannot be combined with 'parameters' in verl.offload",
        ),
        (
            (
                "verl.lora.rank=8",
                *GPU,
                "verl.strategy=fsdp",
                "verl.placement=separated",
                "verl.dtype=float32",
                "verl.attention=sdpa",
            ),
            "verl 0.9.1 rounds merged weights to bfloat16 there",
        ),
    ],
)
def test_what_cannot_work_is_refused(model: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        notes(model, *overrides)


def test_merged_weights_may_have_any_rank(model: Path) -> None:
    assert notes(model, "verl.lora.rank=600", *SEPARATED)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, "a mixture of experts: its experts are no linear layers"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "a vision model: verl would train adapters"),
    ],
)
def test_models_that_do_not_fit_are_refused(tmp_path: Path, described: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        notes(tmp_path, "verl.max_model_tokens=64", "verl.lora.rank=8")


def test_rank_zero_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl.lora.rank.*greater than or equal to 1"):
        run_config(model, "verl.lora.rank=0")


def test_keys_of_verl_that_the_section_controls_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="another setting of the run file controls this key"):
        composed(model, 'verl.overrides={"actor_rollout_ref.model.lora_rank"=8}')
