"""Selects the group scorer of a run, and opens the engine of its model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer, ScorerModel
from rllm_core.assembly.components import create
from rllm_core.assembly.engines import build_parser, open_engine
from rllm_core.assembly.resolution import Resolved
from rllm_core.backend import BackendProtocol
from rllm_core.config import ModelConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError
from rllm_core.limits.timeouts import within
from rllm_core.providers import EngineProvider, ParserProvider
from rllm_core.run_file import validated


def scorer_of(resolved: Resolved) -> GroupScorer | None:
    """Creates the group scorer of a run; None if the run file names none.

    Raises:
        ConfigError: If the scorer's options are wrong, or no engine can be opened under the name that it gives.
        PluginError: If the scorer is missing or broken.
    """
    algorithm, provided = resolved.config.algorithm, resolved.scorer
    if provided is None:
        if algorithm.group_scorer_options:
            raise ConfigError("algorithm.group_scorer_options is set, but algorithm.group_scorer is not; name a scorer")
        return None
    scorer: GroupScorer = create(
        resolved.plugins,
        provided,
        "algorithm.group_scorer",
        algorithm.group_scorer,
        algorithm.group_scorer_options,
        "algorithm.group_scorer_options",
    )
    if scorer.model is not None:
        _with_engine(resolved, scorer.model)
    elif asks_start(scorer):
        _check_frozen(resolved, scorer.frozen_version)
    return scorer


def asks_start(scorer: GroupScorer | None) -> bool:
    """Whether a scorer samples from a frozen version of the policy: the initial weights of the run."""
    return scorer is not None and scorer.model is None and scorer.frozen_version is not None


def _check_frozen(resolved: Resolved, version: int | None) -> None:
    """Checks that the run can sample from ``version`` of its policy while it trains later versions."""
    name = resolved.config.backend
    if version != 0:
        raise ConfigError(
            f"algorithm.group_scorer asks version {version} of the policy, but a run keeps only version 0, the weights "
            f"it starts from; start a run from version {version} (training.init_from), or ask version 0"
        )
    backend: type[BackendProtocol[Any]] = resolved.plugins.load(resolved.backend)
    if backend.init_reference_engine is BackendProtocol.init_reference_engine:
        raise ConfigError(
            f"algorithm.group_scorer asks version 0 of the policy, which backend {name!r} does not keep for sampling; "
            "export it (rllm-core export-model) and name it as the scorer's model, with engine = 'local'"
        )


@asynccontextmanager
async def open_scorer_engine(
    resolved: Resolved, scorer: GroupScorer | None, backend: BackendProtocol[Any] | None
) -> AsyncIterator[RolloutEngine | None]:
    """Yields the engine of the scorer's model, awake; None without a scorer, or if it samples from the policy.

    ``backend`` is None in an evaluation without a backend.

    Raises:
        ConfigError: If the engine rejects its settings or the model, or if the scorer needs a backend.
    """
    if asks_start(scorer):
        if backend is None:
            raise ConfigError(
                "algorithm.group_scorer asks version 0 of the policy, which only a backend keeps; evaluate without "
                "--engine"
            )
        seconds = resolved.config.training.backend_timeout_seconds
        what = f"init_reference_engine of backend {resolved.config.backend!r}"
        engine = await within(seconds, what, backend.init_reference_engine())
        yield resolved.backend.checked("init_reference_engine()", engine, RolloutEngine)
        return
    if scorer is None or scorer.model is None:
        yield None
        return
    model = scorer.model
    wanted = _with_engine(resolved, model)
    parser = build_parser(wanted, model.parser or wanted.config.parser, model.path)
    async with open_engine(wanted, model.engine, parser, f"the scorer's model, engine {model.engine!r},") as engine:
        yield engine


def _with_engine(resolved: Resolved, model: ScorerModel) -> Resolved:
    """Returns the run with the scorer's model in place of its own, and with the providers for that model."""
    plugins, config = resolved.plugins, resolved.config
    engines = {model.engine: plugins.select(EngineProvider, model.engine)}
    parsers = {name: plugins.select(ParserProvider, name) for name in (model.parser or config.parser,)}
    sections: dict[str, Any] = dict(config.plugins)
    chosen: Mapping[str, Any] = {**engines, **parsers}
    for name, provided in chosen.items():
        if name not in sections and provided.record.config is not None:
            sections[name] = validated(plugins.load(provided, provided.record.config), {}, name, ())
    config = config.model_copy(update={"plugins": sections, "model": ModelConfig(path=model.path)})
    return replace(resolved, config=config, engines=engines, parsers=parsers)
