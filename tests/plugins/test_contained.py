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

from rllm_core.plugins import PluginManager
from rllm_core.plugins.settings import Settings
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


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("rllm-endless", "endless"), ("rllm-hostile", "endless-hook")])
def test_a_plugin_that_never_ends_is_named_and_ended(
    installed: Callable[..., list[str]], tmp_path: Path, package: str, name: str
) -> None:
    code = (
        "import sys\nfrom rllm_core import cli\nfrom rllm_core.plugins import watch\n"
        "watch.PLUGIN_DEADLINE_SECONDS = 5.0\nsys.argv = ['rllm-core', 'workflows', '--json']\ncli.main()"
    )
    sites = os.pathsep.join(installed(package, "rllm-good"))
    environ = {**os.environ, "PYTHONPATH": sites, "RLLM_PLUGINS": f"good,{name}", "RLLM_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 1
    assert not run.stdout
    assert f"plugin '{name}' ({package} " in run.stderr
    assert f"was being loaded; to disable the plugin: rllm-core plugins disable {name}" in run.stderr
    assert re.search(rf"{package.replace('-', '_')}/\w+\.py\", line \d+", run.stderr), "where it is"
    command = [sys.executable, "-P", "-m", "rllm_core", "workflows", "--json"]  # with the deadline of users
    left_out = subprocess.run(
        command, env={**environ, "RLLM_NO_PLUGINS": name}, capture_output=True, text=True, timeout=600, check=False
    )
    assert left_out.returncode == 0, left_out.stderr


def test_other_threads_load_plugins_too(manager: Build) -> None:
    plugins, found = manager("rllm-good", settings=only("good")), list[str]()
    thread = threading.Thread(target=lambda: found.extend(plugins.providers(BackendProvider)))
    thread.start()
    thread.join()
    assert found == ["good"]


def test_nothing_of_the_watch_is_left_after_a_load(manager: Build) -> None:
    threads, leave = set(threading.enumerate()), os._exit
    manager("rllm-good", settings=only("good")).providers(BackendProvider)
    deadline = time.monotonic() + 600
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert os._exit is leave


# --------------------------------------------------------------------------------------------------------------------
# Streams


def test_a_listing_is_one_json_document_whatever_a_plugin_prints(rllm_core_process: Run) -> None:
    run = rllm_core_process("workflows", "--json", packages=("rllm-hostile", "rllm-good"), RLLM_PLUGINS="good,writes")
    assert run.returncode == 0, run.stderr
    assert {"echo", "writes"} <= {row["name"] for row in json.loads(run.stdout)}
    assert "] printed by the module\n] printed by a hook\n" in run.stderr


# --------------------------------------------------------------------------------------------------------------------
# Lines


@pytest.mark.slow
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


@pytest.mark.slow
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
@pytest.mark.parametrize("name", ["colours", "huge-error", "leaves-behind", "mute-error", "writes"])
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


EXIT = (
    "import sys\nfrom rllm_core import cli\nfrom rllm_core.cli import process_exit\n"
    "process_exit.EXIT_SECONDS = process_exit.EXIT_HANDLERS_SECONDS = 0.5\n"
    "sys.argv = ['rllm-core', 'workflows', '--json']\ncli.main()"
)


@pytest.fixture
def ended(installed: Callable[..., list[str]], tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Provides ``ended(plugin)``: a listing in a process that waits half a second for what a plugin has left in it."""

    def run(plugin: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": beside(installed), "RLLM_PLUGINS": plugin}
        environ["RLLM_CONFIG_DIR"] = str(tmp_path)
        command = [sys.executable, "-P", "-c", EXIT]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        assert plugin in {row["name"] for row in json.loads(run.stdout)}
        return run

    return run


@pytest.mark.slow
def test_the_process_ends_although_a_plugin_leaves_a_thread_in_it(
    ended: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    run = ended("threads")
    assert run.returncode == 0
    assert run.stderr == (
        "forced exit, still running after 0.5 s: waits-for-ever, started by plugin 'threads' "
        "(to disable it: rllm-core plugins disable threads)\n"
    )


@pytest.mark.slow
def test_the_process_ends_although_an_exit_handler_does_not(
    ended: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    run = ended("at-exit")
    assert run.returncode == 1
    assert re.search(r'rllm_hostile/at_exit\.py", line \d+ in forever', run.stderr), "faulthandler has written where"


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
