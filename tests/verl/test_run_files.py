"""Run files: valid examples, one-line errors for invalid ones, and the step from ``local`` to ``verl``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf
from rllm_verl import verl_api
from rllm_verl.backend import VerlBackend
from rllm_verl.settings import verl_config

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.cli import Session, cli
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "plugins" / "rllm-verl" / "examples").glob("*.toml"))
COMMAND = Path(sys.executable).with_name("rllm-core")

# The starter task for backend local. Its hardware section is [local], or [verl] for verl.
SORT = """
workflow = "sort"
backend = "{backend}"
parser = "chat_template"

[model]
path = "{model}"

[training]
steps = 20
groups_per_step = 8
rollouts_per_group = 8
checkpoint_every_steps = 10

[rollout]
max_response_tokens = 6

[algorithm]
name = "grpo"
loss = "ppo_clip"
proximal_policy = "forward"
entropy_coefficient = 0.002

[algorithm.loss_options]
clip_high = 0.28

[algorithm.kl]
coefficient = 0.01

[optimizer]
learning_rate = 1e-3
"""
LOCAL = "\n[local]\nthreads = 1\n"
VERL = """
[verl]
device = "cpu"
dtype = "float32"
attention = "sdpa"
cuda_graphs = false
release_memory = false
"""


def dry_run(path: Path) -> dict[str, Any]:
    """Output of ``rllm-core train PATH --dry-run``."""
    done = CliRunner().invoke(cli, ["train", str(path), "--dry-run", "--json"], obj=Session(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager.from_environment()


# --------------------------------------------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_without_devices_or_network(path: Path) -> None:
    machines, devices = re.match(r"(\d+)x(\d+)-", path.name).groups()  # type: ignore[union-attr]  # fails if misnamed
    [cluster] = [line for line in dry_run(path)["not_checked"] if line.startswith("Ray cluster")]
    assert cluster.endswith(f"whether it has {int(machines) * int(devices)} cuda devices")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_verl_takes_the_settings_of_an_example(path: Path, plugins: PluginManager) -> None:
    config = load_run_config(str(path), plugins)
    backend = VerlBackend(config, plugins)
    sections = verl_config(config, backend.loss).actor_rollout_ref
    dataclass = verl_api.use("omega_conf_to_dataclass")
    actor, rollout = dataclass(sections.actor), dataclass(sections.rollout)
    verl = tomllib.loads(path.read_text(encoding="utf-8"))["verl"]
    assert actor.strategy == "fsdp2"
    assert actor.fsdp_config.optimizer_offload == ("optimizer" in verl.get("offload", []))
    assert rollout.tensor_model_parallel_size == verl.get("tensor_parallel", 1)
    assert sections.model.lora_rank == verl.get("lora", {}).get("rank", 0)
    assert rollout.checkpoint_engine.backend == ("nccl" if verl["placement"] == "separated" else "naive")
    assert rollout.expert_parallel_size == verl.get("overrides", {}).get(
        "actor_rollout_ref.rollout.expert_parallel_size", 1
    )


def test_there_is_one_for_each_size_and_placement() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "1x1-0.5b-colocated",
        "1x1-1.5b-colocated",
        "1x1-7b-lora",
        "1x2-14b-lora",
        "1x2-3b-colocated",
        "1x4-32b-lora",
        "1x4-7b-colocated",
        "1x8-14b-colocated",
        "1x8-32b-lora",
        "1x8-7b-colocated",
        "1x8-7b-separated",
        "4x8-30b-a3b-colocated",
        "4x8-7b-separated",
    }


def test_the_megatron_settings_that_an_example_suggests(plugins: PluginManager) -> None:
    [path] = [path for path in EXAMPLES if "30b" in path.name]
    suggested = dict(re.findall(r'^# +("actor_rollout_ref\S+" = (\d+))$', path.read_text(encoding="utf-8"), re.M))
    assert suggested, "the example suggests nothing"
    overrides = f"verl.overrides={{ {', '.join(suggested)} }}"
    config = load_run_config(str(path), plugins, overrides=["verl.strategy=megatron", "verl.offload=[]", overrides])
    backend = VerlBackend(config, plugins)
    backend.validate_config()
    megatron = verl_config(config, backend.loss).actor_rollout_ref.actor.megatron
    for setting, value in suggested.items():
        key = setting.split('"')[1].rpartition(".")[2]
        assert megatron[key] == int(value)


# --------------------------------------------------------------------------------------------------------------------
# From local to verl


@pytest.fixture
def sort(model: Path, tmp_path: Path) -> Path:
    """The starter task for backend verl."""
    path = tmp_path / "verl.toml"
    path.write_text(SORT.format(backend="verl", model=model) + VERL, encoding="utf-8")
    return path


def test_a_run_file_for_local_needs_another_backend_and_its_hardware_only(sort: Path, model: Path) -> None:
    local = sort.with_name("local.toml")
    local.write_text(SORT.format(backend="local", model=model) + LOCAL, encoding="utf-8")
    resolved = {}
    for path in (sort, local):
        found = dry_run(path)
        resolved[path.stem] = found["resolved"], found["derived"]
    (verl, verl_numbers), (local_tables, local_numbers) = resolved["verl"], resolved["local"]
    assert (verl.pop("backend"), local_tables.pop("backend")) == ("verl", "local")
    assert verl.pop("verl")["device"] == "cpu"
    assert local_tables.pop("local")["threads"] == 1
    assert verl == local_tables
    assert verl_numbers == local_numbers


# --------------------------------------------------------------------------------------------------------------------
# Rejected settings


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0", "0.9.0", "0.10.0.dev0", "0.10.0", "1.0"])
def test_another_version_of_verl_is_refused_with_both(
    version: str, sort: Path, tmp_path: Path, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "packages" / f"verl-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(about.parent)
    with pytest.raises(ConfigError) as caught:
        assemble(load_run_config(str(sort), plugins), plugins)
    [line] = str(caught.value).splitlines()
    assert f"{version} is installed" in line
    assert all(str(bound) in line for bound in verl_api.SUPPORTED)


@pytest.mark.parametrize(
    ("version", "is_refused"), [("0.24.0", False), ("1.12.0", False), ("1.13.0", True), ("2.0", True)]
)
def test_a_trl_that_verl_cannot_import_is_refused(
    version: str, is_refused: bool, sort: Path, tmp_path: Path, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks would end with an ImportError, after Ray and the trainers have started."""
    about = tmp_path / "packages" / f"trl-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(about.parent)
    config = load_run_config(str(sort), plugins)
    if not is_refused:
        assemble(config, plugins)
        return
    with pytest.raises(ConfigError, match=f"trl {version} is installed.*pip uninstall trl") as caught:
        assemble(config, plugins)
    assert "\n" not in str(caught.value)


ON_GPUS = ("verl.device=cuda", "verl.dtype=bfloat16", "verl.attention=flash_attention_2")
SEPARATED_ON_GPUS = (*ON_GPUS, "verl.placement=separated")
REFUSED: dict[str, tuple[list[str], str]] = {
    "no model": (["model.path="], "model.path is not set"),
    "sequences over devices that are not there": (
        ["verl.sequence_parallel=2", "verl.devices_per_node=3"],
        "verl.sequence_parallel = 2 does not divide the 3 devices of verl.nodes x verl.devices_per_node",
    ),
    "a server over devices that are not there": (
        ["verl.tensor_parallel=2"],
        "verl.tensor_parallel = 2 does not divide the 1 devices that servers have with verl.placement = 'colocated'",
    ),
    "devices of separated servers where they are colocated": (
        ["verl.rollout_devices_per_node=4"],
        "verl.rollout_devices_per_node = 4 has no effect with verl.placement = 'colocated'",
    ),
    "a separated server over devices that are not there": (
        ["verl.placement=separated", "verl.rollout_devices_per_node=3", "verl.tensor_parallel=2"],
        "verl.tensor_parallel = 2 does not divide the 3 devices that servers have with verl.placement = 'separated'",
    ),
    "FSDP1 on a CPU": (["verl.strategy=fsdp"], "verl.strategy = 'fsdp' does not work with verl.device = 'cpu'"),
    "a driver outside of the cluster": (
        ["verl.ray_address=ray://head:10001"],
        "verl.ray_address = 'ray://head:10001': verl's driver must be on a machine of the cluster",
    ),
    "Megatron with what belongs to FSDP": (
        ["verl.strategy=megatron", "verl.offload=['optimizer']"],
        "verl.offload and verl.sequence_parallel need verl.strategy = 'fsdp2' or 'fsdp'",
    ),
    "colocated and asynchronous": (
        ["training.staleness_threshold=0.5"],
        "training.staleness_threshold = 0.5 must be 0: backend 'verl' shares its devices with its engine",
    ),
    "servers without weights": (
        ["training.trigger_parameter_sync_step=2", "verl.release_memory=true"],
        "training.trigger_parameter_sync_step = 2 needs verl.placement = 'separated' or verl.release_memory = false",
    ),
    "top_p": (["rollout.top_p=0.9"], "rollout.top_p = 0.9, rollout.top_k = 0: must be 1 and 0"),
    "top_k": (["rollout.top_k=40"], "rollout.top_p = 1, rollout.top_k = 40: must be 1 and 0"),
    "bypass of what is recomputed": (
        ["verl.old_logprob=bypass"],
        "verl.old_logprob = 'bypass' cannot be used with algorithm.proximal_policy = 'forward': "
        "set verl.old_logprob to 'recompute' or 'last_sync', or algorithm.proximal_policy to 'rollout'",
    ),
    "recomputing what is bypassed": (
        ["verl.old_logprob=recompute", "algorithm.proximal_policy=rollout"],
        "verl.old_logprob = 'recompute' cannot be used with algorithm.proximal_policy = 'rollout': "
        "set verl.old_logprob to 'bypass', or algorithm.proximal_policy to 'forward'",
    ),
    "weights that Megatron does not keep": (
        [*ON_GPUS, "verl.old_logprob=last_sync", "verl.strategy=megatron"],
        "verl.old_logprob = 'last_sync' does not work with verl.strategy = 'megatron'",
    ),
    "weights that FSDP1 has gathered": (
        [*ON_GPUS, "verl.old_logprob=last_sync", "verl.strategy=fsdp"],
        "verl.old_logprob = 'last_sync' does not work with verl.strategy = 'fsdp': its copy of the weights",
    ),
    "flash attention in full precision": (
        ["verl.attention=flash_attention_2"],
        "verl.dtype = 'float32' cannot be used with verl.attention = 'flash_attention_2', which computes in half",
    ),
    "parts of a sequence that attend to themselves only": (
        [*ON_GPUS, "verl.attention=sdpa", "verl.sequence_parallel=2", "verl.devices_per_node=2"],
        "verl.sequence_parallel = 2 cannot be used with verl.attention = 'sdpa': verl exchanges the parts of",
    ),
    "heads that cannot be divided": (
        [*ON_GPUS, "verl.sequence_parallel=3", "verl.devices_per_node=3"],
        "verl.sequence_parallel = 3 does not fit the model's 4 attention heads and 2 key-value heads: it must divide",
    ),
    "a server over a part of two machines": (
        [*ON_GPUS, "verl.nodes=3", "verl.devices_per_node=4", "verl.tensor_parallel=6"],
        "verl.tensor_parallel = 6 and verl.devices_per_node = 4: one must be a multiple of the other",
    ),
    "a separated server over a part of two machines": (
        [*SEPARATED_ON_GPUS, "verl.rollout_nodes=3", "verl.rollout_devices_per_node=4", "verl.tensor_parallel=6"],
        "verl.tensor_parallel = 6 and verl.rollout_devices_per_node = 4: one must be a multiple of the other",
    ),
    "Megatron on a CPU": (
        ["verl.strategy=megatron"],
        "verl.strategy = 'megatron' does not work with verl.device = 'cpu'",
    ),
    "Megatron in full precision": (
        ["verl.strategy=megatron", "verl.device=cuda"],
        "verl.dtype = 'float32' does not work with verl.strategy = 'megatron', which verl runs in bfloat16",
    ),
    "Megatron with attention of transformers": (
        [*ON_GPUS, "verl.strategy=megatron", "verl.attention=sdpa"],
        "verl.attention = 'sdpa' has no effect with verl.strategy = 'megatron': remove it, or set",
    ),
    "one request ID for several turns": (
        ['verl.overrides={ "actor_rollout_ref.rollout.full_determinism" = true }'],
        "verl.overrides.'actor_rollout_ref.rollout.full_determinism' cannot be set with backend 'verl': vLLM would get",
    ),
    "attention through the back door": (
        ['verl.overrides={ "actor_rollout_ref.model.override_config.attn_implementation" = "eager" }'],
        "verl.overrides.'actor_rollout_ref.model.override_config.attn_implementation': another setting of the run file",
    ),
    "a setting of verl's that does not exist": (
        ['verl.overrides={ "actor_rollout_ref.rollout.max_num_seq" = 4 }'],
        "verl.overrides.'actor_rollout_ref.rollout.max_num_seq': verl's configuration has no such key; did you mean "
        "'actor_rollout_ref.rollout.max_num_seqs'?",
    ),
    "a setting of verl's that the run file has": (
        ['verl.overrides={ "actor_rollout_ref.actor.optim.lr" = 0.1 }'],
        "verl.overrides.'actor_rollout_ref.actor.optim.lr': another setting of the run file controls this key",
    ),
    "the same in a table": (
        ['verl.overrides={ "actor_rollout_ref.actor.optim" = { clip_grad = 0.1 } }'],
        "verl.overrides.'actor_rollout_ref.actor.optim.clip_grad': another setting of the run file controls this key",
    ),
    "a table with a key that does not exist": (
        ['verl.overrides={ "actor_rollout_ref.actor.optim" = { clip = 0.1 } }'],
        "verl.overrides.'actor_rollout_ref.actor.optim.clip': verl's configuration has no such key",
    ),
}
# Keys of verl's, with a part of the error.
CONTROLLED, UNREAD = "another setting of the run file controls this key", "has no effect"
NOT_TAKEN = {
    "actor_rollout_ref.actor.clip_ratio_high": CONTROLLED,
    "actor_rollout_ref.actor.grad_clip": CONTROLLED,
    "actor_rollout_ref.actor.kl_loss_coef": f"{CONTROLLED}; set algorithm.kl.coefficient instead",
    "actor_rollout_ref.actor.optim.betas": CONTROLLED,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": f"{UNREAD}, because backend 'verl' uses verl's workers",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": UNREAD,
    "actor_rollout_ref.actor.ppo_epochs": UNREAD,
    "actor_rollout_ref.rollout.gpu_memory_utilization": f"{CONTROLLED}; set verl.server_memory_share instead",
    "actor_rollout_ref.rollout.val_kwargs.temperature": UNREAD,
    "algorithm.adv_estimator": UNREAD,
    "trainer.total_epochs": UNREAD,
}
TAKEN = (
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.rollout.enable_prefix_caching",
)


@pytest.mark.parametrize("key", NOT_TAKEN)
def test_a_setting_of_verls_without_effect_is_refused(key: str, sort: Path, plugins: PluginManager) -> None:
    config = load_run_config(str(sort), plugins, overrides=[f'verl.overrides={{ "{key}" = 1 }}'])
    with pytest.raises(ConfigError, match=re.escape(NOT_TAKEN[key])):
        assemble(config, plugins)


def test_a_folder_that_is_missing_here_is_no_model_id(sort: Path, plugins: PluginManager) -> None:
    overrides = ["model.path=/no/such/model", "verl.max_model_tokens=64"]
    backend = VerlBackend(load_run_config(str(sort), plugins, overrides=overrides), plugins)
    lines = [*backend.validate_config(), str(backend.memory(None))]
    found = [line for line in lines if "/no/such/model'" in line]
    assert len(found) >= 2
    assert not [line for line in found if "Hugging Face" in line or "hf download" in line]


@pytest.mark.parametrize("key", TAKEN)
def test_other_settings_of_verls_are_taken(key: str, sort: Path, plugins: PluginManager) -> None:
    overrides = [f'verl.overrides={{ "{key}" = true }}']
    backend = assemble(load_run_config(str(sort), plugins, overrides=overrides), plugins).backend
    assert isinstance(backend, VerlBackend)
    assert OmegaConf.select(backend._configuration, key) is True


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, sort: Path, plugins: PluginManager) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        assemble(load_run_config(str(sort), plugins, overrides=overrides), plugins)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("described", "parser", "message"),
    [
        (
            {"vision_config": {}, "text_config": {"max_position_embeddings": 64}},
            "renderer",
            "parser = 'renderer' cannot",
        ),
        ({"model_type": "qwen3"}, "chat_template", "verl.max_model_tokens is not set"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    described: dict[str, Any], parser: str, message: str, sort: Path, plugins: PluginManager
) -> None:
    folder = sort.with_name("model")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    config = load_run_config(str(sort), plugins, overrides=[f"model.path={folder}"], parser=parser)
    with pytest.raises(ConfigError, match=message):
        assemble(config, plugins)


def test_a_refusal_is_one_line_and_allocates_nothing(sort: Path) -> None:
    command = [COMMAND, "train", sort, "--dry-run", "-o", "rollout.top_p=0.9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: rollout.top_p = 0.9")
