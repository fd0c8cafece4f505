"""``[verl.lora]``: a run's adapters, and how they reach the servers. Imports neither torch nor verl.

Line numbers in comments are those of verl 0.9.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rllm_core.config import ConfigError
from rllm_core.model_files import read_model_file
from rllm_verl.config import LoRAConfig, VerlConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# Settings of an adapter that vLLM would ignore or reject, or with which trainer and servers would compute different
# things. Each has the value that means its absence.
UNSUPPORTED: dict[str, Any] = {
    "alpha_pattern": {},
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "rank_pattern": {},
    "target_parameters": None,
    "use_dora": False,
    "use_rslora": False,
}

# Strategy whose weights can be compared with the servers' one tensor at a time, without gathering all.
COMPARABLE = "fsdp2"

Sync = Literal["full", "adapter", "merged"]


@dataclass(frozen=True)
class Adapter:
    """Shape of the adapters of a run.

    Attributes:
        rank: Rank of all adapters.
        alpha: Scale times rank.
        target_modules: Names of the adapted layers; empty for all linear layers.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scaling(self) -> float:
        """Factor that scales the adapters' product."""
        return self.alpha / self.rank

    def to_json(self) -> dict[str, Any]:
        """Returns the shape as a JSON object."""
        return {"rank": self.rank, "alpha": self.alpha, "target_modules": sorted(self.target_modules)}


def describe(adapter: dict[str, Any] | None) -> str:
    """Describes in words what a run trains, from `Adapter.to_json`; None means all weights."""
    if adapter is None:
        return "all weights"
    where = ", ".join(adapter["target_modules"]) or "all linear layers"
    return f"adapters of rank {adapter['rank']} and alpha {adapter['alpha']:g} in {where}"


def sync_of(settings: VerlConfig) -> Sync:
    """Returns what a weight sync sends: all weights, only the adapters, or weights with the adapters merged in.

    Colocated trainers send servers only the adapters (engine_workers.py:790-808). Through a checkpoint engine, verl
    sends the base model and drops the adapters (engine_workers.py:767, verl#7495), so separated servers get merged
    weights.
    """
    if settings.lora is None:
        return "full"
    return "adapter" if settings.placement == "colocated" else "merged"


def adapter_of(settings: VerlConfig) -> Adapter | None:
    """Returns the adapters of a run; None if it trains all weights.

    Raises:
        ConfigError: If ``verl.lora.adapter`` is not a folder of adapters that can be trained and served.
    """
    lora = settings.lora
    if lora is None:
        return None
    if not lora.adapter:
        return Adapter(lora.rank, lora.alpha, lora.target_modules)
    described = _described(lora.adapter)
    targets = described.get("target_modules") or ()
    found = Adapter(
        rank=int(described["r"]),
        alpha=float(described["lora_alpha"]),
        target_modules=()
        if targets == ALL_LINEAR
        else tuple(sorted([targets] if isinstance(targets, str) else targets)),
    )
    _check_given(lora, found)
    return found


def base_of(folder: str) -> str | None:
    """Returns the folder or Hugging Face model ID of the base model named in an adapter folder, or None."""
    found: str | None = _described(folder).get("base_model_name_or_path")
    return found


def _described(folder: str) -> dict[str, Any]:
    """Returns the configuration in an adapter folder."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (Path(folder) / name).is_file()]
    if missing:
        raise ConfigError(
            f"verl.lora.adapter = {folder!r} has no {' and no '.join(missing)}: name a folder that PEFT's "
            "save_pretrained or rllm-core export-model wrote"
        )
    described = read_model_file(Path(folder) / ADAPTER_CONFIG)
    if described.get("peft_type") != "LORA":
        raise ConfigError(
            f"verl.lora.adapter = {folder!r} has adapters of type {described.get('peft_type')!r}, not LORA"
        )
    extra = {
        name: described[name]
        for name, absent in UNSUPPORTED.items()
        if described.get(name, absent) not in (absent, None)
    }
    if extra:
        name, value = next(iter(extra.items()))
        raise ConfigError(
            f"verl.lora.adapter = {folder!r} has {name} = {value!r}, which trainer and servers do not compute alike; "
            f"adapters with any of {', '.join(sorted(UNSUPPORTED))} cannot be used"
        )
    return described


def _check_given(lora: LoRAConfig, found: Adapter) -> None:
    for name in ("rank", "alpha", "target_modules"):
        given, has = getattr(lora, name), getattr(found, name)
        is_same = set(given) == set(has) if name == "target_modules" else given == has
        if name in lora.model_fields_set and not is_same:
            raise ConfigError(
                f"verl.lora.{name} = {given!r}, but the adapters in verl.lora.adapter have {has!r}: remove "
                f"verl.lora.{name}, or start without verl.lora.adapter"
            )


def model_settings(settings: VerlConfig) -> dict[str, Any]:
    """Returns the settings of verl's section ``actor_rollout_ref.model``."""
    adapter = adapter_of(settings)
    if adapter is None:
        return {}
    assert settings.lora is not None
    return {
        "lora_rank": adapter.rank,
        "lora_alpha": int(adapter.alpha),
        "target_modules": list(adapter.target_modules) or ALL_LINEAR,
        "lora_adapter_path": settings.lora.adapter or None,
        # Also tells verl's servers whether to expect adapters.
        "lora": {"merge": sync_of(settings) == "merged"},
    }
