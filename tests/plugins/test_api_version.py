"""Tests the plugin API version that a plugin declares."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from rllm_core import API_VERSION, __version__, hookimpl
from rllm_core.errors import PluginError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.loading import check_api_version
from rllm_core.providers import BackendProvider

MAJOR, MINOR = (int(number) for number in API_VERSION.split("."))


def test_a_plugin_from_the_future_is_refused_with_both_versions(manager: Callable[..., PluginManager]) -> None:
    plugins = manager("rllm-foreign-api")
    with pytest.raises(PluginError, match=r"'foreign'.*foreign-api"):
        plugins.select(BackendProvider, "foreign")
    [info] = plugins.find("foreign-api")
    assert info.status == "broken"
    assert info.error == (
        f"it was written for version 2.0 of the plugin API, but rllm-core {__version__} has {API_VERSION}; "
        "to fix it: pip install --upgrade rllm-core"
    )


@pytest.mark.parametrize("declared", [None, API_VERSION, f"{MAJOR}.0"])
def test_what_this_core_has_is_accepted(declared: str | None) -> None:
    check_api_version(declared)


@pytest.mark.parametrize(
    ("declared", "is_core_older"),
    [(f"{MAJOR}.{MINOR + 1}", True), (f"{MAJOR + 1}.0", True), (f"{MAJOR - 1}.9", False)],
)
def test_another_version_says_who_is_older(declared: str, is_core_older: bool) -> None:
    with pytest.raises(PluginError, match=rf"version {declared} of the plugin API, .* has {API_VERSION}") as refused:
        check_api_version(declared)
    assert refused.value.is_core_older is is_core_older  # type: ignore[attr-defined]


@pytest.mark.parametrize("declared", ["", "1", "1.0.0", "v1.0", 1.0, ("1", "0"), "1.0\n", "x" * 10_000])
def test_what_is_no_version_is_refused_in_one_short_line(declared: object) -> None:
    with pytest.raises(PluginError, match="RLLM_CORE_API") as refused:
        check_api_version(declared)
    assert len(str(refused.value)) < 200


def test_it_is_checked_where_a_plugin_is_registered_by_hand() -> None:
    plugin = types.ModuleType("from_the_future")
    plugin.RLLM_CORE_API = f"{MAJOR + 1}.0"  # type: ignore[attr-defined]

    @hookimpl
    def backends() -> list[BackendProvider]:
        return []

    plugin.backends = backends  # type: ignore[attr-defined]
    manager = PluginManager()
    with pytest.raises(PluginError, match="plugin 'future' is broken: it was written for version"):
        manager.register(plugin, "future")
