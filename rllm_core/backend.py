"""Contract of a training backend.

The **core** owns tasks, rollouts, grouping, filtering, advantages, the loop, checkpoint manifests and rollout
accounting. The **backend** owns the weights: it computes log-probabilities, gradients and updates, syncs new weights to
its rollout engine, and saves and loads them.

Calls within one optimizer step (``[]``: once per pass; several passes accumulate one gradient)::

    compute_logprobs?  [transform_to_backend_batch, process_backend_batch]  update_policy  on_policy_updated?

A backend that shares devices with its engine also gets ``enter_generation ... enter_training ...`` around them.

For ``rllm-core export-model``, the record of a backend names a function::

    def export(checkpoint: Path, config: RunConfig, target: Path) -> None: ...

``checkpoint`` is the folder that `BackendProtocol.save_checkpoint` filled, checked against its manifest, and ``config``
the run file. The function fills the empty folder ``target`` with the trained model and its tokenizer in the format of
transformers, or with PEFT adapters whose ``adapter_config.json`` names the base model. It raises a `UserError` if it
cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from rllm_core.events import PolicyUpdate as PolicyUpdate  # part of this contract
from rllm_core.returned_values import checked, finite_numbers, json_object
from rllm_core.types import Floats, TrainingSample

if TYPE_CHECKING:
    import random

    from rllm_core.config import RunConfig
    from rllm_core.engine import RolloutEngine
    from rllm_core.memory import MemoryEstimate
    from rllm_core.parser import BaseParser
    from rllm_core.plugins import PluginManager
    from rllm_core.workflow import Conversation

BatchT = TypeVar("BatchT")

Policy = Literal["current", "proximal", "reference"]
WarmStart = Callable[["random.Random"], "Iterator[Conversation] | None"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features that a backend supports. An unsupported setting is rejected before anything is allocated, never ignored.

    Attributes:
        losses: Names of the backend's own policy losses (``algorithm.loss``).
        torch_losses: Whether it also runs every loss of the hook ``policy_losses``, built-in or from a plugin.
        aggregations: Names of the loss aggregations (``algorithm.aggregation``).
        policies: Policies whose log-probabilities it can compute.
        interpolated_proximal: Whether it takes ``TrainingSample.proximal_fractions`` and applies corrections itself.
        forward_is_proximal: Whether weights change only in `BackendProtocol.update_policy`, once per step. Then the
            forward pass of training yields the log-probabilities of the proximal policy, and no extra pass is needed.
            The backend then takes ``TrainingSample.proximal_fractions`` of 1.
        kl_loss: Whether it adds the divergence from ``TrainingSample.reference_logprobs`` to its loss.
        per_token_advantages: Whether advantages may differ within a turn.
        token_in_token_out: Whether its engine takes and returns token ids.
        entropy_bonus: Whether ``algorithm.entropy_coefficient`` may be positive.
        lora: Whether it can train adapters.
        full: Whether it can train all weights.
        vision: Whether prompts may contain images.
        colocated: Whether engine and trainer share devices, so that generation and training take turns.
        streaming: Whether gradients accumulate over several `process_backend_batch` calls per step.
        deferred_normalisation: Whether it can divide the accumulated gradient by counts known only at the end.
        deterministic: Whether the same seed gives the same numbers on one machine.
    """

    losses: frozenset[str] = frozenset()
    torch_losses: bool = False
    aggregations: frozenset[str] = frozenset({"token_mean"})
    policies: frozenset[Policy] = frozenset({"current"})
    interpolated_proximal: bool = False
    forward_is_proximal: bool = False
    kl_loss: bool = False
    per_token_advantages: bool = True
    token_in_token_out: bool = True
    entropy_bonus: bool = False
    lora: bool = False
    full: bool = True
    vision: bool = False
    colocated: bool = False
    streaming: bool = True
    deferred_normalisation: bool = False
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step, with the global counts that normalize its loss.

    Attributes:
        step: Number of this step, from 1.
        total_steps: Steps planned in the run, for schedules.
        samples: Training samples in the step, over all passes.
        sampled_tokens: Tokens in these samples that the policy sampled, over all passes.
        trajectories: Trajectories the samples come from.
    """

    step: int
    total_steps: int
    samples: int
    sampled_tokens: int
    trajectories: int


@dataclass(frozen=True, kw_only=True)
class TokenMeasures:
    """Per-token values of a sample from the forward pass of training; None for values that the pass does not compute.

    Attributes:
        logprobs: ``(sampled_tokens,)`` log-probabilities under the weights before the step.
        entropies: ``(sampled_tokens,)`` entropies of the distributions under these weights, in nats.
    """

    logprobs: Floats | None = None
    entropies: Floats | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Result of an optimizer step.

    Attributes:
        metrics: Metrics by name, e.g. ``grad_norm``, ``entropy``, ``learning_rate``.
        tokens: Per-token values by ``sample_id``, for the run to record. Report only values that were computed anyway;
            leave out samples without a forward pass. Empty if the backend gets no per-token values.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    tokens: Mapping[str, TokenMeasures] = field(default_factory=dict)


class BackendProtocol(ABC, Generic[BatchT]):
    """Trains the policy.

    Constructing a backend allocates nothing; `init_rollout_engine` does. The core makes one call at a time, from one
    task. Only `RolloutEngine` calls may run concurrently with them, and only if ``colocated`` is False.

    Args:
        config: The complete run file, validated.
        plugins: Plugins of this run, for providers that the backend selects itself, such as policy losses.

    Attributes:
        warm_start: `rllm_core.workflow.Workflow.warm_start` of the run's workflow, for a backend that makes a model
            from scratch. The core sets it after construction.
    """

    name: ClassVar[str]
    warm_start: WarmStart | None = None

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        self.config = config
        self.plugins = plugins

    @classmethod
    @abstractmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """What this backend supports with this configuration. Needs no device and no network."""

    @abstractmethod
    def validate_config(self) -> list[str]:
        """Checks everything that needs neither network nor devices.

        Returns:
            One line for each thing that could not be checked this way, for ``--dry-run``.

        Raises:
            rllm_core.config.ConfigError: In one line: the error and the allowed values.
        """

    def memory(self, device_bytes: int | None) -> MemoryEstimate | str:
        """Memory that the run will need, by arithmetic, for ``--dry-run``. Needs no network and allocates nothing.

        Called after `validate_config`. `rllm_core.memory.transformer` has formulas.

        Args:
            device_bytes: Memory of each device, if the user named it; None to ask the devices of this machine.

        Returns:
            The memory per device and phase; or one line that says why it cannot be computed, for example because the
            model is not on this machine.
        """
        return f"memory: backend {self.name!r} does not compute it"

    def model_path(self) -> str:
        """Folder or Hugging Face ID of the model to build the parser for. Defaults to ``model.path``."""
        return self.config.model.path

    @abstractmethod
    async def init_rollout_engine(self, parser: BaseParser) -> RolloutEngine:
        """Allocates everything (models, optimizer, servers) and returns the engine, which does not sample yet."""

    async def init_reference_engine(self) -> RolloutEngine:
        """Allocates a second engine that keeps sampling from the weights the run started from.

        Its ``weight_version`` is 0, and it has the parser of the first engine. `load_weights` changes its weights, too.
        Called after `init_rollout_engine`, also after a checkpoint was loaded; `shutdown` releases it. Without this
        method, a group scorer cannot sample from version 0 of the policy.
        """
        raise NotImplementedError(f"backend {self.name!r} keeps only its current weights for sampling")

    @abstractmethod
    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> BatchT:
        """Converts samples to the backend's own batch layout. Pure, and fast enough for a worker thread."""

    @abstractmethod
    async def process_backend_batch(self, batch: BatchT) -> None:
        """Runs one forward-backward pass of the current step.

        May return before the work is done; errors then surface in `update_policy`.
        """

    @abstractmethod
    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """Waits for all passes, normalizes by the counts in ``step``, and steps the optimizer.

        The step's groups count as trained when this call returns, so return only after the weights have changed.
        """

    @abstractmethod
    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """Makes the engine sample from the current weights, and sets its ``weight_version``.

        Called for every weight version and reason, before the hook of the same name. A failure stops the run.
        """

    @abstractmethod
    async def save_checkpoint(self, directory: Path) -> None:
        """Writes weights and optimizer state into an existing, empty directory, without pickle."""

    @abstractmethod
    async def load_checkpoint(self, directory: Path) -> None:
        """Loads what `save_checkpoint` wrote. The files have passed the manifest's checksums."""

    async def load_weights(self, directory: Path) -> None:
        """Loads only the weights that `save_checkpoint` of another run wrote (``training.init_from``).

        Optimizer, counters and `state_dict` stay as in a new run. The weights also become the ``reference`` policy of
        this run, and the weights of its reference engine. Called before the first weight sync, and before
        `load_checkpoint` of a resumed run that needs that policy or engine. The files have passed the manifest's
        checksums, and the other run had the same backend and ``model.path``. A backend without this method does not
        support ``training.init_from``.

        Raises:
            rllm_core.config.ConfigError: If the weights do not fit this run, for example another LoRA rank; names both.
        """
        raise NotImplementedError(f"backend {self.name!r} cannot start from another run's weights")

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """Log-probabilities of the sampled tokens. Called before advantages are known.

        Args:
            samples: Training samples. Their advantages may still be zero.
            policy: ``current`` weights, ``proximal`` (frozen at the start of the step) or the ``reference`` model.

        Returns:
            One array of shape ``(sampled_tokens,)`` per sample.
        """
        raise NotImplementedError(f"backend {self.name!r} does not compute log-probabilities")

    async def enter_generation(self) -> None:
        """Hands the devices to the engine (colocated backends)."""

    async def enter_training(self) -> None:
        """Takes the devices back (colocated backends). No request is in flight."""

    async def shutdown(self) -> None:
        """Releases everything. May be called after errors, before anything was allocated, and twice."""

    def state_dict(self) -> dict[str, Any]:
        """Small JSON state for the manifest, such as counters and names of remote checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`; called before `load_checkpoint`."""


def checked_update(backend: BackendProtocol[Any], returned: object) -> UpdateResult:
    """Checks the return value of `BackendProtocol.update_policy`, and returns it with its metrics as floats.

    Raises:
        RunError: If it is not an `UpdateResult`, or has a metric that is not a finite number.
    """
    return checked(f"backend {backend.name!r}", _finite_update, returned)


def _finite_update(returned: object) -> UpdateResult:
    if not isinstance(returned, UpdateResult) or not isinstance(returned.tokens, Mapping):
        raise ValueError(f"update_policy() returned {returned!r:.80}; return an UpdateResult")
    return replace(returned, metrics=finite_numbers(returned.metrics, "update_policy()"))


def checked_state(backend: BackendProtocol[Any], returned: object) -> dict[str, Any]:
    """Checks the return value of `BackendProtocol.state_dict`, and returns it.

    Raises:
        RunError: If a checkpoint would not restore it unchanged.
    """
    return checked(f"backend {backend.name!r}", json_object, returned, "state_dict()")
