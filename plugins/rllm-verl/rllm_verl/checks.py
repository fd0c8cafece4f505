"""Checks of a run file that need no devices."""

from __future__ import annotations

from rllm_core.config import ConfigError, RunConfig
from rllm_verl import verl_api
from rllm_verl.config import VerlConfig
from rllm_verl.lora import COMPARABLE
from rllm_verl.lora_checks import check_lora
from rllm_verl.losses import VerlLoss
from rllm_verl.settings import (
    HUB_ID,
    has_experts,
    is_model_folder,
    model_description,
    text_description,
    verl_settings,
)

# Settings of `VerlConfig` that only separated servers have.
OF_SEPARATED = ("rollout_nodes", "rollout_devices_per_node", "checkpoint_engine", "checkpoint_engine_module")


def check(config: RunConfig, loss: VerlLoss) -> list[str]:
    """Checks the run file.

    Returns:
        One line for each thing that could not be checked.

    Raises:
        ConfigError: If a setting cannot work.
    """
    verl_api.installed_version()
    _ = loss.loss  # checks the loss options
    _check_model(config)
    _check_devices(config)
    _check_attention(config)
    _check_megatron(config)
    _check_algorithm(config)
    settings = verl_settings(config)
    if settings.strategy != "megatron":
        verl_api.check_trl()
    where = settings.ray_address or "started on this machine for the run"
    notes = [f"Ray cluster {where}: whether it has {settings.devices} {settings.device} devices"]
    if not is_model_folder(config.model.path):
        may_be_hub = HUB_ID.fullmatch(config.model.path)
        then = "the run will download this Hugging Face model ID" if may_be_hub else "the machines of the run need it"
        notes.append(f"model.path = {config.model.path!r}: no such folder here; {then}")
    if settings.sequence_parallel > 1 and "num_attention_heads" not in text_description(config.model.path):
        notes.append(
            f"model.path = {config.model.path!r}: whether verl.sequence_parallel = {settings.sequence_parallel} fits "
            "its attention heads"
        )
    if settings.strategy == "megatron":
        notes.append("verl.strategy = 'megatron': whether the workers have Megatron-Core and Megatron-Bridge")
    notes += check_lora(config)
    if settings.strategy != COMPARABLE:
        notes.append(
            f"verl.strategy = {settings.strategy!r}: whether servers have each weight after a sync; the run compares "
            "only log-probabilities there"
        )
    elif has_experts(config.model.path) is not False:
        notes.append(
            f"model.path = {config.model.path!r}: whether servers have each weight of experts after a sync; the run "
            "compares only log-probabilities there"
        )
    return notes


def _check_model(config: RunConfig) -> None:
    if not config.model.path:
        raise ConfigError(
            "model.path is not set: set it to a model folder that all machines can read, or to a Hugging Face model ID"
        )
    described = model_description(config.model.path)
    if "vision_config" in described and config.parser.rpartition("/")[2] == "renderer":
        raise ConfigError(
            f"parser = 'renderer' cannot be used with model.path = {config.model.path!r}, a vision model: backend "
            "'verl' trains on text; set parser = 'chat_template' to train its language model only, or use a text model"
        )


def _check_devices(config: RunConfig) -> None:
    settings, training = verl_settings(config), config.training
    if settings.ray_address.startswith("ray://"):
        raise ConfigError(
            f"verl.ray_address = {settings.ray_address!r}: verl's driver must be on a machine of the cluster; run this "
            "command there with verl.ray_address = 'auto', or send it there: ray job submit --address "
            "http://HEAD:8265 -- rllm-core train ..."
        )
    if settings.trainers % settings.sequence_parallel:
        raise ConfigError(
            f"verl.sequence_parallel = {settings.sequence_parallel} does not divide the {settings.trainers} devices of "
            "verl.nodes x verl.devices_per_node"
        )
    _check_servers(settings)
    if settings.strategy == "fsdp" and settings.device == "cpu":
        raise ConfigError("verl.strategy = 'fsdp' does not work with verl.device = 'cpu': set it to 'fsdp2'")
    if settings.placement == "separated":
        return
    if training.trigger_parameter_sync_step > 1 and settings.release_memory:
        raise ConfigError(
            f"training.trigger_parameter_sync_step = {training.trigger_parameter_sync_step} needs "
            "verl.placement = 'separated' or verl.release_memory = false: servers that released their memory have no "
            "weights until the next sync"
        )


def _check_servers(settings: VerlConfig) -> None:
    for key in OF_SEPARATED if settings.placement == "colocated" else ():
        if (value := getattr(settings, key)) != VerlConfig.model_fields[key].default:
            raise ConfigError(
                f"verl.{key} = {value!r} has no effect with verl.placement = 'colocated', where servers share the "
                "trainers' devices: set verl.placement = 'separated', or remove the key"
            )
    split = settings.tensor_parallel
    if settings.server_devices % split:
        raise ConfigError(
            f"verl.tensor_parallel = {split} does not divide the {settings.server_devices} devices that servers have "
            f"with verl.placement = {settings.placement!r}"
        )
    key = "devices_per_node" if settings.placement == "colocated" else "rollout_devices_per_node"
    on_a_machine = getattr(settings, key)
    if on_a_machine % split and split % on_a_machine:
        raise ConfigError(
            f"verl.tensor_parallel = {split} and verl.{key} = {on_a_machine}: one must be a multiple of the other, "
            "because a server uses a part of one machine, or whole machines"
        )


def _check_attention(config: RunConfig) -> None:
    """Checks `attention` for FSDP; Megatron has its own, see `_check_megatron`."""
    settings = verl_settings(config)
    if settings.strategy == "megatron":
        return
    is_flash = "flash" in settings.attention
    if settings.dtype == "float32" and is_flash:
        raise ConfigError(
            f"verl.dtype = 'float32' cannot be used with verl.attention = {settings.attention!r}, which computes in "
            "half precision only: set verl.attention = 'sdpa', or verl.dtype = 'bfloat16'"
        )
    split = settings.sequence_parallel
    if split == 1:
        return
    if not is_flash:
        raise ConfigError(
            f"verl.sequence_parallel = {split} cannot be used with verl.attention = {settings.attention!r}: verl "
            "exchanges the parts of a sequence only in flash attention, so each device would attend to its own part; "
            "set verl.attention = 'flash_attention_2', or verl.sequence_parallel = 1"
        )
    text = text_description(config.model.path)
    heads = text.get("num_attention_heads")
    if heads is None:
        return
    shared = text.get("num_key_value_heads") or heads
    if heads % split or (shared % split and split % shared):
        raise ConfigError(
            f"verl.sequence_parallel = {split} does not fit the model's {heads} attention heads and {shared} key-value "
            "heads: it must divide the first number, and divide the second or be a multiple of it"
        )


def _check_megatron(config: RunConfig) -> None:
    settings = verl_settings(config)
    if settings.strategy != "megatron":
        return
    if settings.offload or settings.sequence_parallel > 1:
        raise ConfigError(
            "verl.offload and verl.sequence_parallel need verl.strategy = 'fsdp2' or 'fsdp'; for Megatron, use "
            'verl.overrides instead, for example "actor_rollout_ref.actor.megatron.param_offload" = true'
        )
    if settings.device == "cpu":
        raise ConfigError("verl.strategy = 'megatron' does not work with verl.device = 'cpu': set it to 'fsdp2'")
    if settings.dtype != "bfloat16":
        raise ConfigError(
            f"verl.dtype = {settings.dtype!r} does not work with verl.strategy = 'megatron', which verl runs in "
            "bfloat16: set verl.dtype = 'bfloat16', or verl.strategy = 'fsdp2'"
        )
    if settings.attention != VerlConfig().attention:
        raise ConfigError(
            f"verl.attention = {settings.attention!r} has no effect with verl.strategy = 'megatron': remove it, or set "
            '"actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend" in verl.overrides'
        )


def _check_algorithm(config: RunConfig) -> None:
    rollout, algorithm, settings = config.rollout, config.algorithm, verl_settings(config)
    if rollout.top_p != 1 or rollout.top_k != 0:
        raise ConfigError(
            f"rollout.top_p = {rollout.top_p:g}, rollout.top_k = {rollout.top_k}: must be 1 and 0 with backend 'verl': "
            "its servers report log-probabilities after truncation by these settings, but the trainer trains the full "
            "distribution"
        )
    bypasses = algorithm.proximal_policy == "rollout"
    if settings.old_logprob is not None and (settings.old_logprob == "bypass") != bypasses:
        fitting = "'bypass'" if bypasses else "'recompute' or 'last_sync'"
        raise ConfigError(
            f"verl.old_logprob = {settings.old_logprob!r} cannot be used with algorithm.proximal_policy = "
            f"{algorithm.proximal_policy!r}: set verl.old_logprob to {fitting}, or algorithm.proximal_policy to "
            + ("'forward'" if bypasses else "'rollout'")
        )
    if config.training.init_from is not None and settings.strategy == "megatron":
        raise ConfigError(
            "training.init_from does not work with verl.strategy = 'megatron'; export the trained model (rllm-core "
            "export-model) and set model.path to it"
        )
    if settings.old_logprob == "last_sync" and settings.strategy != "fsdp2":
        raise ConfigError(
            f"verl.old_logprob = 'last_sync' does not work with verl.strategy = {settings.strategy!r}: its copy of the "
            "weights needs 'fsdp2'"
        )
