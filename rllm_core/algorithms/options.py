"""Base class of estimators, corrections and losses, which have options in the run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rllm_core.errors import RunError
from rllm_core.foreign import one_line
from rllm_core.run_file import Section, validated


class Configured:
    """A component of an algorithm with options.

    Attributes:
        options_model: Model of its options. By default, there are none.
        options: The validated options. Subclasses annotate it with their model.
        label: Name in errors: its class, or its kind, name and package if a run has selected it.
        describe: Describes an exception that it raised; with the plugin and line if a run has selected it.

    Args:
        options: Table of options.
        where: Position of the table in the run file, for errors.

    Raises:
        rllm_core.errors.ConfigError: If the options do not match the model.
    """

    options_model: ClassVar[type[Section]] = Section
    describe: Callable[[BaseException], str] = staticmethod(one_line)

    def __init__(self, options: Mapping[str, Any] | None = None, *, where: str = "options") -> None:
        self.options: Any = validated(self.options_model, options or {}, where, ())
        self.label = type(self).__name__

    def failure(self, error: Exception) -> RunError:
        """Returns the error that ends a run because this component raised ``error``."""
        return RunError(f"{self.label} failed: {self.describe(error)}")
