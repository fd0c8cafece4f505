"""Tests commands of plugins in groups of the core, and first-party commands whose package is not installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from rllm_core import cli, hookimpl
from rllm_core.cli import CORE_COMMANDS, Session
from rllm_core.errors import PluginError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.discovery import Candidate, installed_plugins
from rllm_core.plugins.missing import first_party
from rllm_core.plugins.settings import Settings
from rllm_core.providers import COMMAND_GROUPS, CommandProvider

Run = Callable[..., subprocess.CompletedProcess[str]]

OF_THE_DEVKIT = ("new workflow mine", "plugins check workflows", "parser check some/model")
OF_THE_VIEWER = ("verify run", "show run", "runs", "compare run other", "diagnose run", "view run")


class Adding:
    """Plugin that adds one command."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def cli_commands(self) -> list[CommandProvider]:
        return [CommandProvider(name=self.name, load="rllm_core.cli.doctor:doctor", summary="Added.")]


def called(line: str, plugins: PluginManager) -> Result:
    """Runs the command line in this process with these plugins."""
    session = Session()
    session.__dict__["plugins"] = plugins
    return CliRunner().invoke(cli.cli, line.split(), obj=session)


def core_only() -> PluginManager:
    return PluginManager(reserved_commands=CORE_COMMANDS)


# --------------------------------------------------------------------------------------------------------------------
# Groups


def test_a_command_in_a_group_runs_and_is_listed(rllm_core: Run) -> None:
    run = rllm_core("plugins", "count", packages=("rllm-good",), RLLM_PLUGINS="good")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 2
    listed = rllm_core("--help", packages=("rllm-good",), RLLM_PLUGINS="good").stdout
    assert "plugins count  Counts plugins. (rllm-good 1.2)" in listed


@pytest.mark.parametrize("group", COMMAND_GROUPS)
def test_every_group_is_a_group_of_the_core_with_its_prefix(group: str) -> None:
    command = called(f"{group} --help", core_only())
    assert command.exit_code == 0, command.output
    plugins = core_only()
    plugins.register(Adding(f"{group} added"), "adding")
    assert called(f"{group} added --help", plugins).exit_code == 0
    assert called(f"{group} ad", plugins).exit_code == 2


@pytest.mark.parametrize("name", ["train now", "runs show", "plugins check twice", "plugins ", " check", "plugins  x"])
def test_other_names_of_several_words_are_no_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"command name .* must match \(\(parser\|plugins\) \)\?"):
        CommandProvider(name=name, load="a.b:c", summary="")


@pytest.mark.parametrize("name", ["plugins show", "plugins disable", "doctor"])
def test_built_in_commands_of_a_group_are_reserved(name: str) -> None:
    with pytest.raises(PluginError, match=f"its command '{name}' has the name of a built-in command"):
        core_only().register(Adding(name), "taker")


def test_an_unknown_command_of_a_group_suggests() -> None:
    assert "no such command 'shwo'; did you mean 'show'?" in called("plugins shwo", core_only()).output
    assert "run rllm-core plugins --help for a list" in called("plugins xyzzy", core_only()).output


# --------------------------------------------------------------------------------------------------------------------
# First-party commands


@pytest.mark.parametrize(
    ("line", "package"),
    [*((line, "rllm-devkit") for line in OF_THE_DEVKIT), *((line, "rllm-viewer") for line in OF_THE_VIEWER)],
)
def test_a_command_whose_package_is_missing_names_it(line: str, package: str) -> None:
    error = called(line, core_only()).exception
    assert isinstance(error, PluginError)
    assert error.exit_code == 2
    assert str(error).endswith(f"needs {package}, which is not installed; install it with: pip install {package}")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (
            "--help",
            [
                "chat",
                "compare",
                "diagnose",
                "environments",
                "export",
                "export-model",
                "import",
                "new",
                "parser check",
                "plugins check",
                "runs",
                "show",
                "verify",
                "view",
            ],
        ),
        ("plugins --help", ["check"]),
        ("parser --help", ["check"]),
    ],
)
def test_help_lists_what_is_missing_with_the_pip_command(line: str, names: list[str]) -> None:
    result = called(line, core_only())
    assert result.exit_code == 0
    listed = result.output.partition("Unavailable commands:\n")[2]
    for name in names:
        assert f"  {name} " in listed
    assert " ".join(listed.split()).count("pip install rllm-") == len(names)


@pytest.mark.parametrize("line", OF_THE_DEVKIT)
def test_a_disabled_devkit_gives_the_reason(rllm_core: Run, line: str) -> None:
    run = rllm_core("--no-plugins=devkit", *line.split())
    assert run.returncode == 2
    assert "plugin 'devkit' (rllm-devkit 0.1.0) is disabled: --no-plugins was given" in run.stderr
    assert run.stderr.count("\n") == 1


def test_first_party_commands_load_their_own_package_only(candidates: Callable[..., tuple[Candidate, ...]]) -> None:
    """``plugins check`` must reach the command although the plugin to check never finishes its import."""
    own = [candidate for candidate in installed_plugins() if candidate.package == "rllm-devkit"]
    plugins = PluginManager([*candidates("rllm-endless"), *own], Settings(), reserved_commands=CORE_COMMANDS)
    assert plugins.select_first_party(CommandProvider, "plugins check").plugin.package == "rllm-devkit"
    assert {info.name: info.status for info in plugins.plugins()}["endless"] == "available"
    assert called("plugins --help", plugins).exit_code == 0
    assert {info.name: info.status for info in plugins.plugins()}["endless"] == "available"


def test_first_party_commands_are_those_of_the_packages() -> None:
    plugins = PluginManager.from_environment()
    provided = {name: found.plugin.package for name, found in plugins.providers(CommandProvider).items()}
    ours = {
        name: package
        for name, package in provided.items()
        if package in ("rllm-devkit", "rllm-environments", "rllm-viewer")
    }
    assert ours == {name: package for (kind, name), package in first_party().items() if kind is CommandProvider}
