"""Workflow ``openenv``: OpenEnv environments, given by the URL of their server."""
