"""The trainer's process: verl's worker with this framework's loss, learning rate and entropy bonus.

Every worker process discovers plugins again: see `rllm_verl.worker_process`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from rllm_core import model_files
from rllm_core.config import RunConfig
from rllm_verl import adapter_weights, verl_api
from rllm_verl.config import VerlConfig
from rllm_verl.entropy import recomputed_entropy
from rllm_verl.lora import sync_of
from rllm_verl.losses import VerlLoss
from rllm_verl.sent import SentTensors
from rllm_verl.settings import verl_settings
from rllm_verl.worker_process import plugins

Dispatch = verl_api.use("Dispatch")
register = verl_api.use("register")
by_rank = verl_api.use("make_nd_compute_dataproto_dispatch_fn")


class PolicyWorker(verl_api.use("ActorRolloutRefWorker")):  # type: ignore[misc]
    """One rank of verl's actor, or of its reference.

    Args:
        config: verl's ``actor_rollout_ref`` section.
        role: ``actor``, or ``actor_rollout`` with servers on the same devices; suffix ``_ref`` adds the reference.
        run: Run file, for settings that verl's configuration does not have.
    """

    loss_fn: Any

    def __init__(self, config: Any, role: str, run: RunConfig, **kwargs: Any) -> None:
        super().__init__(config=config, role=role, **kwargs)
        self._run = run
        self._settings = verl_settings(run)
        self._synced: list[torch.Tensor] = []
        self._initial: list[torch.Tensor] | None = None  # adapters that the run started from; None if they are new

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Registers the policy loss, then loads the models.

        Raises:
            ConfigError: If the model's files lack weights.
        """
        VerlLoss(self._run, plugins).register()
        if self._settings.strategy != "megatron":
            model_files.check_weights(self._run.model.path, random_weights(self._run.model.path, self._settings))
        torch.manual_seed(self._run.training.seed)  # seeds new adapters
        super().init_model()
        if self._settings.lora is not None and self._settings.lora.adapter:
            self._initial = self._copied()
        if self.actor is not None and hasattr(self.actor.engine, "compute_entropy_from_logits"):  # FSDP's engine
            self.actor.engine.compute_entropy_from_logits = recomputed_entropy

    @register(dispatch_mode=by_rank(mesh_name="actor"))
    def update_actor(self, data: Any) -> Any:
        """Takes one optimizer step, with ``learning_rate`` and ``entropy_coefficient`` from the batch."""
        learning_rate = verl_api.use("pop_non_tensor")(data, key="learning_rate")
        entropy_coefficient = verl_api.use("pop_non_tensor")(data, key="entropy_coefficient")
        for group in self.actor.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        config = self.loss_fn.keywords["config"]
        if config.entropy_coeff != entropy_coefficient:
            self.loss_fn = partial(verl_api.use("ppo_loss"), config=replace(config, entropy_coeff=entropy_coefficient))
            self.actor.set_loss_fn(self.loss_fn)
        return super().update_actor(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def remember_synced_weights(self) -> None:
        """Copies this rank's share of the weights, which have just become live."""
        self._synced = self._copied()

    @register(dispatch_mode=by_rank(mesh_name="actor"))
    def compute_synced_log_prob(self, data: Any) -> Any:
        """`compute_log_prob` with the weights of the last weight sync."""
        current = self._copied()
        self._load(self._synced)
        try:
            return self.compute_log_prob(data)
        finally:
            self._load(current)

    @register(dispatch_mode=by_rank(mesh_name="actor"))
    def compute_initial_log_prob(self, data: Any) -> Any:
        """Computes log-probabilities with the initial adapters; new ones have no effect, so without any."""
        if self._initial is None:
            verl_api.use("assign_non_tensor")(data, no_lora_adapter=True)
            return self.compute_log_prob(data)
        current = self._copied()
        self._load(self._initial)
        try:
            return self.compute_log_prob(data)
        finally:
            self._load(current)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Sends the weights to the servers; see `rllm_verl.lora.sync_of`.

        Merges adapters itself with FSDP2, because verl rounds merged weights to bfloat16 (transformer_impl.py:1083).
        """
        if sync_of(self._settings) != "merged" or self._settings.strategy != "fsdp2":
            return await super().update_weights(global_steps=global_steps, mode=mode)
        weights = adapter_weights.merged(self.actor.engine.module, self.actor.device_name)
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_names(self) -> dict[str, list[str]]:
        """Returns the names of the tensors that a weight sync sends; see `SentTensors.names`."""
        return self._sent().names()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def report_sent(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns fingerprints of parts of tensors as a weight sync sends them now; see `SentTensors.report`."""
        return self._sent().report(parts)

    def _sent(self) -> SentTensors:
        return SentTensors(self.actor.engine.module, self.actor.device_name, sync_of(self._settings))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_adapter(self, folder: str) -> None:
        """Writes the adapters in PEFT's format, on rank 0; gathers them on all ranks."""
        module = self.actor.engine.module
        if self._settings.strategy == "fsdp2":
            weights = adapter_weights.gathered(module, self.actor.device_name)
        else:
            collect = verl_api.use("collect_lora_params")
            weights = collect(module=module, layered_summon=False, base_sync_done=True)
        if self.rank == 0:
            adapter_weights.save(Path(folder), weights, module, self._run.model.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, path: str) -> None:
        """Loads the weights of a checkpoint into the actor or the reference, without optimizer and random states."""
        engine = (self.actor or self.ref).engine
        manager = engine.checkpoint_manager
        contents, manager.checkpoint_load_contents = manager.checkpoint_load_contents, ["model"]
        try:
            engine.load_checkpoint(path, del_local_after_load=False)
        finally:
            manager.checkpoint_load_contents = contents
        if self._settings.lora is not None:
            self._initial = self._copied()

    def _shares(self) -> list[torch.Tensor]:
        """Returns this rank's share of each trained parameter."""
        parameters = [each for each in self.actor.engine.module.parameters() if each.requires_grad]
        return [each.to_local() if isinstance(each, DTensor) else each for each in parameters]

    @torch.no_grad()
    def _copied(self) -> list[torch.Tensor]:
        return [share.to("cpu", copy=True) for share in self._shares()]

    @torch.no_grad()
    def _load(self, copies: list[torch.Tensor]) -> None:
        for share, copy in zip(self._shares(), copies, strict=True):
            share.copy_(copy)


def random_weights(path: str, settings: VerlConfig) -> list[str]:
    """Returns the names of the parameters that transformers would draw at random, because the model's files lack them.

    Loads only names and sizes.
    """
    trusts = settings.trust_remote_code
    described = AutoConfig.from_pretrained(path, trust_remote_code=trusts)
    auto_class = verl_api.use("get_hf_auto_model_class")(described)
    model, found = auto_class.from_pretrained(
        path,
        config=described,
        trust_remote_code=trusts,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model_files.random_weights(dict(model.named_parameters()), found)
