"""Tests what plugins can do to the process that imports them: its time, streams, exit and output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_site import CONTROL, beside, distribution, training

from rllm_core.plugins import PluginManager, foreign, loading
from rllm_core.plugins.discovery import Settings
from rllm_core.providers import BackendProvider, WorkflowProvider

Build = Callable[..., PluginManager]
Run = Callable[..., subprocess.CompletedProcess[str]]


def only(*names: str) -> Settings:
    return Settings(only=frozenset(names))


@pytest.fixture
def with_testing(installed: Callable[..., list[str]], tmp_path: Path) -> str:
    site = distribution(tmp_path / "testing", "rllm-testing", "1.0", "testing = rllm_devkit.scripted_plugin")
    return beside(installed, site)


# --------------------------------------------------------------------------------------------------------------------
# Time


@pytest.mark.parametrize(("package", "name"), [("rllm-endless", "endless"), ("rllm-hostile", "endless-hook")])
def test_a_plugin_that_never_ends_is_broken_and_the_others_are_not(
    manager: Build, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setattr(loading, "PLUGIN_DEADLINE_SECONDS", 0.5)
    plugins = manager(package, "rllm-good", settings=only(name, "good"))
    assert list(plugins.providers(BackendProvider)) == ["good"]
    [info] = plugins.find(name)
    assert info.status == "broken"
    assert re.fullmatch(r"rllm_\w+/\w+\.py:\d+: it did not end within 0\.5 s", str(info.error))


def test_a_deadline_leaves_no_alarm_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(foreign.Overran), foreign.ended_within(0.05):
        time.sleep(60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_somebody_elses_alarm_is_left_alone() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with foreign.ended_within(0.01):
            deadline = time.monotonic() + 60
            while not rung and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert rung == [signal.SIGALRM]


def test_other_threads_load_plugins_without_a_deadline(manager: Build) -> None:
    plugins, found = manager("rllm-good", settings=only("good")), list[str]()
    thread = threading.Thread(target=lambda: found.extend(plugins.providers(BackendProvider)))
    thread.start()
    thread.join()
    assert found == ["good"]


# --------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.parametrize("name", ["writes", "closes"])
def test_a_listing_is_one_json_document_whatever_a_plugin_does_to_the_streams(
    rllm_core_process: Run, name: str
) -> None:
    run = rllm_core_process("workflows", "--json", packages=("rllm-hostile", "rllm-good"), RLLM_PLUGINS=f"good,{name}")
    assert run.returncode == 0, run.stderr
    assert {"echo", name} <= {row["name"] for row in json.loads(run.stdout)}
    if name == "writes":
        assert "] straight to the descriptor\n] from a child\n" in run.stderr


# --------------------------------------------------------------------------------------------------------------------
# Lines


def test_ten_megabytes_of_error_are_one_short_line(rllm_core: Run) -> None:
    packages, only_it = ("rllm-hostile", "rllm-good"), {"RLLM_PLUGINS": "good,huge-error"}
    for arguments in (("workflows",), ("plugins", "--load", "--json"), ("plugins", "--load")):
        run = rllm_core(*arguments, packages=packages, **only_it)
        assert run.returncode == 0
        assert "RuntimeError: xxx" in run.stdout + run.stderr
        assert max(map(len, (run.stdout + run.stderr).splitlines())) < 2000


def test_an_error_that_cannot_say_what_it_is_breaks_its_own_plugin_only(manager: Build) -> None:
    plugins = manager("rllm-hostile", "rllm-good", settings=only("mute-error", "good"))
    assert list(plugins.providers(BackendProvider)) == ["good"]
    [info] = plugins.find("mute-error")
    assert info.error == "rllm_hostile/mute_error.py:9: Mute: its message is not available: ValueError"


@pytest.mark.parametrize("name", ["colours", "colourful-error"])
@pytest.mark.parametrize("arguments", [("workflows",), ("plugins", "--load", "--json"), ("--help",), ("train", "x")])
def test_no_text_of_a_plugin_controls_the_terminal(rllm_core: Run, name: str, arguments: tuple[str, ...]) -> None:
    run = rllm_core(*arguments, packages=("rllm-hostile", "rllm-good"), RLLM_PLUGINS=f"good,{name}")
    assert name in run.stdout + run.stderr
    assert not CONTROL & set(run.stdout + run.stderr)


def test_a_summary_that_is_no_line_of_text_is_refused() -> None:
    for summary in ("two\nlines", "\x1b[31mred", "\u202ebackwards", "\x9b31m"):
        with pytest.raises(ValueError, match="its summary must be one line of printable text"):
            WorkflowProvider(name="w", load="a:b", summary=summary)


# --------------------------------------------------------------------------------------------------------------------
# Selecting, training, ending


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closes", "colours", "huge-error", "leaves-behind", "mute-error", "writes"])
def test_something_else_trains_beside_them(
    rllm_core_process: Run, with_testing: str, tmp_path: Path, name: str
) -> None:
    told = tmp_path / "left"
    variables = {"PYTHONPATH": with_testing, "RLLM_PLUGINS": f"testing,good,{name}", "RLLM_TEST_LEFT": str(told)}
    run = rllm_core_process(*training("say_yes", tmp_path / "run"), **variables)
    if told.exists():
        os.kill(int(told.read_text(encoding="utf-8")), signal.SIGKILL)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"run: {tmp_path / 'run'}"


@pytest.mark.parametrize(
    ("workflow", "load"),
    [("aborts", "os:abort"), ("of-another", "rllm_good.stack:Echo"), ("no-class", "rllm_core:__version__")],
)
def test_what_is_no_workflow_is_not_called(
    rllm_core: Run, with_testing: str, tmp_path: Path, workflow: str, load: str
) -> None:
    variables = {"PYTHONPATH": with_testing, "RLLM_PLUGINS": "testing,good,elsewhere"}
    run = rllm_core(*training(workflow, tmp_path / "run"), **variables)
    assert run.returncode == 2
    assert run.stderr == (
        f"error: workflow {workflow!r} (rllm-hostile 6.6): {load} must be a subclass of rllm_core.workflow.Workflow\n"
    )


@pytest.mark.parametrize(
    ("name", "kept_by"), [("threads", "waits-for-ever, started by"), ("at-exit", "exit handlers of")]
)
def test_the_process_ends_whatever_a_plugin_leaves_in_it(
    installed: Callable[..., list[str]], tmp_path: Path, name: str, kept_by: str
) -> None:
    code = (
        "import sys\nfrom rllm_core import cli\ncli.EXIT_SECONDS = 0.5\n"
        "sys.argv = ['rllm-core', 'workflows', '--json']\ncli.main()"
    )
    environ = {**os.environ, "PYTHONPATH": beside(installed), "RLLM_PLUGINS": name, "RLLM_CONFIG_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0
    assert name in {row["name"] for row in json.loads(run.stdout)}
    way_out = f"(to disable it: rllm-core plugins disable {name})"
    assert run.stderr == f"forced exit, still running after 0.5 s: {kept_by} plugin {name!r} {way_out}\n"


def test_what_is_left_out_by_an_option_is_left_out_in_workers(
    installed: Callable[..., list[str]], tmp_path: Path
) -> None:
    code = (
        "import subprocess, sys\nfrom rllm_core import cli\n"
        "sys.argv = ['rllm-core', '--no-plugins=good', 'plugins', '--json']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "sys.stdout.flush()\nprint('---', flush=True)\n"
        "subprocess.run([sys.executable, '-m', 'rllm_core', 'plugins', '--json'], check=True)"
    )
    environ = {**os.environ, "PYTHONPATH": beside(installed), "RLLM_CONFIG_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=True)
    driver, _, worker = run.stdout.partition("---")
    assert json.loads(driver) == json.loads(worker)
    assert {row["name"]: row["status"] for row in json.loads(worker)}["good"] == "disabled"
