"""The contract of a training backend.

Who owns what:

* the **core** owns tasks, rollouts, grouping, filtering, advantages, the loop, checkpoints' manifests and the books;
* the **backend** owns the weights: it computes log-probabilities, gradients and updates, pushes new weights to its
  rollout engine, and saves and loads them.

Order within one optimizer step (``[]`` = once per pass; several passes accumulate one gradient)::

    compute_logprobs?  [transform_to_backend_batch, process_backend_batch]  update_policy  on_policy_updated?

and around it, for a backend that shares devices with its engine: ``enter_generation ... enter_training ...``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from rllm_core.types import Floats, TrainingSample

if TYPE_CHECKING:
    from rllm_core.config import RunConfig
    from rllm_core.engine import RolloutEngine
    from rllm_core.parser import BaseParser
    from rllm_core.plugins import PluginManager

BatchT = TypeVar("BatchT")

Policy = Literal["current", "proximal", "reference"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do. A setting outside it is an error before anything is allocated, never ignored.

    Attributes:
        losses: Policy losses by name (``algorithm.loss``) that are the backend's own.
        torch_losses: Whether it also runs every loss of the hook ``policy_losses``, the core's and any plugin's.
        aggregations: Loss aggregations by name (``algorithm.aggregation``).
        policies: Policies it can compute log-probabilities of.
        interpolated_proximal: Whether it takes ``TrainingSample.proximal_fractions`` and applies corrections itself.
        forward_is_proximal: Whether weights change in `BackendProtocol.update_policy` only, once per step, so that the
            forward pass of training computes the log-probabilities of the proximal policy and no pass more is needed.
            It takes ``TrainingSample.proximal_fractions`` of 1 then.
        kl_loss: Whether it adds the divergence from ``TrainingSample.reference_logprobs`` to its loss.
        per_token_advantages: Whether advantages may differ within a turn.
        token_in_token_out: Whether its engine takes and returns token ids.
        entropy_bonus: Whether ``algorithm.entropy_coefficient`` may be positive.
        lora: Whether it can train adapters.
        full: Whether it can train all weights.
        vision: Whether prompts may hold images.
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


@dataclass(frozen=True)
class PolicyUpdate:
    """New weights are to go live.

    Attributes:
        version: Increases by one per update; 0 for the weights a fresh run begins with.
        optimizer_step: Optimizer steps these weights have seen.
        reason: ``start`` of a run, after a training ``step``, or ``resume`` from a checkpoint.
    """

    version: int
    optimizer_step: int
    reason: Literal["start", "step", "resume"]


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step, with the global counts its loss is normalised by.

    Attributes:
        step: Number of this step, from 1.
        total_steps: Steps planned in the run, for schedules.
        samples: Training samples in the step, over all passes.
        sampled_tokens: Tokens the policy sampled in them, over all passes.
        trajectories: Trajectories they come from.
    """

    step: int
    total_steps: int
    samples: int
    sampled_tokens: int
    trajectories: int


@dataclass(frozen=True)
class UpdateResult:
    """What an optimizer step reported: numbers by name, e.g. ``grad_norm``, ``entropy``, ``learning_rate``."""

    metrics: dict[str, float] = field(default_factory=dict)


class BackendProtocol(ABC, Generic[BatchT]):
    """Trains the policy.

    Constructing a backend allocates nothing; `init_rollout_engine` does. Calls come one at a time from one task,
    except that `RolloutEngine` calls may run at the same time where ``colocated`` is False.

    Args:
        config: The whole run file, validated.
        plugins: The plugins of this run, for what the backend selects by name itself, such as policy losses.
    """

    name: ClassVar[str]

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        self.config = config
        self.plugins = plugins

    @classmethod
    @abstractmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """What this backend can do under this configuration; needs no device and no network."""

    @abstractmethod
    def validate_config(self) -> list[str]:
        """Check everything that needs neither network nor devices.

        Returns:
            What could not be checked that way, one line each, for ``--dry-run``.

        Raises:
            rllm_core.config.ConfigError: With one line that says what is wrong and what is allowed.
        """

    def model_path(self) -> str:
        """Folder or hub name of the model, for which the core builds the parser; by default ``model.path``."""
        return self.config.model.path

    @abstractmethod
    async def init_rollout_engine(self, parser: BaseParser) -> RolloutEngine:
        """Allocate everything (models, optimizer, servers) and return the engine, which samples nothing yet."""

    @abstractmethod
    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> BatchT:
        """Lay samples out as the backend wants them; pure, and fast enough for the event loop's worker thread."""

    @abstractmethod
    async def process_backend_batch(self, batch: BatchT) -> None:
        """Forward and backward one pass of the current step.

        May return before the work is done; then errors surface in `update_policy`.
        """

    @abstractmethod
    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """Wait for all passes, normalise by the counts in ``step``, step the optimizer.

        Only the return of this call books the step's groups as trained.
        """

    @abstractmethod
    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """Make the current weights the ones the engine samples from, and set its ``weight_version``.

        Called for every version and reason, before the hook of the same name. A failure stops the run.
        """

    @abstractmethod
    async def save_checkpoint(self, directory: Path) -> None:
        """Write weights and optimizer state into an existing, empty directory; no pickle."""

    @abstractmethod
    async def load_checkpoint(self, directory: Path) -> None:
        """Read what `save_checkpoint` wrote; its files match the manifest's checksums."""

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """Log-probabilities of the samples' sampled tokens, before advantages.

        Args:
            samples: Their advantages may still be zero.
            policy: ``current`` weights, ``proximal`` (frozen at the start of the step) or the ``reference`` model.

        Returns:
            Per sample an array of shape ``(sampled_tokens,)``.
        """
        raise NotImplementedError(f"backend {self.name!r} does not compute log-probabilities")

    async def enter_generation(self) -> None:
        """Colocated backends: hand the devices to the engine."""

    async def enter_training(self) -> None:
        """Colocated backends: take the devices back. No request is in flight."""

    async def shutdown(self) -> None:
        """Release everything; also called after errors, before anything was allocated, and perhaps a second time."""

    def state_dict(self) -> dict[str, Any]:
        """Small JSON state to keep in the manifest (names of remote checkpoints, counters)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, before `load_checkpoint`."""
