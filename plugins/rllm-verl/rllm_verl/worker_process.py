"""Imported by verl in every process of a run, so that plugins are there as in the process that drives it."""

from rllm_core.plugins import PluginManager

plugins = PluginManager.from_environment()
