"""Checks that settings fit supervised training and distillation; rejects unsuitable settings early."""

from __future__ import annotations

from rllm_core import providers
from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.assembly.algorithm import Algorithm
from rllm_core.assembly.resolution import Resolved
from rllm_core.assembly.teacher import check_teacher
from rllm_core.backend import Capabilities
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.workflow import Workflow


def check_imitation(resolved: Resolved, capabilities: Capabilities, chosen: Algorithm, workflow: Workflow) -> None:
    """Rejects settings that have no meaning, or a different one, in training without rewards or sampling.

    Raises:
        ConfigError: For the first such setting.
    """
    config = resolved.config
    _check_workflow(config, chosen, workflow)
    _check_rewards(config, chosen)
    if chosen.estimators.learns_written:
        _check_written(config, capabilities, chosen, resolved.plugins)
    _check_teacher(resolved, capabilities, chosen)


def _named(config: RunConfig, chosen: Algorithm) -> list[tuple[str, AdvantageEstimator]]:
    return list(zip(config.algorithm.estimator_names().values(), chosen.estimators.all, strict=True))


def _check_rewards(config: RunConfig, chosen: Algorithm) -> None:
    """Rejects reward settings that would have no effect, or that do not apply to rollouts without rewards or sampling.

    The filter of uniform groups uses the workflow's rewards even if no estimator does.
    """
    algorithm = config.algorithm
    kl_in_reward = algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward"
    nobody_uses_them = not any(estimator.needs_rewards for estimator in chosen.estimators.all)
    for name, is_set, is_for_estimators in (
        ("algorithm.filter_uniform_groups must be false", algorithm.filter_uniform_groups, False),
        ("algorithm.kl.place must be 'loss'", kl_in_reward, True),
        ("algorithm.overlong.penalty_tokens must be 0", algorithm.overlong.penalty_tokens > 0, True),
    ):
        changes_nothing = is_for_estimators and nobody_uses_them
        for estimator_name, estimator in _named(config, chosen):
            has_none = estimator.learns_written or estimator.needs_teacher
            if is_set and not estimator.needs_rewards and (has_none or changes_nothing):
                raise ConfigError(f"{name}: estimator {estimator_name!r} uses no rewards")


def _check_workflow(config: RunConfig, chosen: Algorithm, workflow: Workflow) -> None:
    if workflow.samples:
        if chosen.estimators.default.learns_written:
            raise ConfigError(
                f"algorithm.name = {config.algorithm.name!r} learns from example conversations, but workflow "
                f"{config.workflow!r} samples from the model; set workflow = 'sft' (and its data in [sft]), or choose "
                "another estimator"
            )
        return
    if not chosen.estimators.learns_written:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.name!r} learns from completions of the model, but workflow "
            f"{config.workflow!r} samples none; remove [algorithm], or set algorithm.name = 'sft'"
        )
    if config.training.rollouts_per_group > 1:
        raise ConfigError(
            f"training.rollouts_per_group must be 1: all rollouts of a task of workflow {config.workflow!r} are equal; "
            "for larger batches, raise training.groups_per_step"
        )


def _check_written(config: RunConfig, capabilities: Capabilities, chosen: Algorithm, plugins: PluginManager) -> None:
    algorithm = config.algorithm
    losses = plugins.providers(providers.PolicyLossProvider)
    for_written = sorted(name for name, provided in losses.items() if provided.record.learns_written)
    if algorithm.loss in losses and algorithm.loss not in for_written:
        raise ConfigError(
            f"algorithm.loss = {algorithm.loss!r} is for sampled tokens; for target tokens, use "
            f"{' or '.join(for_written)}"
        )
    if algorithm.proximal_policy != "rollout" or chosen.corrections:
        raise ConfigError(
            "algorithm.proximal_policy must be 'rollout' and algorithm.corrections empty: target tokens were not "
            "sampled by a policy"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature = {config.rollout.temperature:g} must be 1 for an estimator that learns target "
            "tokens: the loss uses the model's unscaled likelihood"
        )
    if config.training.validation_rollouts and "current" not in capabilities.policies:
        raise ConfigError(
            f"training.validation_rollouts must be 0: backend {config.backend!r} computes no log-probabilities, which "
            "validation on target tokens reports"
        )


def _check_teacher(resolved: Resolved, capabilities: Capabilities, chosen: Algorithm) -> None:
    config = resolved.config
    wanting = [name for name, estimator in _named(config, chosen) if estimator.needs_teacher]
    if config.teacher.engine and not wanting:
        raise ConfigError(
            f"[teacher] is set, but estimator {config.algorithm.name!r} uses no teacher; set algorithm.name = "
            "'distill', or remove [teacher]"
        )
    if not wanting:
        return
    if not config.teacher.engine:
        raise ConfigError(
            f"estimator {wanting[0]!r} needs a teacher: set teacher.engine to a rollout engine that computes "
            "log-probabilities, and teacher.model to its model"
        )
    is_stale = config.training.staleness_threshold > 0 or config.training.trigger_parameter_sync_step > 1
    if is_stale and "current" not in capabilities.policies:
        raise ConfigError(
            "training.staleness_threshold must be 0, and training.trigger_parameter_sync_step 1: backend "
            f"{config.backend!r} computes no log-probabilities, which are needed to compare tokens of older weights "
            "with the teacher"
        )
    check_teacher(resolved)
