"""``[verl]``, and the backend without verl installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rllm_verl
from pydantic import ValidationError
from rllm_verl.config import VerlConfig

from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager

PLUGIN = Path(rllm_verl.__file__).parents[1]
RUN_FILE = """
workflow = "sort"
backend = "verl"
parser = "chat_template"

[model]
path = "a/model"

[verl]
max_model_tokens = 64
"""


@pytest.mark.parametrize("address", ["", "auto", "head:6379", "10.0.0.1:6379", "ray://head:10001"])
def test_addresses_of_a_cluster(address: str) -> None:
    assert VerlConfig(ray_address=address).ray_address == address


@pytest.mark.parametrize(
    "address", ["head", "http://head:1", "ray://head", "ray://user:secret@head:1", "a b:1", "h:1/x"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValidationError, match="ray_address"):
        VerlConfig(ray_address=address)


@pytest.mark.parametrize("name", ["A=B", "A B", "", "1A", "A,B"])
def test_what_is_no_name_of_a_variable(name: str) -> None:
    with pytest.raises(ValidationError, match="environment"):
        VerlConfig(environment=(name,))


@pytest.mark.parametrize(
    ("settings", "trainers", "data_parallel", "server_devices"),
    [
        (VerlConfig(), 1, 1, 1),
        (VerlConfig(nodes=4, devices_per_node=8), 32, 32, 32),
        (VerlConfig(nodes=2, devices_per_node=8, sequence_parallel=4), 16, 4, 16),
        (VerlConfig(placement="separated", nodes=2, devices_per_node=8, rollout_devices_per_node=3), 16, 16, 3),
        (VerlConfig(placement="separated", rollout_nodes=2, rollout_devices_per_node=8), 1, 1, 16),
        # Settings of separated servers have no effect if colocated.
        (VerlConfig(devices_per_node=4, rollout_nodes=2, rollout_devices_per_node=8), 4, 4, 4),
    ],
)
def test_devices(settings: VerlConfig, trainers: int, data_parallel: int, server_devices: int) -> None:
    assert (settings.trainers, settings.data_parallel, settings.server_devices) == (
        trainers,
        data_parallel,
        server_devices,
    )


def test_a_misspelt_key_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE + "tensor_paralel = 2\n", encoding="utf-8")
    plugins = PluginManager.from_environment()
    plugins.register(rllm_verl, "verl")
    with pytest.raises(ConfigError, match=r"verl.tensor_paralel.*did you mean .*tensor_parallel"):
        load_run_config(str(path), plugins)


def test_the_backend_is_listed_and_asked_what_it_can_do_without_its_stack() -> None:
    asked = """
import sys
stack = ("torch", "verl", "ray", "vllm", "omegaconf", "hydra", "transformers")
sys.modules.update(dict.fromkeys(stack))
import rllm_verl
[backend], [command] = rllm_verl.backends(), rllm_verl.cli_commands()
assert "numpy" not in sys.modules
from importlib import import_module
module, _, name = backend.load.partition(":")
VerlBackend = getattr(import_module(module), name)
from rllm_core.config import RunConfig
print(sorted(VerlBackend.capabilities(RunConfig(workflow="any", backend="verl")).policies))
module, _, name = command.load.partition(":")
print(getattr(import_module(module), name).name)
"""
    environment = os.environ | {"PYTHONPATH": str(PLUGIN)}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['current', 'proximal', 'reference']", "verl-export"]


@pytest.mark.slow
def test_without_verl_a_run_is_refused_in_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE, encoding="utf-8")
    about = tmp_path / f"rllm_verl-{rllm_verl.__version__}.dist-info"
    about.mkdir()
    named = f"Metadata-Version: 2.1\nName: rllm-verl\nVersion: {rllm_verl.__version__}\n"
    (about / "METADATA").write_text(named, encoding="utf-8")
    (about / "entry_points.txt").write_text("[rllm_core]\nverl = rllm_verl\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PLUGIN)])}
    command = [Path(sys.executable).with_name("rllm-core"), "train", path, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "error: backend 'verl' needs verl, which is not installed here: pip install 'rllm-verl[gpu]'"
    )
