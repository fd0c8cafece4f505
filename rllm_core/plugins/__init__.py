"""Finds plugins from package metadata, and loads their classes. Importing this package loads no plugin."""

from rllm_core.plugins.listing import PluginInfo, Provided
from rllm_core.plugins.manager import CORE_PACKAGE, CORE_PLUGIN, PluginManager

__all__ = ["CORE_PACKAGE", "CORE_PLUGIN", "PluginInfo", "PluginManager", "Provided"]
