"""Workflow ``openenv``: environments of OpenEnv, by the URL of their server."""
