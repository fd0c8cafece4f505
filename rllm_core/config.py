"""The run file: TOML, checked as a whole before anything is allocated.

Precedence, weakest first: the defaults below, the workflow's own run file (`rllm_core.providers.Workflow.run_file`),
the user's file, ``--backend``/``--parser``, ``-o section.key=value``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rllm_core.errors import ConfigError
from rllm_core.run_file import (
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
from rllm_core.sections import WITH_SECTION

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager, Provided
    from rllm_core.providers import Backend
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


class Section(BaseModel):
    """Base of every section, a plugin's included: frozen, and unknown keys are errors that suggest the nearest."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """``[model]``: what is trained."""

    path: Annotated[str, Field(description="Folder of a Hugging Face model, or its hub name.")] = ""


class TrainingConfig(Section):
    """``[training]``: the loop. One optimizer step trains ``groups_per_step`` groups of ``rollouts_per_group``."""

    steps: Annotated[int, Field(ge=0, description="Optimizer steps of the whole run.")] = 100
    seed: Annotated[int, Field(ge=0, description="Root of every seed in the run.")] = 0
    groups_per_step: Annotated[int, Field(ge=1, description="Tasks trained per optimizer step.")] = 16
    rollouts_per_group: Annotated[int, Field(ge=1, description="Rollouts of each task.")] = 8
    groups_per_forward_backward: Annotated[
        int | None, Field(ge=1, description="Groups per gradient-accumulation pass; unset is one pass per step.")
    ] = None
    staleness_threshold: Annotated[
        float, Field(ge=0, description="How many sync windows generation may run ahead; 0 is synchronous.")
    ] = 0.0
    trigger_parameter_sync_step: Annotated[
        int, Field(ge=1, description="Optimizer steps between two weight synchronisations.")
    ] = 1
    partial_rollout: Annotated[
        bool, Field(description="Swap weights under running rollouts instead of draining them first.")
    ] = False
    staleness: Annotated[
        Literal["quota", "strict"], Field(description="Bound the aggregate lead, or the age of every trained group.")
    ] = "quota"
    checkpoint_every_steps: Annotated[
        int, Field(ge=0, description="Steps between checkpoints; 0 is only at the end.")
    ] = 0
    keep_checkpoints: Annotated[int, Field(ge=1, description="How many of the newest checkpoints to keep.")] = 2
    validate_every_steps: Annotated[
        int, Field(ge=0, description="Steps between validations; 0 is only first and last.")
    ] = 0
    validation_rollouts: Annotated[
        int, Field(ge=0, description="Rollouts per validation, spread evenly over its tasks; 0 is no validation.")
    ] = 512
    trajectories_per_step: Annotated[
        int, Field(ge=0, description="Episodes per step (and per validation) kept in trajectories.jsonl.")
    ] = 8
    buffer_max_bytes: Annotated[
        int, Field(ge=1, description="Memory for complete groups that wait to be trained; more holds generation up.")
    ] = 8 * 2**30
    buffer_spill: Annotated[
        bool, Field(description="Write complete groups beyond that to the run folder instead of holding generation up.")
    ] = False
    stall_timeout_seconds: Annotated[
        Seconds, Field(description="End the run with StallError when nothing happened for this long.")
    ] = 1800.0
    backend_timeout_seconds: Annotated[
        Seconds, Field(description="Deadline of every call of the backend: allocation, a pass, a step, a checkpoint.")
    ] = 3600.0
    sync_timeout_seconds: Annotated[Seconds, Field(description="Deadline of a weight synchronisation.")] = 600.0
    trackers: Annotated[tuple[str, ...], Field(description="Metric trackers to feed, by name.")] = ()

    @property
    def window_quota(self) -> int:
        """Groups that may be outstanding or consumed between two weight synchronisations."""
        ahead = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * self.groups_per_step
        return math.floor(ahead + 1e-9)


class RolloutConfig(Section):
    """``[rollout]``: how episodes are sampled."""

    temperature: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Logits are divided by it, sampling and training alike.")
    ] = 1.0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="Sample from the fewest tokens with at least this probability.")
    ] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 keeps every token.")] = 0
    validation_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False, description="0 is greedy.")] = 1.0
    max_response_tokens: Annotated[int, Field(ge=1, description="Per model call, stop token included.")] = 1024
    max_prompt_tokens: Annotated[int | None, Field(ge=1, description="Longer prompts end the rollout.")] = None
    on_segment_break: Annotated[
        Literal["segment", "raise"],
        Field(
            description="What a conversation that cannot go on token for token does: open a new segment, or end the "
            "rollout with an error."
        ),
    ] = "segment"
    rollout_timeout_seconds: Annotated[Seconds, Field(description="Deadline of one rollout.")] = 600.0
    max_attempts: Annotated[int, Field(ge=1, description="Tries per rollout when it fails, each from scratch.")] = 3
    request_timeout_seconds: Annotated[Seconds, Field(description="Deadline of one call of the engine.")] = 600.0
    max_request_attempts: Annotated[
        int,
        Field(ge=1, description="Tries per call while the engine is busy or does not answer, with growing pauses."),
    ] = 6
    max_consecutive_failures: Annotated[
        int, Field(ge=1, description="Failed attempts in a row after which the run ends: an outage, not an accident.")
    ] = 256
    max_failure_share: Annotated[
        float, Field(gt=0, le=1, description="Share of the last 1000 attempts that may fail before the run ends.")
    ] = 0.5
    quarantine_after_groups: Annotated[
        int, Field(ge=1, description="Groups a task may lose to failures in a row before the run goes on without it.")
    ] = 2
    max_concurrent_rollouts: Annotated[int, Field(ge=1, description="Rollouts that run at a time.")] = 4096
    max_concurrent_requests: Annotated[
        int, Field(ge=1, description="Calls in the engine at a time; equal prompts of one tick are one call.")
    ] = 1024
    sandbox: Annotated[
        str,
        Field(description="Where programs run that the model wrote; `child` has limits, and isolates nothing."),
    ] = "child"


class RoleConfig(Section):
    """``[algorithm.roles.ROLE]``: how the trajectories of one role are credited."""

    name: Annotated[str, Field(description="Advantage estimator of this role.")]
    estimator_options: Annotated[dict[str, Any], Field(description="Parameters of that estimator.")] = Field(
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
    """``[algorithm.kl]``: keep the policy near the reference model, the one the run begins with."""

    coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Its weight; 0 is none.")] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Field(description="With x = log of reference over policy, per token: k1 = -x, k2 = x^2/2, k3 = e^x - x - 1."),
    ] = "k3"
    place: Annotated[
        Literal["loss", "reward"],
        Field(description="Add it to the loss, or take it off the rewards of tokens before advantages."),
    ] = "loss"


class OverlongConfig(Section):
    """``[algorithm.overlong]``: a penalty that grows over the last tokens of the response budget."""

    penalty_tokens: Annotated[int, Field(ge=0, description="Over how many tokens it grows; 0 is no penalty.")] = 0
    max_tokens: Annotated[
        int | None, Field(ge=1, description="Length at which it is whole; unset is rollout.max_response_tokens.")
    ] = None
    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False, description="The whole of it, off the reward.")] = 1.0


class AlgorithmConfig(Section):
    """``[algorithm]``: advantages, corrections and loss."""

    name: Annotated[str, Field(description="Advantage estimator.")] = "grpo"
    estimator_options: Annotated[dict[str, Any], Field(description="Parameters of the estimator.")] = Field(
        default_factory=dict
    )
    roles: Annotated[
        dict[str, RoleConfig], Field(description="Estimators of single roles, where they are not the one above.")
    ] = Field(default_factory=dict)
    loss: Annotated[str, Field(description="Policy loss; the backend must be able to run it.")] = "reinforce"
    loss_options: Annotated[dict[str, Any], Field(description="Parameters of the policy loss.")] = Field(
        default_factory=dict
    )
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"],
        Field(
            description="How token losses become one number: the mean over all tokens of the step, or over its "
            "sequences of each one's mean, its sum, or its sum over a constant."
        ),
    ] = "token_mean"
    aggregation_norm_tokens: Annotated[
        int | None,
        Field(ge=1, description="The constant of sequence_mean_token_sum_norm; unset is rollout.max_response_tokens."),
    ] = None
    proximal_policy: Annotated[
        Literal["rollout", "forward", "interpolated"],
        Field(
            description="Where the loss's ratio begins: at the policy that sampled (the ratio itself corrects for "
            "staleness), at the weights before the step by a forward pass, or at an interpolation between the policy "
            "that sampled and the one in training."
        ),
    ] = "rollout"
    corrections: Annotated[
        tuple[str, ...],
        Field(description="Off-policy corrections from the policy that sampled to the proximal one, by name."),
    ] = ()
    correction_options: Annotated[
        dict[str, dict[str, Any]], Field(description="Parameters of the corrections, a table for each by name.")
    ] = Field(default_factory=dict)
    filter_uniform_groups: Annotated[
        bool, Field(description="Drop groups whose rewards are all equal; groups without rewards stay.")
    ] = False
    refill_filtered_groups: Annotated[
        bool,
        Field(
            description="Generate another group for each one dropped for its rewards or its reasons to end; otherwise "
            "the step has so many fewer."
        ),
    ] = True
    max_group_attempts: Annotated[
        int,
        Field(
            ge=1, description="Groups dispatched for one step before giving up, in multiples of max_groups_in_flight."
        ),
    ] = 10
    filter_termination_reasons: Annotated[
        tuple[Literal["max_turns_exceeded", "max_prompt_tokens_exceeded", "max_response_tokens_exceeded", "done"], ...],
        Field(description="Rollouts that ended so are not trained, nor compared with the others of their group."),
    ] = ()
    entropy_coefficient: Annotated[float, Field(ge=0, description="Entropy bonus at the first step.")] = 0.0
    entropy_coefficient_final: Annotated[
        float | None, Field(ge=0, description="Entropy bonus at the last step, linear between; unset is constant.")
    ] = None
    kl: KLConfig = Field(default_factory=KLConfig)
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)

    def entropy_coefficient_at(self, step: int, total_steps: int) -> float:
        """The entropy bonus of optimizer step ``step`` (from 1): linear from the first step to the last."""
        first, last = self.entropy_coefficient, self.entropy_coefficient_final
        if last is None or total_steps <= 1:
            return first
        return first + (last - first) * min(1.0, (step - 1) / (total_steps - 1))


class TeacherConfig(Section):
    """``[teacher]``: who scores what the policy samples, for estimators that need it (``distill``)."""

    engine: Annotated[
        str, Field(description="Name of a rollout engine that computes log-probabilities; unset is no teacher.")
    ] = ""
    model: Annotated[str, Field(description="Folder of the teacher's model, or its hub name.")] = ""
    parser: Annotated[
        str,
        Field(
            description="Name of the parser that writes its prompts. Unset, it reads the policy's tokens where both "
            "have one vocabulary, and otherwise messages, through the run's parser for its own model."
        ),
    ] = ""


class OptimizerConfig(Section):
    """``[optimizer]``: AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="Of the longest steps.")] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear"], Field(description="After the warm-up: stay, or decay linearly over the run.")
    ] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, description="Steps over which the rate rises linearly from 0.")] = 0
    final_learning_rate_fraction: Annotated[
        float, Field(ge=0, le=1, description="A linear schedule does not fall below this share of learning_rate.")
    ] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1, description="Decay of the first moment.")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="Decay of the second moment.")] = 0.95
    epsilon: Annotated[float, Field(gt=0, description="Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled from the gradient, as in AdamW.")] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, description="Gradients are scaled down to this norm.")] = 1.0

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of optimizer step ``step`` (from 1): linear warm-up, then constant or linear decay."""
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.schedule == "constant":
            return self.learning_rate * warm
        left = 1.0 - step / total_steps if total_steps else 0.0
        return self.learning_rate * warm * max(self.final_learning_rate_fraction, left)


class RunConfig(Section):
    """A whole run file. Sections of plugins are under ``plugins``, by provider name."""

    workflow: Annotated[str, Field(description="Name of the workflow.")]
    backend: Annotated[str, Field(description="Name of the backend.")] = "local"
    parser: Annotated[str, Field(description="Name of the parser; unset is the backend's default.")] = ""
    requires: Annotated[tuple[str, ...], Field(description='Distributions the run needs, e.g. "rllm-local>=0.1".')] = ()
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
                f"algorithm.correction_options.{unused[0]} belongs to no correction of algorithm.corrections = "
                f"{list(chosen)}; "
                + (f"did you mean {near[0]!r}?" if near else "add it there, or take its options out")
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
        """Numbers that follow from the file, by name."""
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
        """The resolved file as nested tables, plugin sections included; unset keys are left out."""
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
    """Resolve ``rllm-core train TARGET`` into one checked configuration.

    Args:
        target: The path of a run file (it ends in ``.toml``), or the name of a workflow.
        plugins: Where workflows, backends and their sections come from.
        overrides: ``section.key=value`` strings, the value in TOML (a bare word is text).
        backend: Replaces the file's ``backend``.
        parser: Replaces the file's ``parser``.
        engine: Engine that is used instead of the backend's (``rllm-core eval --engine``); it has a section, too.

    Raises:
        ConfigError: If anything is wrong; one line that says what, what is allowed and what to do.
        PluginError: If a selected plugin is missing or broken.
    """
    from rllm_core import providers

    tables: dict[str, Any] = read_toml(Path(target)) if target.endswith(".toml") else {"workflow": target}
    given: dict[str, Any] = {key: name for key, name in (("backend", backend), ("parser", parser)) if name is not None}
    for override in overrides:
        apply_override(given, override)
    name = merged(tables, given).get("workflow")
    if name is None or name == "":
        raise ConfigError(f'{target}: the run file names no workflow; add workflow = "NAME" at its top')
    if not isinstance(name, str):
        raise ConfigError(f'workflow = {shown(name)}: must be the name of a workflow, workflow = "NAME"')
    workflow = plugins.select(providers.Workflow, name)
    preset: dict[str, Any] = {}
    if workflow.record.run_file:
        preset = plugins.load(workflow, workflow.record.run_file)()
    resolved = _merged_by_choice(_merged_by_choice(preset, tables), given)

    core = [key for key in RunConfig.model_fields if key != "plugins"]
    sections = {key: resolved.pop(key) for key in list(resolved) if key not in core}
    config = validated(RunConfig, resolved, "", _core_keys())
    chosen_backend = plugins.select(providers.Backend, config.backend)
    config = _with_parser(config, chosen_backend.record)
    chosen: list[tuple[str, Provided[Any]]] = [
        (config.workflow, workflow),
        (config.backend, chosen_backend),
        (config.parser, plugins.select(providers.Parser, config.parser)),
    ]
    for name in filter(None, (config.teacher.engine, engine)):
        chosen.append((name, plugins.select(providers.Engine, name)))
    for name in config.training.trackers:
        chosen.append((name, plugins.select(providers.Tracker, name)))
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
                continue  # the workflow's own run file knows providers that are not installed here
            for chosen_key, provided in chosen:
                if key == chosen_key:
                    plugins.load(provided)  # if its class has settings, its record is to blame
                    raise ConfigError(f"unknown key {key!r}; {provided.record.kind} {key!r} has no settings")
            raise ConfigError(unknown_key(key, [*core, *owners], _core_keys()))
        checked[key] = validated(plugins.load(owner, owner.record.config), table, toml_key(key), _core_keys())
    for key, owner in owners.items():
        if key not in checked:
            checked[key] = validated(plugins.load(owner, owner.record.config), {}, toml_key(key), _core_keys())
    return config.model_copy(update={"plugins": checked})


def _merged_by_choice(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says; parameters of a piece of the algorithm go where another one is chosen."""
    before, after = base.get("algorithm"), over.get("algorithm")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        base = {**base, "algorithm": _still_chosen(before, after)}
    return merged(base, over)


def _still_chosen(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """``[algorithm]``, or one of its roles, without the parameters of what ``after`` replaces."""
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


def _with_parser(config: RunConfig, backend: Backend) -> RunConfig:
    """The run with its backend's default parser, or its own one after a check that they go together."""
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
    """Who checks which section. Chosen providers of one name share one section, so they must agree on its model."""
    owners: dict[str, Provided[Any]] = {}
    for key, provided in chosen:
        record = provided.record
        if record.config is None:
            continue
        if key in RunConfig.model_fields:
            raise ConfigError(f"{record.kind} {key!r} cannot have settings: [{key}] is a section of the core")
        other = owners.setdefault(key, provided).record
        if other.config != record.config:
            raise ConfigError(
                f"{other.kind} {key!r} and {record.kind} {key!r} both have a section [{key}], with different keys; "
                "they cannot be used together"
            )
    return owners


def workflow_config(config: RunConfig) -> WorkflowConfig | None:
    """The workflow's own section, or None if it has none."""
    section: WorkflowConfig | None = config.plugins.get(config.workflow)
    return section


def _core_keys() -> list[str]:
    """Every key of the core as it is written, ``section.key``."""
    keys = []
    for section, field in RunConfig.model_fields.items():
        nested = model_in(field.annotation)
        if nested is not None:
            keys += [f"{section}.{name}" for name in nested.model_fields]
        elif not field.exclude:
            keys.append(section)
    return keys
