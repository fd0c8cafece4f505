"""Errors for users: one line each. Any other exception is a bug and shows a traceback."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix. Its message names the error, the allowed values and the fix.

    Attributes:
        exit_code: Exit code of the command line.
        label: Text that the command line prints before the message.
    """

    exit_code = 2
    label = "error: "


class ConfigError(UserError):
    """The run file, an override or a dataset is wrong."""


class PluginError(UserError):
    """A requested plugin is missing, broken, disabled or in conflict with another."""


class ApiVersionError(PluginError):
    """A plugin was written for a different version of the plugin API than this core has.

    Args:
        message: Message that names both versions.
        is_core_older: Whether to upgrade the core. If False, upgrade the plugin.
    """

    def __init__(self, message: str, *, is_core_older: bool) -> None:
        super().__init__(message)
        self.is_core_older = is_core_older


class RefusedConversation(UserError, ValueError):
    """A parser cannot render a conversation. It ends only this rollout, since a completion may be the cause."""


class RunError(UserError):
    """The run could not be completed as planned; its summary says why."""

    exit_code = 1


class DamagedFile(RunError, ValueError):
    """A file of a run folder cannot be read as it was written. Readers that can do without it expect a ValueError."""


class StallError(RunError):
    """Nothing made progress for too long. The message lists the position of every rollout."""


class Escaped(RuntimeError):
    """Third-party code raised an error that would end the event loop, such as ``SystemExit``; chained as the cause.

    No error for users, but a bug of that code. Its message already names the type of the cause.
    """
