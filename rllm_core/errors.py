"""Errors a person should read: one line each. Everything else is a bug and shows a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. Its message says what was wrong, what is allowed and what to do.

    Attributes:
        exit_code: What the command line exits with.
        label: What the command line prints before the message.
    """

    exit_code = 2
    label = "error: "


class ConfigError(UserError):
    """The run file, an override or a dataset is wrong."""


class PluginError(UserError):
    """A plugin that was asked for is missing, broken, disabled or in conflict with another."""


class ApiVersionError(PluginError):
    """A plugin was written for another version of the plugin API than this core has.

    Args:
        message: Says both versions.
        is_core_older: Whether a newer core may have what the plugin wants, or else a newer plugin.
    """

    def __init__(self, message: str, *, is_core_older: bool) -> None:
        super().__init__(message)
        self.is_core_older = is_core_older


class RefusedConversation(UserError, ValueError):
    """A conversation that a parser cannot write; a model's answer may be why, so it ends its rollout and no more."""


class RunError(UserError):
    """The run could not do what was planned; its summary says why."""

    exit_code = 1


class StallError(RunError):
    """Nothing made progress for too long; the message lists where every rollout is."""
