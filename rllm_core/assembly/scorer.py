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
from rllm_core.config import ModelConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError
from rllm_core.providers import EngineProvider, ParserProvider
from rllm_core.run_file import validated


def scorer_of(resolved: Resolved) -> GroupScorer | None:
    """Creates the group scorer of a run; None if the run file names none.

    Raises:
        ConfigError: If its options are wrong, or nothing can be opened under the name of its engine.
        PluginError: If it is missing or broken.
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
    return scorer


@asynccontextmanager
async def open_scorer_engine(resolved: Resolved, scorer: GroupScorer | None) -> AsyncIterator[RolloutEngine | None]:
    """Yields the engine of the scorer's model while it is awake; None without a scorer, or if it has no model.

    Raises:
        ConfigError: If the engine rejects its settings or the model.
    """
    if scorer is None or scorer.model is None:
        yield None
        return
    model = scorer.model
    wanted = _with_engine(resolved, model)
    parser = build_parser(wanted, model.parser or wanted.config.parser, model.path)
    async with open_engine(wanted, model.engine, parser, f"the scorer's model, engine {model.engine!r},") as engine:
        yield engine


def _with_engine(resolved: Resolved, model: ScorerModel) -> Resolved:
    """Returns the run with the scorer's model, and with the providers that it needs."""
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
