"""Rules for allowed plugins: environment variables, ``--no-plugins`` and ``plugins.toml``. Imports no plugin."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm_core.errors import PluginError
from rllm_core.plugins.discovery import Candidate

NO_PLUGINS_VARIABLE = "RLLM_NO_PLUGINS"
EVERY_PLUGIN = "*"


@dataclass(frozen=True)
class Settings:
    """The user's rules for which plugins are allowed, read before any plugin is imported.

    Attributes:
        only: Names in ``RLLM_PLUGINS``, or None if it is unset.
        disabled: Names in ``plugins.toml``. Ignored if ``RLLM_PLUGINS`` is set.
        blocked: Names from ``--no-plugins=`` and ``RLLM_NO_PLUGINS``, or True for all. The variable passes the names
            on to processes that a run starts.
        strict: Whether a broken, conflicting or missing plugin is an error even if it is not selected.
        trace: Whether every load and hook call is printed on stderr.
    """

    only: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    blocked: bool | frozenset[str] = False
    strict: bool = False
    trace: bool = False

    @classmethod
    def from_environment(
        cls,
        *,
        no_plugins: bool | Collection[str] = False,
        strict: bool | None = None,
    ) -> Settings:
        """Reads the variables ``RLLM_PLUGINS...``, ``RLLM_NO_PLUGINS``, ``RLLM_TRACE_PLUGINS``, and ``plugins.toml``.

        Args:
            no_plugins: Plugins to block in addition to ``RLLM_NO_PLUGINS``: all, none, or these names.
            strict: Overrides ``RLLM_PLUGINS_STRICT``.

        Raises:
            PluginError: If a variable or the file is invalid.
        """
        variable = os.environ.get("RLLM_PLUGINS")
        blocked = split_names(os.environ.get(NO_PLUGINS_VARIABLE, ""))
        if not isinstance(no_plugins, bool):
            blocked |= frozenset(no_plugins)
        return cls(
            only=None if variable is None else split_names(variable),
            disabled=frozenset() if variable is not None else read_disabled(),
            blocked=no_plugins is True or EVERY_PLUGIN in blocked or blocked or False,
            strict=_switch("RLLM_PLUGINS_STRICT") if strict is None else strict,
            trace=_switch("RLLM_TRACE_PLUGINS"),
        )

    def reason_disabled(self, candidate: Candidate) -> str | None:
        """Returns the reason why a plugin may not be used, or None."""
        if self.blocked is True or (self.blocked and any(map(candidate.is_named, self.blocked))):
            return "--no-plugins was given"
        if self.only is not None:
            return None if any(map(candidate.is_named, self.only)) else "RLLM_PLUGINS is set and does not name it"
        if any(map(candidate.is_named, self.disabled)):
            return f"disabled in plugins.toml; to re-enable it: rllm-core plugins enable {candidate.name}"
        return None

    def unknown(self, candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
        """Returns (source, name) for every requested name that is not installed."""
        known = list(candidates)
        asked = [("RLLM_PLUGINS", name) for name in self.only or ()]
        if not isinstance(self.blocked, bool):
            asked += [("--no-plugins", name) for name in self.blocked]
        return sorted(pair for pair in asked if not any(c.is_named(pair[1]) for c in known))


def split_names(text: str) -> frozenset[str]:
    """Returns the names in a comma-separated list."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in {"", "0", "false", "no", "off"}:
        return False
    if value in {"1", "true", "yes", "on"}:
        return True
    raise PluginError(f"{name} = {value!r} must be 0 or 1")


def plugins_file() -> Path:
    """Returns the path of ``plugins.toml`` in ``$RLLM_CONFIG_DIR``, which defaults to ``~/.config/rllm-core``."""
    folder = os.environ.get("RLLM_CONFIG_DIR")
    if folder:
        return Path(folder) / "plugins.toml"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rllm-core" / "plugins.toml"


def read_disabled() -> frozenset[str]:
    """Returns the plugins disabled in ``plugins.toml``.

    Raises:
        PluginError: If the file exists but is invalid.
    """
    path = plugins_file()
    advice = "Fix or delete the file, or set RLLM_PLUGINS, which overrides it"
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise PluginError(f"cannot read {path}: {error}. {advice}") from error
    disabled = table.pop("disabled", [])
    if table or not isinstance(disabled, list) or not all(isinstance(name, str) for name in disabled):
        raise PluginError(f'{path} must contain only disabled = ["NAME", ...]. {advice}')
    return frozenset(disabled)


def write_disabled(names: Collection[str]) -> Path:
    """Replaces ``plugins.toml`` atomically, and returns its path.

    Raises:
        PluginError: If the file cannot be written.
    """
    path = plugins_file()
    text = f"disabled = {json.dumps(sorted(names))}\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise PluginError(f"cannot write {path}: {error}") from error
    return path
