"""What estimators, corrections and losses have in common: a name in the run file, and parameters of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rllm_core.config import Section
from rllm_core.run_file import validated


class Configured:
    """A piece of an algorithm with parameters.

    Attributes:
        options_model: What its parameters may be; none unless a subclass says otherwise.
        options: The parameters, checked. Subclasses annotate it with their model.
        label: What errors call it: its class, or where a run has chosen it, its kind, name and package.

    Args:
        options: The table of parameters.
        where: Its place in the run file, for errors.

    Raises:
        rllm_core.errors.ConfigError: If the parameters are not what the model says.
    """

    options_model: ClassVar[type[Section]] = Section

    def __init__(self, options: Mapping[str, Any] | None = None, *, where: str = "options") -> None:
        self.options: Any = validated(self.options_model, options or {}, where, ())
        self.label = type(self).__name__
