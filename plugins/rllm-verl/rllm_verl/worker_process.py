"""Imported by verl in every process of a run, so that workers load the same plugins as the driver."""

from rllm_core.plugins import PluginManager

plugins = PluginManager.from_environment()
