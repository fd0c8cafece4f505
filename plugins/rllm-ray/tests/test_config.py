"""Tests of what needs no Ray; tests/verl has those with a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rllm_ray.config import RayConfig
from rllm_ray.host import RayHost

from rllm_core.config import RolloutConfig
from rllm_core.errors import ConfigError
from rllm_core.hosts.contract import HostedWorkflow

HOSTED = HostedWorkflow(workflow=None, load="")  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:6379", "head:6379"])
def test_addresses(address: str) -> None:
    assert RayConfig(address=address).address == address


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://head:10001"}, "start the run on a node"),
        ({"address": "head"}, "'auto' nor 'host:port'"),
        ({"address": ":6379"}, "'auto' nor 'host:port'"),
        ({"resources": {"rollouts": 1}}, "needs the address"),
        ({"address": "auto", "resources": {"rollouts": 0}}, "greater than 0"),
        ({"num_cpus": -1}, "greater than or equal to 0"),
        ({"environment": ["A=B"]}, "match pattern"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RayConfig(**settings)


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="SEARCH_KEY"):
        RayHost(HOSTED, RolloutConfig(), RayConfig(environment=("SEARCH_KEY",)))


def test_capacity_is_unknown_until_a_cluster_is_joined() -> None:
    limited = RolloutConfig(rollouts_per_worker=3)
    assert RayHost(HOSTED, limited, RayConfig(address="auto")).capacity is None
    assert RayHost(HOSTED, limited.model_copy(update={"workers": 4}), RayConfig(address="auto")).capacity == 12
    assert RayHost(HOSTED, RolloutConfig(), RayConfig()).capacity is None


def test_listing_the_host_imports_no_ray() -> None:
    program = "import sys, rllm_ray, rllm_ray.host; print('ray' in sys.modules)"
    folders = [str(Path(__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}; {program}"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
