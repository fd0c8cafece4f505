"""Checks credentials that a library would quote in an error, which the run folder records."""

from __future__ import annotations

import os

from rllm_core.errors import ConfigError


def check_credential(variable: str) -> None:
    """Checks that a header can have the value of an environment variable, if it is set.

    Raises:
        ConfigError: If it cannot; the message does not quote the value.
    """
    value = os.environ.get(variable, "")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"variable {variable} must have one line of ASCII characters, without a line end")
