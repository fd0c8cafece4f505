"""Plugins that end the process at import."""
