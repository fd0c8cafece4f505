"""Parsers, and engines that need no backend: for evaluations and teachers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from rllm_core.assembly.resolution import Resolved
from rllm_core.engine import RolloutEngine
from rllm_core.limits.timeouts import close_within, within
from rllm_core.parser import BaseParser

CLOSING_TIMEOUT_SECONDS = 60.0

logger = logging.getLogger(__name__)


def build_parser(resolved: Resolved, name: str, model: str) -> BaseParser:
    """Builds the parser called ``name`` for a model (reads the model's tokenizer).

    Raises:
        PluginError: If the parser is broken.
    """
    provided = resolved.parsers[name]
    parser_class: type[BaseParser] = resolved.plugins.load(provided)
    with provided.at_work("from_model", parser_class):
        parser = parser_class.from_model(model, resolved.config.plugins.get(name))
    provided.checked("from_model()", parser, BaseParser)
    with provided.at_work("get_stop_token_ids", parser_class):
        stops = parser.get_stop_token_ids()
        if not isinstance(stops, Collection) or not stops or not all(type(stop) is int and stop >= 0 for stop in stops):
            raise TypeError(f"it returned {stops!r:.80}; return the ids that end a turn, at least one")
    return parser


def engine_class(resolved: Resolved, name: str) -> type[RolloutEngine]:
    """Loads the class of a standalone engine.

    Raises:
        PluginError: If the engine is broken.
    """
    found: type[RolloutEngine] = resolved.plugins.load(resolved.engines[name])
    return found


def standalone_engine(resolved: Resolved, name: str, parser: BaseParser) -> RolloutEngine:
    """Constructs a standalone engine. ``resolved`` has its model in place of the policy's.

    Raises:
        ConfigError: If the engine rejects its settings.
        PluginError: If the engine is broken.
    """
    found, config = engine_class(resolved, name), resolved.config
    section = config.plugins.get(name)
    if section is not None and name != found.name:  # selected as distribution/name
        config = config.model_copy(update={"plugins": {**config.plugins, found.name: section}})
    with resolved.engines[name].at_work("from_config", found):
        engine = found.from_config(config, parser)
    return resolved.engines[name].checked("from_config()", engine, RolloutEngine)


@asynccontextmanager
async def open_engine(resolved: Resolved, name: str, parser: BaseParser, label: str) -> AsyncIterator[RolloutEngine]:
    """Yields a standalone engine while it is awake; ``label`` names it in messages. See `standalone_engine`."""
    engine = standalone_engine(resolved, name, parser)
    await within(resolved.config.training.backend_timeout_seconds, f"wake_up of {label}", engine.wake_up())
    try:
        yield engine
    finally:
        await close_within(CLOSING_TIMEOUT_SECONDS, f"sleep of {label}", engine.sleep, logger.warning)
