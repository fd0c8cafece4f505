"""Checks of the configuration before anything is allocated; none of them needs the SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rllm_tinker
from rllm_tinker.backend import TinkerBackend, server_of
from rllm_tinker.config import TinkerConfig

from rllm_core.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainingConfig
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager

KEY = "tml-a-key-that-must-not-show"
SERVER = "http://127.0.0.1:8000"


def validated(tinker: TinkerConfig, **sections: Any) -> list[str]:
    defaults: dict[str, Any] = {
        "model": ModelConfig(path="Qwen/Qwen3-8B"),
        "optimizer": OptimizerConfig(max_grad_norm=1e6),
    }
    config = RunConfig(workflow="sort", backend="tinker", plugins={"tinker": tinker}, **{**defaults, **sections})
    return TinkerBackend(config, PluginManager.from_environment(no_plugins=True)).validate_config()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    # Pretend that the SDK is installed; only this check needs it.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_the_hosted_service_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY is not set: set it to your key.* or set tinker.base_url"):
        validated(TinkerConfig())
    monkeypatch.setenv("TINKER_API_KEY", "sk-of-somebody-else")
    with pytest.raises(ConfigError, match="TINKER_API_KEY does not hold a Tinker key") as caught:
        validated(TinkerConfig())
    assert "sk-of-somebody-else" not in str(caught.value)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert validated(TinkerConfig()) == [
        "the hosted Tinker service: whether it responds, accepts the key, and has model 'Qwen/Qwen3-8B'",
        "weight syncs: whether the server samples with the weights that it trained; its interface cannot read them, so "
        "every step compares log-probabilities (tinker.sync_tolerance)",
    ]


def test_a_server_of_ones_own_needs_none_but_its_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert validated(TinkerConfig(base_url=SERVER, service="skyrl"))
    with pytest.raises(ConfigError, match=r"base_url = 'http://127.0.0.1:8000' needs tinker.service: 'skyrl'"):
        validated(TinkerConfig(base_url=SERVER))
    monkeypatch.setenv("TINKER_BASE_URL", SERVER)
    with pytest.raises(ConfigError, match=r"TINKER_BASE_URL = 'http://127.0.0.1:8000' needs tinker.service"):
        validated(TinkerConfig())
    assert SERVER in validated(TinkerConfig(service="hosted"))[0]
    monkeypatch.delenv("TINKER_BASE_URL")
    with pytest.raises(ConfigError, match=r"tinker.service = 'skyrl' needs tinker.base_url"):
        validated(TinkerConfig(service="skyrl"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": ModelConfig()}, "model.path is not set"),
        ({"rollout": RolloutConfig(temperature=0.8)}, "rollout.temperature = 0.8 must be 1"),
        ({"optimizer": OptimizerConfig()}, "optimizer.max_grad_norm = 1 cannot be honored"),
        ({"training": TrainingConfig(sync_timeout_seconds=500)}, "training.sync_timeout_seconds = 500 must be more"),
        ({"algorithm": AlgorithmConfig(loss_options={"clip_low": 0.1})}, "algorithm.loss_options"),
    ],
)
def test_what_a_server_cannot_do_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(TinkerConfig(base_url=SERVER, service="skyrl"), **sections)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://user:secret@host", "http://a b"])
def test_addresses_are_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        TinkerConfig(base_url=url)


def test_the_key_is_in_no_description_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    config = RunConfig(workflow="sort", backend="tinker", model=ModelConfig(path="Qwen/Qwen3-8B"))
    backend = TinkerBackend(config, PluginManager.from_environment(no_plugins=True))
    assert server_of(backend.config).key == KEY
    assert KEY not in repr(server_of(backend.config)) + repr(vars(backend))


def test_the_backend_is_listed_and_asked_what_it_can_do_without_the_sdk() -> None:
    asked = """
import sys
sys.modules["tinker"] = None
import rllm_tinker
[backend] = rllm_tinker.backends()
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
from rllm_tinker.backend import TinkerBackend
from rllm_core.config import RunConfig
print(sorted(TinkerBackend.capabilities(RunConfig(workflow="any", backend="tinker")).losses))
assert "torch" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": str(Path(rllm_tinker.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "importance_sampling" in done.stdout


@pytest.mark.parametrize(
    ("service", "training", "samplers"),
    [
        ("hosted", {}, "snapshots"),
        ("hosted", {"staleness_threshold": 1.0}, "snapshots"),
        ("skyrl", {}, "shared"),
        ("skyrl", {"staleness_threshold": 0.5}, "separate"),
        ("skyrl", {"trigger_parameter_sync_step": 3}, "separate"),
    ],
)
def test_samplers_have_weights_of_their_own_where_training_goes_on(
    service: Any, training: dict[str, Any], samplers: str
) -> None:
    config = RunConfig(
        workflow="sort",
        backend="tinker",
        training=TrainingConfig(**training),
        plugins={"tinker": TinkerConfig(base_url=SERVER, service=service)},
    )
    backend = TinkerBackend(config, PluginManager.from_environment(no_plugins=True))
    assert server_of(backend.config).samplers == samplers
