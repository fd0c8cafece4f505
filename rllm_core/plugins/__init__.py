"""From package metadata to a loaded class. Importing this package loads no plugin."""

from rllm_core.plugins.manager import CORE_PACKAGE, CORE_PLUGIN, FIRST_PARTY, PluginInfo, PluginManager, Provided

__all__ = ["CORE_PACKAGE", "CORE_PLUGIN", "FIRST_PARTY", "PluginInfo", "PluginManager", "Provided"]
