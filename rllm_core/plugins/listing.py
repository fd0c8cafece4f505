"""Descriptions of plugins and their providers: rows of the listing, and the records that a manager selects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rllm_core.errors import PluginError, UserError
from rllm_core.plugins.blame import blamed_json, definition, located, place_of
from rllm_core.plugins.discovery import Candidate
from rllm_core.providers import Provider

ProviderT = TypeVar("ProviderT", bound=Provider)
ReturnedT = TypeVar("ReturnedT")
Status = Literal["available", "loaded", "disabled", "broken", "conflict"]


@dataclass(frozen=True)
class PluginInfo:
    """One row of the plugin listing.

    Attributes:
        name: Name of the plugin, which is the name of its entry point.
        value: Module with the hook implementations.
        status: ``available`` (installed and allowed, not imported yet), ``loaded``, ``disabled``, ``broken`` or
            ``conflict``.
        error: Why it is disabled, broken or in conflict, in one line.
        failure: Origin of the error that broke it: ``plugin``, ``distribution``, ``version``, ``file``, ``line`` and
            ``error``.
    """

    name: str
    package: str
    version: str
    value: str
    status: Status
    error: str | None = None
    failure: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """Distribution and version, for messages; the path of a file of the user."""
        return f"{self.package} {self.version}".strip() or self.value

    def to_json(self) -> dict[str, Any]:
        """Returns the row as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Provided(Generic[ProviderT]):
    """A provider record and the plugin it comes from."""

    record: ProviderT
    plugin: PluginInfo

    @contextlib.contextmanager
    def at_work(self, what: str, code: type) -> Iterator[None]:
        """Wraps a call of the provider's code, for calls before anything is allocated.

        Args:
            what: Name of the call, for the message.
            code: Class that is called. The message gives its location if the error has none, as for wrong arguments.

        Raises:
            PluginError: In place of any error that is not a `UserError`.
        """
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            frame = definition(code)
            if place_of(error) is None and frame is not None:
                error.frames = (frame,)  # type: ignore[union-attr]
            raise PluginError(f"{self.label}: {what} failed: {located(error, self.plugin.package)}") from error

    def checked(self, what: str, returned: ReturnedT, contract: type[Any]) -> ReturnedT:
        """Returns what a call of the provider's code returned. ``what`` names the call.

        Raises:
            PluginError: If the value is not an instance of it.
        """
        if not isinstance(returned, contract):
            raise PluginError(f"{self.label}: {what} returned {returned!r:.80}, not {contract.__name__}")
        return returned

    @property
    def label(self) -> str:
        """Kind, name and distribution, for messages."""
        return f"{self.record.kind} {self.record.name!r} ({self.plugin.label})"

    @property
    def qualified(self) -> str:
        """``distribution/name``, which is unique even if two plugins provide the same name."""
        return f"{self.plugin.package}/{self.record.name}"


class Plugin:
    """A candidate and its current state."""

    def __init__(self, candidate: Candidate, status: Status = "available", error: str | None = None) -> None:
        self.candidate = candidate
        self.status = status
        self.error = error
        self.failure: BaseException | None = None
        self.records: tuple[Provider, ...] = ()

    @property
    def info(self) -> PluginInfo:
        """Row of the plugin in the listing."""
        c = self.candidate
        failure = None if self.failure is None else blamed_json(self.failure, c)
        return PluginInfo(c.name, c.package, c.version, c.value, self.status, self.error, failure)
