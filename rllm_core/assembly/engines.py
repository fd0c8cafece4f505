"""Standalone engines, for evaluations and teachers."""

from __future__ import annotations

from rllm_core import providers
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager


def engine_class(plugins: PluginManager, name: str) -> type[RolloutEngine]:
    """Loads the class of a standalone engine.

    Raises:
        PluginError: If no engine has this name, or it is broken.
    """
    found: type[RolloutEngine] = plugins.load(plugins.select(providers.EngineProvider, name))
    return found


def standalone_engine(name: str, config: RunConfig, plugins: PluginManager, parser: BaseParser) -> RolloutEngine:
    """Constructs a standalone engine from the run file.

    Args:
        name: Name of the engine and of its section.
        config: Run file, with ``model`` as the model that the engine samples from.
        plugins: Plugin manager that provides the engine.
        parser: Parser of that model.

    Raises:
        ConfigError: If the engine rejects its settings.
        PluginError: If no engine has this name, or it is broken.
    """
    found = engine_class(plugins, name)
    section = config.plugins.get(name)
    if section is not None and name != found.name:  # selected as distribution/name
        config = config.model_copy(update={"plugins": {**config.plugins, found.name: section}})
    with plugins.select(providers.EngineProvider, name).at_work("from_config", found):
        return found.from_config(config, parser)
