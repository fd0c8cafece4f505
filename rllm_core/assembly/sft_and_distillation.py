"""Checks that settings fit supervised training and distillation; others are rejected early."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_core import providers
from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.selection import Algorithm
from rllm_core.backend import Capabilities
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.training.engines import engine_class
from rllm_core.workflow import Workflow


def check_sft_and_distillation(
    config: RunConfig, capabilities: Capabilities, chosen: Algorithm, workflow: Workflow, plugins: PluginManager
) -> None:
    """Rejects settings without a meaning, or with a different one, in training without rewards or sampling.

    Raises:
        ConfigError: For the first such setting.
    """
    _check_workflow(config, chosen, workflow)
    names = [config.algorithm.name, *(role.name for role in config.algorithm.roles.values())]
    named = list(zip(names, chosen.estimators.all, strict=True))
    _check_rewards(config, named)
    if chosen.estimators.learns_written:
        _check_written(config, capabilities, chosen, plugins)
    wanting = [name for name, estimator in named if estimator.needs_teacher]
    if wanting:
        _check_teacher(config, capabilities, wanting[0], plugins)
    elif config.teacher.engine:
        raise ConfigError(
            f"[teacher] is set, but estimator {config.algorithm.name!r} uses no teacher; set algorithm.name = "
            "'distill', or remove [teacher]"
        )


def _check_rewards(config: RunConfig, named: Sequence[tuple[str, AdvantageEstimator]]) -> None:
    """Rejects reward settings that would have no effect, or that do not apply to such rollouts."""
    algorithm = config.algorithm
    # Estimators get shaped rewards. The filter of uniform groups uses the workflow's, even if no estimator does.
    shaping_is_unused = not any(estimator.needs_rewards for _, estimator in named)
    kl_in_reward = algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward"
    for problem, is_set, is_unused in (
        ("algorithm.filter_uniform_groups must be false", algorithm.filter_uniform_groups, False),
        ("algorithm.kl.place must be 'loss'", kl_in_reward, shaping_is_unused),
        ("algorithm.overlong.penalty_tokens must be 0", algorithm.overlong.penalty_tokens > 0, shaping_is_unused),
    ):
        for name, estimator in named:
            has_none = estimator.learns_written or estimator.needs_teacher
            if is_set and not estimator.needs_rewards and (has_none or is_unused):
                raise ConfigError(f"{problem}: estimator {name!r} uses no rewards")


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


def _check_teacher(config: RunConfig, capabilities: Capabilities, estimator: str, plugins: PluginManager) -> None:
    if not config.teacher.engine:
        raise ConfigError(
            f"estimator {estimator!r} needs a teacher: set teacher.engine to a rollout engine that computes "
            "log-probabilities, and teacher.model to its model"
        )
    if config.training.staleness_threshold > 0 and "current" not in capabilities.policies:
        raise ConfigError(
            f"training.staleness_threshold must be 0: backend {config.backend!r} computes no log-probabilities, which "
            "are needed to compare tokens of older weights with the teacher"
        )
    if not engine_class(plugins, config.teacher.engine).computes_logprobs:
        raise ConfigError(
            f"teacher.engine = {config.teacher.engine!r} cannot score given tokens; choose an engine with "
            "computes_logprobs = True"
        )
    if not config.teacher.model:
        raise ConfigError(
            f"teacher.model is not set; set it to the folder of the model that engine {config.teacher.engine!r} should "
            "score with"
        )
