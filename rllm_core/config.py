"""Run file configuration: TOML that is validated completely before anything is allocated.

Precedence, lowest first: the defaults below, the workflow's own run file
(`rllm_core.providers.WorkflowProvider.run_file`), the user's file, ``--backend``/``--parser``, and
``-o section.key=value``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rllm_core.errors import ConfigError
from rllm_core.plugins.sections import WITH_SECTION
from rllm_core.run_file import (
    Section,
    apply_override,
    merged,
    model_in,
    read_toml,
    shown,
    to_toml,
    toml_key,
    unknown_key,
    validated,
)

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager, Provided
    from rllm_core.providers import BackendProvider
    from rllm_core.workflow import WorkflowConfig

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "ModelConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TeacherConfig",
    "TrainingConfig",
    "load_run_config",
    "to_toml",
]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelConfig(Section):
    """``[model]``: the model to train."""

    path: Annotated[str, Field(description="Model folder, or Hugging Face model ID.")] = ""


class TrainingConfig(Section):
    """``[training]``: the loop. An optimizer step trains ``groups_per_step`` groups of ``rollouts_per_group`` each."""

    steps: Annotated[int, Field(ge=0, description="Optimizer steps in the run.")] = 100
    seed: Annotated[int, Field(ge=0, description="Seed from which all other seeds of the run are derived.")] = 0
    groups_per_step: Annotated[
        int, Field(ge=1, description="Groups per optimizer step; a group is the rollouts of one task.")
    ] = 16
    rollouts_per_group: Annotated[int, Field(ge=1, description="Rollouts per group.")] = 8
    groups_per_forward_backward: Annotated[
        int | None,
        Field(
            ge=1,
            description="Groups per forward-backward pass; gradients accumulate over a step. Defaults to one pass per "
            "step.",
        ),
    ] = None
    staleness_threshold: Annotated[
        float,
        Field(ge=0, description="How far generation may run ahead of training, in sync windows. 0 is synchronous."),
    ] = 0.0
    trigger_parameter_sync_step: Annotated[
        int, Field(ge=1, description="Optimizer steps between two weight syncs.")
    ] = 1
    partial_rollout: Annotated[
        bool, Field(description="Sync weights while rollouts are running, instead of waiting for them to finish.")
    ] = False
    staleness: Annotated[
        Literal["quota", "strict"],
        Field(
            description="What the threshold limits: the total lead of generation (`quota`), or the staleness of every "
            "trained group (`strict`)."
        ),
    ] = "quota"
    checkpoint_every_steps: Annotated[
        int, Field(ge=0, description="Steps between checkpoints. 0 saves one only at the end.")
    ] = 0
    keep_checkpoints: Annotated[int, Field(ge=1, description="Number of latest checkpoints to keep.")] = 2
    validate_every_steps: Annotated[
        int, Field(ge=0, description="Steps between validations. 0 validates only before and after training.")
    ] = 0
    validation_rollouts: Annotated[
        int, Field(ge=0, description="Rollouts per validation, spread evenly over its tasks. 0 disables validation.")
    ] = 512
    trajectories_per_step: Annotated[
        int, Field(ge=0, description="Episodes written to trajectories.jsonl per step, and per validation.")
    ] = 8
    buffer_max_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Bytes of memory for complete groups waiting for training. Generation pauses at the limit.",
        ),
    ] = 8 * 2**30
    buffer_spill: Annotated[
        bool,
        Field(description="Write groups beyond buffer_max_bytes to the run folder instead of pausing generation."),
    ] = False
    stall_timeout_seconds: Annotated[
        Seconds, Field(description="Seconds without progress after which the run ends with StallError.")
    ] = 1800.0
    backend_timeout_seconds: Annotated[
        Seconds,
        Field(description="Timeout of each backend call (allocation, pass, optimizer step, checkpoint), in seconds."),
    ] = 3600.0
    sync_timeout_seconds: Annotated[Seconds, Field(description="Timeout of a weight sync, in seconds.")] = 600.0
    trackers: Annotated[tuple[str, ...], Field(description="Names of the trackers that receive the metrics.")] = ()

    @property
    def window_quota(self) -> int:
        """Maximum number of groups that are running, waiting or already trained in one sync window."""
        ahead = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * self.groups_per_step
        return math.floor(ahead + 1e-9)


class RolloutConfig(Section):
    """``[rollout]``: sampling, timeouts and limits of rollouts."""

    temperature: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Divisor of the logits, in sampling and in training.")
    ] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Sample from the smallest set of tokens with at least this total probability."),
    ] = 1.0
    top_k: Annotated[int, Field(ge=0, description="Sample from the k most likely tokens. 0 disables the limit.")] = 0
    validation_temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="Temperature in validation. 0 is greedy.")
    ] = 1.0
    max_response_tokens: Annotated[
        int, Field(ge=1, description="Maximum tokens per model call, including the stop token.")
    ] = 1024
    max_prompt_tokens: Annotated[
        int | None, Field(ge=1, description="Maximum tokens per prompt; a longer one ends the rollout.")
    ] = None
    on_segment_break: Annotated[
        Literal["segment", "raise"],
        Field(
            description="What to do if a prompt does not continue the earlier tokens exactly: start a new segment, or "
            "fail the rollout."
        ),
    ] = "segment"
    rollout_timeout_seconds: Annotated[Seconds, Field(description="Timeout of one rollout, in seconds.")] = 600.0
    max_attempts: Annotated[int, Field(ge=1, description="Maximum attempts per rollout; each starts from scratch.")] = 3
    request_timeout_seconds: Annotated[Seconds, Field(description="Timeout of one engine call, in seconds.")] = 600.0
    max_request_attempts: Annotated[
        int,
        Field(
            ge=1, description="Maximum attempts per call while the engine is busy or unreachable, with growing pauses."
        ),
    ] = 6
    max_consecutive_failures: Annotated[
        int, Field(ge=1, description="Consecutive failed attempts after which the run stops.")
    ] = 256
    max_failure_share: Annotated[
        float, Field(gt=0, le=1, description="Share of the last 1000 attempts that may fail before the run stops.")
    ] = 0.5
    quarantine_after_groups: Annotated[
        int, Field(ge=1, description="Consecutive failed groups of a task after which the run stops using the task.")
    ] = 2
    max_concurrent_rollouts: Annotated[int, Field(ge=1, description="Maximum concurrent rollouts.")] = 4096
    max_concurrent_requests: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum concurrent engine calls. Identical prompts sent at the same moment share one call.",
        ),
    ] = 1024
    sandbox: Annotated[
        str,
        Field(description="Sandbox for model-written code. `child` limits time and memory, but does not isolate."),
    ] = "child"


class RoleConfig(Section):
    """``[algorithm.roles.ROLE]``: the advantage estimator of one role."""

    name: Annotated[str, Field(description="Name of the role's advantage estimator.")]
    estimator_options: Annotated[dict[str, Any], Field(description="Options of that estimator.")] = Field(
        default_factory=dict
    )
    weight: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Factor applied to the role's advantages; less than 1 makes the role learn more slowly.",
        ),
    ] = 1.0


class KLConfig(Section):
    """``[algorithm.kl]``: a penalty for moving away from the reference model, which is the initial model."""

    coefficient: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="Weight of the KL penalty. 0 disables it.")
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Field(
            description="Per-token KL estimator. With x = log(reference / policy): k1 = -x, k2 = x^2/2, "
            "k3 = e^x - x - 1."
        ),
    ] = "k3"
    place: Annotated[
        Literal["loss", "reward"],
        Field(description="Add the penalty to the loss, or subtract it from token rewards before advantages."),
    ] = "loss"


class OverlongConfig(Section):
    """``[algorithm.overlong]``: a reward penalty that rises over the last tokens of the response budget."""

    penalty_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Number of tokens before max_tokens over which the penalty rises linearly. 0 disables it.",
        ),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="Response length at which the full penalty applies. Defaults to rollout.max_response_tokens.",
        ),
    ] = None
    penalty: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Full penalty, subtracted from the reward.")
    ] = 1.0


class AlgorithmConfig(Section):
    """``[algorithm]``: advantages, corrections and loss."""

    name: Annotated[str, Field(description="Name of the advantage estimator.")] = "grpo"
    estimator_options: Annotated[dict[str, Any], Field(description="Options of the advantage estimator.")] = Field(
        default_factory=dict
    )
    roles: Annotated[
        dict[str, RoleConfig], Field(description="Estimators of single roles that do not use the one above.")
    ] = Field(default_factory=dict)
    loss: Annotated[str, Field(description="Name of the policy loss; the backend must support it.")] = "reinforce"
    loss_options: Annotated[dict[str, Any], Field(description="Options of the policy loss.")] = Field(
        default_factory=dict
    )
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"],
        Field(
            description="Aggregation of token losses: the mean over all tokens of the step, or over sequences the mean "
            "of each one's mean, its sum, or its sum divided by a constant."
        ),
    ] = "token_mean"
    aggregation_norm_tokens: Annotated[
        int | None,
        Field(ge=1, description="Divisor of sequence_mean_token_sum_norm. Defaults to rollout.max_response_tokens."),
    ] = None
    proximal_policy: Annotated[
        Literal["rollout", "forward", "interpolated"],
        Field(
            description="Denominator of the loss's ratio: the policy that sampled (`rollout`; the ratio itself then "
            "corrects for staleness), the weights before the step (`forward`, one more forward pass), or an "
            "interpolation between the policy that sampled and the one in training (`interpolated`)."
        ),
    ] = "rollout"
    corrections: Annotated[
        tuple[str, ...],
        Field(description="Names of the corrections for the difference between sampling and proximal policy."),
    ] = ()
    correction_options: Annotated[
        dict[str, dict[str, Any]], Field(description="Options of the corrections: one table per correction, by name.")
    ] = Field(default_factory=dict)
    filter_uniform_groups: Annotated[
        bool, Field(description="Filter groups whose rewards are all equal. Groups without rewards are kept.")
    ] = False
    refill_filtered_groups: Annotated[
        bool,
        Field(
            description="Replace each group filtered for its rewards or termination reasons. If false, the step trains "
            "fewer groups."
        ),
    ] = True
    max_group_attempts: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum groups started for one step, in multiples of max_groups_in_flight.",
        ),
    ] = 10
    filter_termination_reasons: Annotated[
        tuple[Literal["max_turns_exceeded", "max_prompt_tokens_exceeded", "max_response_tokens_exceeded", "done"], ...],
        Field(
            description="Exclude rollouts with these termination reasons from training and from their group's baseline."
        ),
    ] = ()
    entropy_coefficient: Annotated[float, Field(ge=0, description="Weight of the entropy bonus at the first step.")] = (
        0.0
    )
    entropy_coefficient_final: Annotated[
        float | None,
        Field(ge=0, description="Weight at the last step, with a linear change. Defaults to entropy_coefficient."),
    ] = None
    kl: KLConfig = Field(default_factory=KLConfig)
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)

    def entropy_coefficient_at(self, step: int, total_steps: int) -> float:
        """Weight of the entropy bonus in optimizer step ``step`` (from 1), linear from the first step to the last."""
        first, last = self.entropy_coefficient, self.entropy_coefficient_final
        if last is None or total_steps <= 1:
            return first
        return first + (last - first) * min(1.0, (step - 1) / (total_steps - 1))


class TeacherConfig(Section):
    """``[teacher]``: the model that scores the policy's tokens, for estimators that need one (``distill``)."""

    engine: Annotated[
        str, Field(description="Name of a rollout engine that computes log-probabilities. Defaults to no teacher.")
    ] = ""
    model: Annotated[str, Field(description="Folder or Hugging Face model ID of the teacher model.")] = ""
    parser: Annotated[
        str,
        Field(
            description="Name of the parser for the teacher's prompts. By default, the teacher reads the policy's "
            "tokens if both share one vocabulary. Otherwise it reads messages, rendered by the run's parser for the "
            "teacher's model."
        ),
    ] = ""


class OptimizerConfig(Section):
    """``[optimizer]``: AdamW and its learning-rate schedule."""

    learning_rate: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="Peak learning rate, after warm-up and before decay."),
    ] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear"],
        Field(description="Schedule after warm-up: constant, or linear decay over the run."),
    ] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, description="Steps of linear warm-up from 0. 0 disables it.")] = 0
    final_learning_rate_fraction: Annotated[
        float, Field(ge=0, le=1, description="Lower limit of the linear decay, as a share of learning_rate.")
    ] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1, description="Decay rate of the first moment.")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="Decay rate of the second moment.")] = 0.95
    epsilon: Annotated[float, Field(gt=0, description="Term added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="Weight decay, decoupled from the gradient.")] = 0.0
    max_grad_norm: Annotated[
        float, Field(gt=0, description="Maximum gradient norm; larger gradients are scaled down to it.")
    ] = 1.0

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step ``step`` (from 1): linear warm-up, then constant or linear decay."""
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.schedule == "constant":
            return self.learning_rate * warm
        left = 1.0 - step / total_steps if total_steps else 0.0
        return self.learning_rate * warm * max(self.final_learning_rate_fraction, left)


class RunConfig(Section):
    """A complete run file. Plugin sections are under ``plugins``, by provider name."""

    workflow: Annotated[str, Field(description="Name of the workflow.")]
    backend: Annotated[str, Field(description="Name of the backend.")] = "local"
    parser: Annotated[str, Field(description="Name of the parser. Defaults to the backend's.")] = ""
    requires: Annotated[tuple[str, ...], Field(description='Required distributions, such as "rllm-local>=0.1".')] = ()
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    plugins: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _check_numbers(self) -> RunConfig:
        training = self.training
        passes = training.groups_per_forward_backward
        if passes is not None and training.groups_per_step % passes:
            raise ValueError(
                f"training.groups_per_forward_backward = {passes} does not divide "
                f"training.groups_per_step = {training.groups_per_step}"
            )
        chosen = self.algorithm.corrections
        unused = sorted(self.algorithm.correction_options.keys() - set(chosen))
        if unused:
            near = difflib.get_close_matches(unused[0], chosen, n=1, cutoff=0.6)
            raise ValueError(
                f"algorithm.correction_options.{unused[0]} has no correction in algorithm.corrections = "
                f"{list(chosen)}; "
                + (f"did you mean {near[0]!r}?" if near else "add the correction, or remove its options")
            )
        if training.partial_rollout and training.staleness_threshold == 0:
            raise ValueError(
                "training.partial_rollout = true needs training.staleness_threshold > 0: "
                "in synchronous training no rollout is running when weights change"
            )
        return self

    @property
    def window_quota(self) -> int:
        """See `TrainingConfig.window_quota`."""
        return self.training.window_quota

    @property
    def groups_per_pass(self) -> int:
        """Groups per gradient-accumulation pass."""
        return self.training.groups_per_forward_backward or self.training.groups_per_step

    def derived(self) -> dict[str, int]:
        """Numbers computed from the run file, by name."""
        training = self.training
        groups, rollouts = training.groups_per_step, training.rollouts_per_group
        return {
            "groups_per_step": groups,
            "rollouts_per_step": groups * rollouts,
            "forward_backward_passes_per_step": groups // self.groups_per_pass,
            "optimizer_steps": training.steps,
            "policy_versions": math.ceil(training.steps / training.trigger_parameter_sync_step),
            "rollouts_in_total": training.steps * groups * rollouts,
            "max_groups_in_flight": self.window_quota,
            "max_rollouts_in_flight": min(self.window_quota * rollouts, self.rollout.max_concurrent_rollouts),
        }

    def to_tables(self) -> dict[str, Any]:
        """Returns the resolved file as nested tables, with plugin sections and without unset keys."""
        tables = self.model_dump(mode="json", exclude_none=True)
        for name, section in self.plugins.items():
            tables[name] = section.model_dump(mode="json", exclude_none=True)
        return tables


# --------------------------------------------------------------------------------------------------------------------
# Reading


def load_run_config(
    target: str,
    plugins: PluginManager,
    *,
    overrides: Sequence[str] = (),
    backend: str | None = None,
    parser: str | None = None,
    engine: str | None = None,
) -> RunConfig:
    """Resolves ``rllm-core train TARGET`` into one validated configuration.

    Args:
        target: Path of a run file (ending in ``.toml``), or name of a workflow.
        plugins: Plugin manager that provides workflows, backends and their sections.
        overrides: ``section.key=value`` strings with TOML values; a bare word is a string.
        backend: Replacement for the file's ``backend``.
        parser: Replacement for the file's ``parser``.
        engine: Engine to use instead of the backend's (``rllm-core eval --engine``); its section is read, too.

    Raises:
        ConfigError: If the configuration is invalid; one line with the problem, the allowed values and the fix.
        PluginError: If a selected plugin is missing or broken.
    """
    from rllm_core import providers

    tables: dict[str, Any] = read_toml(Path(target)) if target.endswith(".toml") else {"workflow": target}
    given: dict[str, Any] = {key: name for key, name in (("backend", backend), ("parser", parser)) if name is not None}
    for override in overrides:
        apply_override(given, override)
    name = merged(tables, given).get("workflow")
    if name is None or name == "":
        raise ConfigError(f'{target}: workflow is not set; add workflow = "NAME" at the top of the run file')
    if not isinstance(name, str):
        raise ConfigError(f'workflow = {shown(name)}: must be the name of a workflow, such as workflow = "sort"')
    workflow = plugins.select(providers.WorkflowProvider, name)
    preset: dict[str, Any] = {}
    if workflow.record.run_file:
        preset = plugins.load(workflow, workflow.record.run_file)()
    resolved = _merged_by_choice(_merged_by_choice(preset, tables), given)

    core = [key for key in RunConfig.model_fields if key != "plugins"]
    sections = {key: resolved.pop(key) for key in list(resolved) if key not in core}
    config = validated(RunConfig, resolved, "", _core_keys())
    chosen_backend = plugins.select(providers.BackendProvider, config.backend)
    config = _with_parser(config, chosen_backend.record)
    chosen: list[tuple[str, Provided[Any]]] = [
        (config.workflow, workflow),
        (config.backend, chosen_backend),
        (config.parser, plugins.select(providers.ParserProvider, config.parser)),
    ]
    for name in filter(None, (config.teacher.engine, engine)):
        chosen.append((name, plugins.select(providers.EngineProvider, name)))
    for name in config.training.trackers:
        chosen.append((name, plugins.select(providers.TrackerProvider, name)))
    owners = _section_owners(chosen)
    for kind in WITH_SECTION:
        for key, provided in plugins.providers(kind).items():
            if key in sections and provided.record.config is not None:
                owners.setdefault(key, provided)
    checked: dict[str, Any] = {}
    for key, table in sections.items():
        owner = owners.get(key)
        if owner is None:
            if key not in given and key not in tables:
                continue  # from the workflow's own run file, which may mention providers that are not installed
            for chosen_key, provided in chosen:
                if key == chosen_key:
                    plugins.load(provided)  # raises a better error if its class has settings that its record omits
                    raise ConfigError(f"unknown key {key!r}; {provided.record.kind} {key!r} has no settings")
            raise ConfigError(unknown_key(key, [*core, *owners], _core_keys()))
        checked[key] = validated(plugins.load(owner, owner.record.config), table, toml_key(key), _core_keys())
    for key, owner in owners.items():
        if key not in checked:
            checked[key] = validated(plugins.load(owner, owner.record.config), {}, toml_key(key), _core_keys())
    return config.model_copy(update={"plugins": checked})


def _merged_by_choice(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges ``over`` into ``base``, without the options of algorithm components that ``over`` replaces."""
    before, after = base.get("algorithm"), over.get("algorithm")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        base = {**base, "algorithm": _still_chosen(before, after)}
    return merged(base, over)


def _still_chosen(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``[algorithm]``, or one of its roles, without the options of components that ``after`` replaces."""
    left = dict(before)
    for choice, options in (("name", "estimator_options"), ("loss", "loss_options")):
        if choice in after and after[choice] != before.get(choice):
            left.pop(options, None)
    chosen, tables = after.get("corrections"), before.get("correction_options")
    if isinstance(chosen, list) and isinstance(tables, Mapping):
        left["correction_options"] = {name: tables[name] for name in tables if name in chosen}
    roles, others = before.get("roles"), after.get("roles")
    if isinstance(roles, Mapping) and isinstance(others, Mapping):
        both = {role for role in roles if isinstance(roles[role], Mapping) and isinstance(others.get(role), Mapping)}
        left["roles"] = {
            role: _still_chosen(roles[role], others[role]) if role in both else roles[role] for role in roles
        }
    return left


def _with_parser(config: RunConfig, backend: BackendProvider) -> RunConfig:
    """Fills in the backend's default parser, or checks that the chosen parser works with the backend."""
    if not config.parser:
        if not backend.default_parser:
            raise ConfigError(f'backend {backend.name!r} has no default parser; set parser = "NAME"')
        return config.model_copy(update={"parser": backend.default_parser})
    if backend.parsers and config.parser.rpartition("/")[2] not in backend.parsers:
        raise ConfigError(
            f"parser = {config.parser!r} does not work with backend {backend.name!r}; choose one of "
            + ", ".join(backend.parsers)
        )
    return config


def _section_owners(chosen: Sequence[tuple[str, Provided[Any]]]) -> dict[str, Provided[Any]]:
    """Maps each section to the provider that validates it.

    Providers with the same name share one section, so they must agree on its model.
    """
    owners: dict[str, Provided[Any]] = {}
    for key, provided in chosen:
        record = provided.record
        if record.config is None:
            continue
        if key in RunConfig.model_fields:
            raise ConfigError(
                f"{record.kind} {key!r} cannot have settings: [{key}] is a section of the core; rename it"
            )
        other = owners.setdefault(key, provided).record
        if other.config != record.config:
            raise ConfigError(
                f"{other.kind} {key!r} and {record.kind} {key!r} both have a section [{key}], with different keys; "
                "they cannot be used together"
            )
    return owners


def workflow_config(config: RunConfig) -> WorkflowConfig | None:
    """Returns the workflow's own section, or None if it has none."""
    section: WorkflowConfig | None = config.plugins.get(config.workflow)
    return section


def _core_keys() -> list[str]:
    """Lists the core's keys as ``section.key``."""
    keys = []
    for section, field in RunConfig.model_fields.items():
        nested = model_in(field.annotation)
        if nested is not None:
            keys += [f"{section}.{name}" for name in nested.model_fields]
        elif not field.exclude:
            keys.append(section)
    return keys
