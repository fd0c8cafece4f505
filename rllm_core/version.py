"""Versions of the package and of the plugin API."""

__version__ = "0.1.0"

API_VERSION = "1.0"
"""Version of the hooks and contracts: additions increase the second number, removals the first.

A plugin's entry module names the version it was written for, ``RLLM_CORE_API = "1.0"``, which is checked on loading.
"""
