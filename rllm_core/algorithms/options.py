"""Base class of estimators, corrections and losses, which have options in the run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from rllm_core.errors import RunError, UserError
from rllm_core.run_file import Section, validated
from rllm_core.text import one_line

ResultT = TypeVar("ResultT")


class Configured:
    """A component of an algorithm with options.

    Attributes:
        options_model: Model of the component's options. By default, there are none.
        options: The validated options. Subclasses annotate this attribute with their model.
        label: Name in errors: the class, or kind, name and package if a run has selected the component.
        describe: Describes an exception of the component; with plugin and line if a run has selected the component.

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

    def attempt(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Returns ``call(*arguments)``, a call of this component, which may come from any plugin.

        Raises:
            RunError: If the call fails with anything but an error for users, which propagates.
        """
        try:
            return call(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a SystemExit would end the run with its exit code, such as 0
            raise RunError(f"{self.label} failed: {self.describe(error)}") from error
