"""Checks of a run file that need no devices."""

from __future__ import annotations

from rllm_core.config import ConfigError, RunConfig
from rllm_verl import verl_api
from rllm_verl.losses import VerlLoss
from rllm_verl.settings import model_description, verl_settings


def check(config: RunConfig, loss: VerlLoss) -> list[str]:
    """Checks the run file.

    Returns:
        What could not be checked, one line each.

    Raises:
        ConfigError: If a setting cannot work.
    """
    verl_api.installed_version()
    _ = loss.loss  # checks the loss options
    _check_model(config)
    _check_devices(config)
    _check_algorithm(config)
    settings = verl_settings(config)
    where = settings.ray_address or "started on this machine for the run"
    notes = [f"Ray cluster {where}: whether it has {settings.devices} {settings.device} devices"]
    if not model_description(config.model.path):
        notes.append(
            f"model.path = {config.model.path!r}: no such folder; the run will download this Hugging Face model ID"
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
    if settings.server_devices % settings.tensor_parallel:
        raise ConfigError(
            f"verl.tensor_parallel = {settings.tensor_parallel} does not divide the {settings.server_devices} devices "
            f"that servers have with verl.placement = {settings.placement!r}"
        )
    if settings.strategy == "fsdp" and settings.device == "cpu":
        raise ConfigError("verl.strategy = 'fsdp' does not work with verl.device = 'cpu': set it to 'fsdp2'")
    if settings.strategy == "megatron" and (settings.offload or settings.sequence_parallel > 1):
        raise ConfigError(
            "verl.offload and verl.sequence_parallel need verl.strategy = 'fsdp2' or 'fsdp'; for Megatron, use "
            'verl.overrides instead, for example "actor_rollout_ref.actor.megatron.param_offload" = true'
        )
    if settings.placement == "separated":
        return
    if training.trigger_parameter_sync_step > 1 and settings.release_memory:
        raise ConfigError(
            f"training.trigger_parameter_sync_step = {training.trigger_parameter_sync_step} needs "
            "verl.placement = 'separated' or verl.release_memory = false: servers that released their memory have no "
            "weights until the next sync"
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
    if settings.old_logprob == "last_sync" and settings.strategy == "megatron":
        raise ConfigError("verl.old_logprob = 'last_sync' does not work with verl.strategy = 'megatron'")
