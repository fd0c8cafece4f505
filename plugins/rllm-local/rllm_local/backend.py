"""Backend ``local``: a transformers causal LM, trained and sampled with torch in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.assembly.algorithm import corrections_of, policy_loss
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import (
    BackendProtocol,
    Capabilities,
    OptimizerStep,
    Policy,
    PolicyUpdate,
    UpdateResult,
)
from rllm_core.config import ConfigError, RunConfig
from rllm_core.errors import RunError
from rllm_core.memory import MemoryEstimate
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, TrainingSample
from rllm_local import checkpoint, fast, preflight
from rllm_local.config import LocalConfig
from rllm_local.decoders import max_model_tokens
from rllm_local.engine import LocalEngine
from rllm_local.memory import advice
from rllm_local.model import (
    TorchSettings,
    autocast_dtype,
    check_adapters,
    device_of,
    load_model,
    make_decoder,
    max_cache_positions,
    recompute_layers,
    runs_on_gpu,
    settings_for,
    trained_parameters,
    use_matching_attention,
    vocabulary_size,
)
from rllm_local.starter import Conversations, starter_model
from rllm_local.training import LocalBatch, LocalTrainer
from rllm_local.vision import ImageSource, Vision, image_source

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class LocalBackend(BackendProtocol[LocalBatch]):
    """Trains in this process; see `rllm_local.training` for the training path and `rllm_local.sampler` for sampling.

    All torch code runs in worker threads, so that the event loop stays free. With colocated generation there is one
    thread, so batches, passes and weight updates never overlap. With separated generation, the engine has a second
    thread and its own weights, which the first thread copies from the trainer.
    """

    name: ClassVar[str] = "local"

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self.local: LocalConfig = config.plugins.get("local") or LocalConfig()
        self.step = 0
        self._worker = self._sampling_worker = ThreadPoolExecutor(1, thread_name_prefix="rllm-local")
        if self.local.generation == "separated":
            self._sampling_worker = ThreadPoolExecutor(1, thread_name_prefix="rllm-local-sampling")
        self._settings_before: TorchSettings | None = None
        # Saved next to the weights, so that transformers can load a checkpoint.
        self._tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None
        self._engine: LocalEngine | None = None
        self._reference_engine: tuple[LocalEngine, PreTrainedModel] | None = None
        self._images: ImageSource | None = None
        self._trainer: LocalTrainer | None = None
        self._reference: LocalTrainer | None = None
        self._initial: Path | None = None  # weights of another run, which this run starts from
        self._initial_adapters: list[torch.Tensor] = []
        self._batch_tokens = 0

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """See `BackendProtocol.capabilities`."""
        local: LocalConfig = config.plugins.get("local") or LocalConfig()
        takes_turns = local.generation == "colocated"
        return Capabilities(
            torch_losses=True,
            aggregations=AGGREGATIONS,
            interpolated_proximal=True,
            forward_is_proximal=True,
            kl_loss=True,
            policies=frozenset({"current", "proximal", "reference"}),
            entropy_bonus=True,
            lora=True,
            full=True,
            vision=True,
            colocated=takes_turns,
            streaming=True,
            deferred_normalisation=True,
            deterministic=takes_turns and not runs_on_gpu(local),  # sums on a GPU have no fixed order
        )

    def validate_config(self) -> list[str]:
        """See `BackendProtocol.validate_config`."""
        device_of(self.local)
        policy_loss(self.config, self.plugins)
        if self.local.lora is not None and importlib.util.find_spec("peft") is None:
            raise ConfigError("[local.lora] needs peft: pip install 'rllm-local[lora]'")
        path = self.config.model.path
        if not path:
            return []
        if Path(path).is_dir():
            if not (Path(path) / "config.json").is_file():
                raise ConfigError(f"model.path = {path!r} is not a model folder: it has no config.json")
            check_adapters(path, self.local)
            return []
        if HUB_NAME.fullmatch(path):
            return [f"model.path = {path!r}: no such folder, so it is downloaded as a Hugging Face model ID"]
        raise ConfigError(
            f"model.path = {path!r}: there is no such folder, and it is not a Hugging Face model ID (owner/model)"
        )

    def memory(self, device_bytes: int | None) -> MemoryEstimate | str:
        """See `BackendProtocol.memory`."""
        return preflight.estimated_memory(self.config, self.local, device_bytes)

    def model_path(self) -> str:
        """Returns ``model.path``, or the folder of the starter model, which is created on first use."""
        return self.config.model.path or self._starter

    @cached_property
    def _starter(self) -> str:
        """Returns the workflow's starter model, or the shared one if the workflow has no conversations."""
        seed, own = self.local.starter_seed, self.warm_start
        has_own = own is not None and own(random.Random(seed)) is not None
        return str(starter_model(seed, conversations=cast("Conversations", own) if has_own else None))

    async def init_rollout_engine(self, parser: BaseParser) -> LocalEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        self._engine = await self._in_worker(self._allocate, parser)
        return self._engine

    def _allocate(self, parser: BaseParser) -> LocalEngine:
        self._settings_before = TorchSettings.current()
        path = self.model_path()
        device_bytes = preflight.device_bytes(self.local)
        model = load_model(path, self.local)
        self._batch_tokens = preflight.batch_tokens(self.config, self.local, model.config.to_dict(), *device_bytes)
        settings = settings_for(model, self.local)
        settings.apply()
        use_matching_attention(model, settings.matmul_precision)
        self._images = image_source(model, parser)
        auto_class: Any = AutoTokenizer if self._images is None else AutoProcessor
        self._tokenizer = auto_class.from_pretrained(path, trust_remote_code=self.local.trust_remote_code)
        if self.local.resolved(on_gpu=runs_on_gpu(self.local)).gradient_checkpointing == "on":
            recompute_layers(model)
        is_separated = self.local.generation == "separated"
        shares_weights = not is_separated and self.config.training.trigger_parameter_sync_step == 1
        engine = self._engine_for(model, parser, shares_weights=shares_weights)  # first: it rejects some models
        self._trainer = self._trainer_for(model)
        return engine

    def _engine_for(self, model: PreTrainedModel, parser: BaseParser | None, *, shares_weights: bool) -> LocalEngine:
        return LocalEngine(
            make_decoder(model, self.local, shares_weights=shares_weights, images=self._images),
            parser,
            self._sampling_worker,
            device=model.device,
            vocabulary_size=vocabulary_size(model),
            max_model_tokens=max_model_tokens(model),
            max_batch_rows=self.local.max_batch_rows,
            takes_media=self._images is not None,
            takes_turns=self._sampling_worker is self._worker,
            max_cache_positions=max_cache_positions(model, self.local),
        )

    async def init_reference_engine(self) -> LocalEngine:
        """See `BackendProtocol.init_reference_engine`; samples in the same thread, from a second copy."""
        engine, _ = self._reference_engine = await self._in_worker(self._allocate_reference)
        return engine

    def _allocate_reference(self) -> tuple[LocalEngine, PreTrainedModel]:
        assert self._engine is not None
        model = self._initial_model()
        return self._engine_for(model, self._engine.parser, shares_weights=True), model

    def _trainer_for(self, model: PreTrainedModel) -> LocalTrainer:
        kl = self.config.algorithm.kl
        return LocalTrainer(
            model=model,
            loss=policy_loss(self.config, self.plugins),
            aggregation=aggregation_of(self.config),
            corrections=corrections_of(self.config, self.plugins),
            kl=kl if kl.coefficient > 0 and kl.place == "loss" else None,
            temperature=self.config.rollout.temperature,
            optimizer_config=self.config.optimizer,
            share_prefixes=self.local.packing == "prefix",
            max_batch_tokens=self._batch_tokens,
            autocast_dtype=autocast_dtype(self.local),
            vision=None if self._images is None else Vision(model, self._images),
        )

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> LocalBatch:
        """See `BackendProtocol.transform_to_backend_batch`."""
        trainer = self._allocated()
        only_advantages = self._entropy_coefficient() == 0 and trainer.kl is None
        return trainer.batch(samples, skip_zero_advantages=only_advantages)

    async def process_backend_batch(self, batch: LocalBatch) -> None:
        """See `BackendProtocol.process_backend_batch`."""
        await self._in_worker(self._allocated().forward_backward, batch, self._entropy_coefficient())

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """See `BackendProtocol.update_policy`."""
        result = await self._in_worker(self._allocated().step, step)
        self.step = step.step
        return result

    def _entropy_coefficient(self) -> float:
        """Returns the entropy coefficient of the current step."""
        return self.config.algorithm.entropy_coefficient_at(self.step + 1, self.config.training.steps)

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """See `BackendProtocol.compute_logprobs`.

        Weights change only in `update_policy`, so until then the proximal policy is the current one. The reference has
        the initial weights: with LoRA, those of the model without adapters or with the initial ones; otherwise those of
        a second copy, which is loaded on first use.
        """
        return await self._in_worker(self._logprobs, samples, policy)

    def _logprobs(self, samples: Sequence[TrainingSample], policy: Policy) -> list[Floats]:
        trainer = self._allocated()
        if policy != "reference":
            return trainer.logprobs(samples)
        if self._initial_adapters:
            return self._with_adapters(self._initial_adapters, samples)
        if self.local.lora is not None:
            trainer.model.disable_adapters()
            try:
                return trainer.logprobs(samples)
            finally:
                trainer.model.enable_adapters()
        if self._reference is None:
            self._reference = self._trainer_for(self._initial_model())
        return self._reference.logprobs(samples)

    def _initial_model(self) -> PreTrainedModel:
        """Loads the model with the weights that the run started from."""
        model = load_model(self.model_path(), self.local)
        use_matching_attention(model, torch.get_float32_matmul_precision())
        if self._initial is not None:
            checkpoint.load_weights(self._initial, model, trained_parameters(model))
        return model

    def _with_adapters(self, adapters: Sequence[torch.Tensor], samples: Sequence[TrainingSample]) -> list[Floats]:
        """Computes log-probabilities with other adapters in place of the trained ones."""
        trainer = self._allocated()
        current = _copies(trainer)
        _replace(trainer, adapters)
        try:
            return trainer.logprobs(samples)
        finally:
            _replace(trainer, current)

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """See `BackendProtocol.on_policy_updated`."""
        trainer = self._allocated()
        assert self._engine is not None
        await self._in_worker(self._engine.load_weights, trainer.model, update.version)
        trainer.version, trainer.is_live = update.version, True

    async def save_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.save_checkpoint`; transformers can load the folder directly."""
        trainer = self._allocated()
        await self._in_worker(
            checkpoint.save, directory, trainer.model, trainer.optimizer, trainer.parameters, self._tokenizer
        )

    async def load_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.load_checkpoint`."""
        trainer = self._allocated()
        if not self.config.model.path:
            checkpoint.check_vocabulary(directory, self._starter)
        await self._in_worker(checkpoint.load, directory, trainer.model, trainer.optimizer, trainer.parameters)

    async def load_weights(self, directory: Path) -> None:
        """See `BackendProtocol.load_weights`."""
        await self._in_worker(self._start_from, directory)

    def _start_from(self, directory: Path) -> None:
        trainer = self._allocated()
        path, lora = self.model_path(), self.local.lora
        if not self.config.model.path:
            checkpoint.check_vocabulary(directory, path)
        checkpoint.check_adapters(directory, trainer.model, trainer.parameters, lora, path)
        checkpoint.load_weights(directory, trainer.model, trainer.parameters)
        self._initial, self._reference = directory, None
        if self._reference_engine is not None:
            engine, model = self._reference_engine
            checkpoint.load_weights(directory, model, trained_parameters(model))
            engine.load_weights(model, 0)
        if self.local.lora is not None:
            self._initial_adapters = _copies(trainer)
        elif self.config.algorithm.kl.coefficient > 0:
            # Load at once, because the other run may remove its checkpoint.
            self._reference = self._trainer_for(self._initial_model())

    def state_dict(self) -> dict[str, Any]:
        """See `BackendProtocol.state_dict`; includes whether kernels are used, which changes rounding."""
        return {"step": self.step, "kernels": fast.is_installed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BackendProtocol.load_state_dict`."""
        self.step = int(state["step"])
        if state.get("kernels", False) != fast.is_installed() and not runs_on_gpu(self.local):
            had, has = ("with", "lacks") if state.get("kernels") else ("without", "has")
            logger.warning(
                f"the run began {had} the kernels of rllm-local[fast], and this machine {has} them: from here on, its "
                "numbers differ in rounding from those of an uninterrupted run"
            )

    async def shutdown(self) -> None:
        """See `BackendProtocol.shutdown`."""
        if self._engine is not None:
            self._engine.close()
        if self._reference_engine is not None:
            self._reference_engine[0].close()
        if self._sampling_worker is not self._worker:
            # The event loop's own pool may be blocked by workflow code that never returns.
            closing = ThreadPoolExecutor(1)
            try:
                end = partial(self._sampling_worker.shutdown, wait=True, cancel_futures=True)
                await asyncio.get_running_loop().run_in_executor(closing, end)
            finally:
                closing.shutdown(wait=False)
        if self._settings_before is not None:
            await self._in_worker(self._settings_before.apply)
            self._settings_before = None
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._engine = self._reference_engine = self._trainer = self._reference = None

    def _allocated(self) -> LocalTrainer:
        if self._trainer is None:
            raise RunError("backend 'local' has not been initialized")
        return self._trainer

    async def _in_worker(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)
        except RuntimeError as error:
            if (explained := advice(error, training=True)) is not None:
                raise RunError(explained) from error
            raise


@torch.no_grad()
def _copies(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in trainer.parameters.values()]


@torch.no_grad()
def _replace(trainer: LocalTrainer, weights: Sequence[torch.Tensor]) -> None:
    for parameter, values in zip(trainer.parameters.values(), weights, strict=True):
        parameter.copy_(values)
