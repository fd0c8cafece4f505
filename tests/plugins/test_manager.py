"""Tests discovery, selection and isolation with real installed packages."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import importlib_metadata
import pytest
from importlib_metadata import EntryPoint

from rllm_core import hookimpl
from rllm_core.errors import PluginError
from rllm_core.plugins import PluginInfo, PluginManager, discovery, watch
from rllm_core.plugins.discovery import find_plugins
from rllm_core.plugins.missing import first_party
from rllm_core.plugins.settings import Settings
from rllm_core.providers import (
    AdvantageEstimatorProvider,
    BackendProvider,
    CommandProvider,
    ParserProvider,
    Provider,
    RewardFunctionProvider,
    WorkflowProvider,
    resolve,
)

Build = Callable[..., PluginManager]


def by_name(manager: PluginManager) -> dict[str, PluginInfo]:
    return {info.name: info for info in manager.plugins()}


def theirs(manager: PluginManager, kind: type[Provider]) -> list[str]:
    """Returns the names of providers from outside the core."""
    return [name for name, provided in manager.providers(kind).items() if provided.plugin.name != "core"]


def test_listing_reads_metadata_and_imports_nothing(manager: Build) -> None:
    plugins = manager("rllm-good", "rllm-broken", "rllm-endless")
    assert by_name(plugins)["good"] == PluginInfo("good", "rllm-good", "1.2", "rllm_good", "available")
    assert by_name(plugins)["broken"].status == "available"
    assert [info.name for info in plugins.plugins()] == ["broken", "core", "endless", "good"]
    assert not {"rllm_good", "rllm_broken", "rllm_endless"} & set(sys.modules)


def test_providers_are_records_and_their_classes_stay_unimported(manager: Build) -> None:
    plugins = manager("rllm-good")
    assert list(plugins.providers(BackendProvider)) == ["good"]
    assert theirs(plugins, WorkflowProvider) == ["echo", "not-there"]
    assert list(plugins.providers(ParserProvider)) == ["plain"]
    assert list(plugins.providers(CommandProvider)) == ["hello", "no-command", "plugins count", "unloadable"]
    assert "grpo" in plugins.providers(AdvantageEstimatorProvider)
    assert by_name(plugins)["good"].status == "loaded"
    assert "rllm_good.stack" not in sys.modules
    assert plugins.load(plugins.select(BackendProvider, "good")).__name__ == "GoodBackend"


def test_a_broken_plugin_is_kept_apart(manager: Build, caplog: pytest.LogCaptureFixture) -> None:
    plugins = manager(
        "rllm-broken",
        "rllm-missing",
        "rllm-exit",
        "rllm-good",
        settings=Settings(only=frozenset({"broken", "missing", "exits", "good"})),
    )
    assert list(plugins.providers(BackendProvider)) == ["good"]
    infos = by_name(plugins)
    assert infos["good"].status == "loaded"
    assert infos["broken"].status == infos["missing"].status == infos["exits"].status == "broken"
    assert infos["broken"].error == ("rllm_broken/__init__.py:3: RuntimeError: the flux capacitor is empty"), (
        "and no pip command: an upgrade mends no mistake of the author's"
    )
    assert infos["broken"].failure == {
        "plugin": "broken",
        "distribution": "rllm-broken",
        "version": "0.3",
        "file": "rllm_broken/__init__.py",
        "line": 3,
        "error": "RuntimeError: the flux capacitor is empty",
    }
    assert infos["good"].failure is None
    assert "SystemExit: goodbye" in str(infos["exits"].error)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "rllm-broken 0.3" in line and "flux capacitor is empty" in line]
    assert all("\n" not in line for line in lines)


def test_selecting_from_a_broken_plugin_chains_its_cause(manager: Build) -> None:
    plugins = manager("rllm-broken", "rllm-good")
    with pytest.raises(
        PluginError, match=r"backend 'broken': plugin 'broken' \(rllm-broken 0\.3\) is broken"
    ) as caught:
        plugins.select(BackendProvider, "broken")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PluginError, match=r"not usable: rllm-broken 0\.3: rllm_broken/__init__.py:3: RuntimeError"):
        plugins.select(BackendProvider, "something-else")


def test_a_missing_dependency_names_the_pip_command(manager: Build) -> None:
    plugins = manager("rllm-missing")
    with pytest.raises(PluginError, match=r"pip install 'rllm-fixture-not-there>=2\.1'") as caught:
        plugins.select(BackendProvider, "missing")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_outdated_dependency_names_both_versions(manager: Build) -> None:
    with pytest.raises(PluginError) as caught:
        manager("rllm-outdated").select(BackendProvider, "outdated")
    installed = importlib_metadata.version("click")
    assert "cannot import name 'not_yet_invented'" in str(caught.value)
    assert str(caught.value).endswith(
        f"; to fix it: pip install 'click>=999' (rllm-outdated needs click>=999, but {installed} is installed)"
    )


def test_a_record_that_points_nowhere_is_fatal_when_loaded(manager: Build) -> None:
    plugins = manager("rllm-good")
    chosen = plugins.select(WorkflowProvider, "not-there")
    with pytest.raises(PluginError, match=r"workflow 'not-there' \(rllm-good 1\.2\) cannot be loaded") as caught:
        plugins.load(chosen)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(PluginError, match=r"No module named 'rllm_good.nowhere'$") as caught:
        plugins.load(chosen, "rllm_good.nowhere:Thing")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(
        PluginError, match="no requirement of rllm-good provides module 'rllm_fixture_elsewhere'; install"
    ):
        plugins.load(chosen, "rllm_fixture_elsewhere:Thing")


def test_a_file_that_was_installed_and_is_gone_is_installed_again(
    installed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [site] = installed("rllm-good")
    shutil.copytree(site, tmp_path / "site")
    (tmp_path / "site" / "rllm_good" / "stack.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    plugins = PluginManager(find_plugins(importlib_metadata.distributions(path=[str(tmp_path / "site")])))
    with pytest.raises(PluginError, match=r"to fix it: pip install --force-reinstall --no-deps rllm-good$"):
        plugins.load(plugins.select(BackendProvider, "good"))
    for module in [module for module in sys.modules if module.partition(".")[0] == "rllm_good"]:
        del sys.modules[module]


def test_twins_are_a_conflict_that_names_both(manager: Build) -> None:
    plugins = manager("rllm-twin-a", "rllm-twin-b", "rllm-good")
    twins = [info for info in plugins.plugins() if info.name == "twin"]
    assert [info.status for info in twins] == ["conflict", "conflict"]
    for info in twins:
        assert "rllm-twin-a 1.0" in str(info.error)
        assert "rllm-twin-b 2.0" in str(info.error)
    assert list(plugins.providers(BackendProvider)) == ["good"]
    assert not {"rllm_twin_a", "rllm_twin_b"} & set(sys.modules)
    with pytest.raises(PluginError, match=r"is in conflict: rllm-twin-a 1\.0 .* and rllm-twin-b 2\.0"):
        plugins.select(BackendProvider, "twin")


@pytest.mark.parametrize(
    "settings",
    [
        Settings(disabled=frozenset({"rllm-twin-a/twin"})),
        Settings(only=frozenset({"rllm_twin_b/twin"})),
        Settings(blocked=frozenset({"rllm-twin-a/twin"})),
    ],
    ids=["plugins.toml", "RLLM_PLUGINS", "--no-plugins"],
)
def test_one_twin_can_be_chosen_by_its_distribution(manager: Build, settings: Settings) -> None:
    plugins = manager("rllm-twin-a", "rllm-twin-b", settings=settings)
    assert plugins.select(BackendProvider, "twin-backend").plugin.package == "rllm-twin-b"


def test_one_provider_name_from_two_plugins_names_both_and_has_qualified_forms(manager: Build) -> None:
    plugins = manager("rllm-good", "rllm-rival")
    assert list(plugins.providers(BackendProvider)) == ["rllm-good/good", "rllm-rival/good"]
    with pytest.raises(PluginError, match=r"rllm-good 1\.2 \(plugin 'good'\) and rllm-rival 4\.0 \(plugin 'rival'\)"):
        plugins.select(BackendProvider, "good")
    assert plugins.load(plugins.select(BackendProvider, "rllm-rival/good")).__module__ == "rllm_rival.stack"
    assert plugins.select(BackendProvider, "rllm-good/good").plugin.name == "good"
    with pytest.raises(PluginError, match="no backend named 'rllm-nobody/good'"):
        plugins.select(BackendProvider, "rllm-nobody/good")


def test_the_name_of_the_core_is_taken(manager: Build) -> None:
    plugins = manager("rllm-named-core")
    assert "grpo" in plugins.providers(AdvantageEstimatorProvider)
    statuses = {info.package: info.status for info in plugins.plugins()}
    assert statuses == {"rllm-core": "loaded", "rllm-named-core": "conflict"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("misspelt", "a hook 'backend', which does not exist; did you mean 'backends'"),
        ("bad-argument", "loss"),
        ("undecorated", "implements no hook; decorate one of backends, "),
        ("wrapper", "hook wrapper"),
        ("garbage", "backends() returned {'name': 'garbage'} in its list, which is not a BackendProvider record"),
        ("garbage-async", "backends() is async"),
        ("garbage-raises", "backend name 'Not A Name' must match"),
        ("garbage-single", "not a list of BackendProvider records"),
        ("garbage-twice", "backends() returned two records named 'same'"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_broken_as_a_whole(manager: Build, name: str, problem: str) -> None:
    plugins = manager("rllm-misspelt", "rllm-garbage", "rllm-good", settings=Settings(only=frozenset({name, "good"})))
    assert list(plugins.providers(ParserProvider)) == ["plain"], "no record of a broken plugin can be selected"
    assert list(plugins.providers(BackendProvider)) == ["good"]
    info = by_name(plugins)[name]
    assert info.status == "broken"
    assert problem in str(info.error)
    assert plugins.hooks(name) == []


def test_unknown_names_list_what_exists_and_suggest(manager: Build) -> None:
    plugins = manager("rllm-good")
    with pytest.raises(PluginError, match=r"no backend named 'goood'; did you mean 'good'\?; installed: good"):
        plugins.select(BackendProvider, "goood")
    with pytest.raises(PluginError, match=r"no parser named 'nothing-like-it'; installed: plain$"):
        plugins.select(ParserProvider, "nothing-like-it")
    with pytest.raises(PluginError, match=r"no backend named 'vrel'; did you mean 'verl'\?"):
        plugins.select(BackendProvider, "vrel")
    with pytest.raises(PluginError, match=r"no reward function named 'score\.py:f'; a file .* \./score\.py:f; inst"):
        plugins.select(RewardFunctionProvider, "score.py:f")


@pytest.mark.parametrize(("kind", "name", "package"), [(*key, package) for key, package in first_party().items()])
def test_a_known_plugin_that_is_missing_comes_with_its_pip_command(kind: type, name: str, package: str) -> None:
    with pytest.raises(PluginError, match=f"no {kind.kind} named '{name}'; install it with: pip install {package}"):  # type: ignore[attr-defined]
        PluginManager().select(kind, name)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(only=frozenset()), "RLLM_PLUGINS is set and does not name it"),
        (Settings(disabled=frozenset({"good"})), "rllm-core plugins enable good"),
        (Settings(blocked=True), "--no-plugins was given"),
        (Settings(blocked=frozenset({"good"})), "--no-plugins was given"),
    ],
)
def test_a_disabled_plugin_is_not_imported_and_says_why(manager: Build, settings: Settings, reason: str) -> None:
    plugins = manager("rllm-good", settings=settings)
    assert by_name(plugins)["good"].status == "disabled"
    assert plugins.providers(BackendProvider) == {}
    assert "rllm_good" not in sys.modules
    with pytest.raises(PluginError, match=rf"backend 'good': plugin 'good' \(rllm-good 1\.2\) is disabled: .*{reason}"):
        plugins.select(BackendProvider, "good")


def test_the_core_works_without_any_plugin(manager: Build) -> None:
    assert "grpo" in manager("rllm-good", settings=Settings(only=frozenset())).providers(AdvantageEstimatorProvider)


def settings_of(folder: Path, **variables: str) -> Settings:
    with mock.patch.dict(os.environ, {"RLLM_CONFIG_DIR": str(folder), **variables}, clear=True):
        return Settings.from_environment()


def test_settings_come_from_the_environment_and_the_variable_wins(tmp_path: Path) -> None:
    (tmp_path / "plugins.toml").write_text('disabled = ["good"]\n')
    assert settings_of(tmp_path) == Settings(disabled=frozenset({"good"}))
    assert settings_of(tmp_path, RLLM_PLUGINS="") == Settings(only=frozenset())
    assert settings_of(tmp_path, RLLM_PLUGINS="a, b").only == {"a", "b"}
    assert settings_of(tmp_path, RLLM_PLUGINS_STRICT="1").strict
    assert settings_of(tmp_path, RLLM_TRACE_PLUGINS="true").trace
    with pytest.raises(PluginError, match="RLLM_PLUGINS_STRICT = 'maybe' must be 0 or 1"):
        settings_of(tmp_path, RLLM_PLUGINS_STRICT="maybe")


@pytest.mark.parametrize("content", ["disabled = [", "disabled = 3", 'disable = ["good"]', 'disabled = ["\udcff"]'])
def test_a_damaged_plugins_toml_is_an_error_and_not_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "plugins.toml").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PluginError, match=r"plugins\.toml"):
        settings_of(tmp_path)


def test_names_that_are_not_installed_are_reported(manager: Build, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(only=frozenset({"good", "godo"}))
    assert list(manager("rllm-good", settings=settings).providers(BackendProvider)) == ["good"]
    assert "RLLM_PLUGINS names 'godo', which is not installed; did you mean 'good'?" in caplog.text
    with pytest.raises(PluginError, match="'godo', which is not installed"):
        manager("rllm-good", settings=Settings(only=frozenset({"godo"}), strict=True))


@pytest.mark.parametrize("packages", [("rllm-broken",), ("rllm-twin-a", "rllm-twin-b"), ("rllm-garbage",)])
def test_strict_mode_raises_every_time(manager: Build, packages: tuple[str, ...]) -> None:
    plugins = manager("rllm-good", *packages, settings=Settings(strict=True))
    for _ in range(2):
        with pytest.raises(PluginError, match=r"\(strict mode\)"):
            plugins.providers(BackendProvider)


def test_reserved_commands_cannot_be_taken(manager: Build) -> None:
    plugins = manager("rllm-taker", "rllm-good", reserved_commands={"train"})
    assert list(plugins.providers(CommandProvider)) == ["hello", "no-command", "plugins count", "unloadable"]
    assert "its command 'train' has the name of a built-in command" in str(by_name(plugins)["taker"].error)


def test_plugins_are_imported_once(manager: Build) -> None:
    plugins = manager("rllm-good")
    first = plugins.providers(BackendProvider)
    module = sys.modules["rllm_good"]
    assert plugins.providers(BackendProvider) == first
    assert plugins.providers(ParserProvider)
    assert sys.modules["rllm_good"] is module


class InProcess:
    @hookimpl
    def backends(self) -> list[BackendProvider]:
        return [BackendProvider(name="mine", load="rllm_core.types:Task", summary="Mine.")]


def test_a_plugin_can_be_registered_in_the_process() -> None:
    plugins = PluginManager()
    plugins.register(InProcess(), "mine")
    assert plugins.select(BackendProvider, "mine").plugin.status == "loaded"
    assert plugins.select(BackendProvider, "mine/mine").record.name == "mine"
    assert plugins.hooks("mine") == ["backends"]
    with pytest.raises(PluginError, match="'mine' is already registered"):
        plugins.register(InProcess(), "mine")
    with pytest.raises(PluginError, match="'core' is already registered"):
        plugins.register(InProcess(), "core")
    with pytest.raises(PluginError, match="plugin 'empty' is broken: it implements no hook"):
        plugins.register(object(), "empty")
    assert "empty" not in by_name(plugins)


def test_what_plugins_print_does_not_reach_stdout(manager: Build, capsys: pytest.CaptureFixture[str]) -> None:
    assert theirs(manager("rllm-chatty"), WorkflowProvider) == ["chat"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "chatty says hello" in err
    assert "chatty was asked" in err


def test_the_trace_shows_imports_and_hook_calls(manager: Build, capsys: pytest.CaptureFixture[str]) -> None:
    manager("rllm-good", settings=Settings(trace=True)).providers(BackendProvider)
    err = capsys.readouterr().err
    assert "[plugins] plugin 'good' (rllm-good 1.2): " in err
    assert "[plugins] backends() -> good" in err


# --------------------------------------------------------------------------------------------------------------------
# Metadata


def test_a_distribution_seen_twice_is_one_plugin(installed: Callable[..., list[str]], tmp_path: Path) -> None:
    [site] = installed("rllm-good")
    (tmp_path / "lib64").symlink_to(site)
    found = find_plugins(importlib_metadata.distributions(path=[site, str(tmp_path / "lib64")]))
    assert [c.qualified for c in found] == ["rllm-good/good"]


def test_a_stale_second_version_is_a_conflict_if_it_differs(
    installed: Callable[..., list[str]], tmp_path: Path
) -> None:
    [site] = installed("rllm-good")
    stale = tmp_path / "rllm_good.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rllm-good\nVersion: 0.9\n")
    (stale / "entry_points.txt").write_text("[rllm_core]\ngood = rllm_good_old\n")
    plugins = PluginManager(find_plugins(importlib_metadata.distributions(path=[str(tmp_path), site])))
    assert {info.version: info.status for info in plugins.plugins() if info.name == "good"} == {
        "0.9": "conflict",
        "1.2": "conflict",
    }


def test_damaged_metadata_is_a_row_and_hides_nothing(installed: Callable[..., list[str]], tmp_path: Path) -> None:
    [site] = installed("rllm-good")
    for name, content in (
        ("rllm_torn", b"[rllm_core]\ntorn = \xff\xfe"),
        ("rllm_odd", b"[rllm_core]\nodd name! = x\n"),
    ):
        folder = tmp_path / f"{name}-3.0.dist-info"
        folder.mkdir()
        (folder / "entry_points.txt").write_bytes(content)
    plugins = PluginManager(find_plugins(importlib_metadata.distributions(path=[str(tmp_path), site])))
    infos = {info.package: info for info in plugins.plugins()}
    assert infos["rllm-good"].status == "available"
    assert infos["rllm_torn"].status == infos["rllm_odd"].status == "broken"
    assert "rllm_torn-3.0.dist-info) cannot be read: UnicodeDecodeError" in str(infos["rllm_torn"].error)
    assert "'odd name!' must match" in str(infos["rllm_odd"].error)
    assert infos["rllm_odd"].version == "3.0"


def test_a_half_removed_distribution_harms_nobody(
    installed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [site] = installed("rllm-good")
    folder = tmp_path / "rllm_torso-3.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[rllm_core]\ntorso = rllm_torso\n")
    monkeypatch.syspath_prepend(site)
    plugins = PluginManager(find_plugins(importlib_metadata.distributions(path=[str(tmp_path), site])))
    assert list(plugins.providers(BackendProvider)) == ["good"]
    assert by_name(plugins)["torso"] == PluginInfo(
        "torso",
        "rllm_torso",
        "3.0",
        "rllm_torso",
        "broken",
        "ModuleNotFoundError: No module named 'rllm_torso'; to fix it: "
        "pip install --force-reinstall --no-deps rllm_torso",
    )


def test_distributions_are_walked_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    monkeypatch.setattr(importlib_metadata, "distributions", lambda: walks.append(1) or ())
    for cached in (discovery.installed_distributions, discovery.installed_plugins, discovery.installed_versions):
        cached.cache_clear()
    try:
        for _ in range(3):
            PluginManager.from_environment()
            discovery.installed_versions()
        assert len(walks) == 1
    finally:
        for cached in (discovery.installed_distributions, discovery.installed_plugins, discovery.installed_versions):
            cached.cache_clear()


def test_a_scratch_environment_installed_with_pip_is_discovered(
    installed: Callable[..., list[str]], tmp_path: Path
) -> None:
    """One virtual environment with all fixtures at once: every plugin has a row, and the command succeeds."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for site in installed("rllm-good", "rllm-broken", "rllm-twin-a", "rllm-twin-b"):
        shutil.copytree(site, purelib, dirs_exist_ok=True)
    host = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(purelib, "host.pth").write_text(f"{host}\n{Path(discovery.__file__).parents[2]}\n")
    run = subprocess.run(
        [python, "-m", "rllm_core", "plugins"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert {"good", "broken", "twin"} <= {line.split()[0] for line in run.stdout.splitlines() if line}


def test_a_slow_import_is_announced_while_it_lasts(
    manager: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "SLOW_IMPORT_SECONDS", 0.05)

    def wait_for_a_warning() -> object:
        deadline = time.monotonic() + 600
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        return object()

    monkeypatch.setattr(EntryPoint, "load", lambda point: wait_for_a_warning())
    manager("rllm-good").providers(BackendProvider)
    assert "still importing plugin 'good' (rllm-good 1.2) after 0.05 s, now at " in caplog.text
    assert "if it never ends: rllm-core plugins disable good" in caplog.text


@pytest.mark.parametrize("last_line", ["", "raise RuntimeError"])
def test_no_garbage_is_collected_during_an_import(tmp_path: Path, last_line: str) -> None:
    (tmp_path / "code.py").write_text(f"import gc, sys\nsys.is_collecting = gc.isenabled()\n{last_line}\n")
    with pytest.raises(RuntimeError) if last_line else nullcontext():
        resolve(f"{tmp_path}/code.py")
    assert not vars(sys).pop("is_collecting")
    assert gc.isenabled()
