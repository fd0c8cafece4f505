"""Tests that other plugins work next to every sloppy or hostile one, and that errors name the right plugin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
from hostile_site import training
from in_process import run_in_process
from misfit_site import CHANGERS, MISFITS, SURVIVORS, malformed, write_site

from rllm_core import cli
from rllm_core.cli import Session
from rllm_core.cli.entry import run_command
from rllm_core.plugins import PluginManager
from rllm_core.plugins.discovery import Candidate, find_plugins
from rllm_core.plugins.settings import Settings
from rllm_core.plugins.surroundings import Surroundings

LABEL = "rllm-misfits 0.1"
CHECKED = ("raises", "exits", "undeclared", "hook-raises", "clears", "leaves", "crashes", "dies")
PLACES = {"plugin", "distribution", "version", "file", "line", "error"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_site(tmp_path_factory.mktemp("misfits"))


@pytest.fixture
def candidates(site: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Candidate, ...]]:
    """Plugins of the site, importable in this process until the test ends."""
    monkeypatch.syspath_prepend(site)
    yield find_plugins(importlib_metadata.distributions(path=[site]))
    for module in [name for name in sys.modules if name.partition(".")[0] in ("misfits", "misfit_victim")]:
        del sys.modules[module]


def manager_of(candidates: tuple[Candidate, ...], *names: str) -> PluginManager:
    return PluginManager(candidates, Settings(only=frozenset(names)))


def in_process(manager: PluginManager, *arguments: str) -> int:
    """Runs the command line in this process, with these plugins."""
    current = Session()
    current.__dict__["plugins"] = manager
    with pytest.raises(SystemExit) as ended:
        run_command(current, arguments)
    return int(ended.value.code or 0)


def environment(path: str, cwd: Path, variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables of a command that finds a folder ahead of the installed packages."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("RLLM_", "PYDANTIC_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environ.get("PYTHONPATH")]))
    return {**environ, "RLLM_CONFIG_DIR": str(cwd / "config"), **variables}


def command_line(*arguments: str, path: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in this process."""
    environ = environment(path, cwd, variables)
    return run_in_process(arguments, folder=cwd, environment=environ, path=path.split(os.pathsep))


def process(
    *arguments: str, path: str, cwd: Path, code: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a separate process, which a plugin may end."""
    begin = ["-m", "rllm_core"] if code is None else ["-c", f"import sys\nsys.argv[0] = 'rllm-core'\n{code}"]
    return subprocess.run(
        [sys.executable, "-P", *begin, *arguments],
        env=environment(path, cwd, variables), cwd=cwd, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------
# The listing and doctor, of all at once


def test_there_are_many() -> None:
    assert len(MISFITS) >= 24
    assert len(CHANGERS) >= 8


@pytest.mark.slow
def test_the_listing_reads_metadata_only_and_so_does_doctor(site: str, tmp_path: Path) -> None:
    listed = command_line("plugins", "--json", path=site, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    rows = {row["name"]: row for row in json.loads(listed.stdout) if row["package"] == "rllm-misfits"}
    assert rows.keys() == {*MISFITS, "play"}
    assert {row["status"] for row in rows.values()} == {"available"}
    found = command_line("doctor", "--json", path=site, cwd=tmp_path)
    assert found.returncode in (0, 1), found.stderr
    assert not [p for p in json.loads(found.stdout)["problems"] if "misfit" in p["what"] + p["problem"]]


@pytest.mark.slow
def test_the_health_of_each_is_told_with_its_place(site: str, tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    # What spins until the deadline needs no long one, and takes a processor from the others.
    for names, seconds in ((["spins"], 5), ([name for name in MISFITS if name != "spins"], 10)):
        listing = ("-v", "plugins", "--load", "--json", f"--deadline-seconds={seconds}")
        run = command_line(*listing, path=site, cwd=tmp_path, RLLM_PLUGINS=",".join(names))
        assert run.returncode == 0, run.stderr
        rows |= {row["name"]: row for row in json.loads(run.stdout) if row["name"] in names}
    assert rows.keys() == MISFITS.keys()
    for name, misfit in MISFITS.items():
        row = rows[name]
        assert row["status"] == ("broken" if misfit.error else "loaded"), row
        if misfit.error:
            assert re.search(misfit.error, row["error"]), row["error"]
            assert row["failure"].keys() == PLACES
            assert row["failure"]["distribution"] == "rllm-misfits"
            assert row["failure"]["plugin"] == name
            stated = re.search(r"(misfits/\w+\.py):(\d+)", row["error"])
            if stated is not None:
                assert f"{row['failure']['file']}:{row['failure']['line']}" == f"{stated[1]}:{stated[2]}"
        else:
            assert row["failure"] is None
        told = " ".join(row["warnings"])
        assert misfit.changed in told
        assert bool(misfit.changed) == ("changes" in told)
        assert "pip install --upgrade" not in str(row["error"])
    assert "plugin 'raises' (rllm-misfits 0.1):\nTraceback (most recent call last):" in run.stderr, "-v shows them"


# --------------------------------------------------------------------------------------------------------------------
# Next to something else


@pytest.mark.slow
@pytest.mark.parametrize("name", SURVIVORS)
def test_something_else_trains_beside_it_and_nobody_else_is_blamed(
    candidates: tuple[Candidate, ...], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, threads = Surroundings.now(), set(threading.enumerate())
    manager = manager_of(candidates, name, "testing", "zz-victim")
    with pytest.warns(ImportWarning, match="an honest warning"):
        assert in_process(manager, *training("say_yes", tmp_path / "run")) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed"
    misfit = MISFITS[name]
    [info] = manager.find(name)
    assert info.status == ("broken" if misfit.error else "loaded")
    [victim] = manager.find("zz-victim")
    assert victim.status == "loaded", victim.error
    told = [record.getMessage() for record in caplog.records]
    blamed = [line for line in told if line.startswith("plugin ")]
    assert all(line.startswith(f"plugin {name!r} ({LABEL})") for line in blamed), blamed
    assert bool(blamed) == bool(misfit.error or misfit.changed)
    if misfit.changed:
        assert misfit.changed in blamed[0]
    now = Surroundings.now()
    for part in ("environ", "directory", "recursion_limit", "handlers", "locale", "filters", "arguments"):
        assert getattr(now, part) == getattr(before, part), part
    assert now.path[: len(before.path)] == before.path
    left = {thread for thread in threading.enumerate() if not thread.daemon} - threads
    for thread in left:
        if thread.name != "waits":
            thread.join(timeout=60)  # a pool that was told to stop may need a moment on a busy machine
    assert [thread.name for thread in left if thread.is_alive()] == (["waits"] if name == "leaves" else [])
    if name == "leaves":
        sys.modules["misfits.leaves"].released.set()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_the_check_has_a_verdict(site: str, tmp_path: Path, name: str) -> None:
    """Without the others, of which some would use up the deadline; `test_check.py` has a plugin beside such ones."""
    alone = {"RLLM_PLUGINS": f"{name},devkit"}
    run = command_line("plugins", "check", name, "--json", "--deadline-seconds=60", path=site, cwd=tmp_path, **alone)
    assert run.returncode == 1, run.stderr
    misfit, document = MISFITS[name], json.loads(run.stdout)
    [about] = [group for group in document["groups"] if group["kind"] == "plugin"]
    results = {result["name"]: result for result in about["checks"]}
    if misfit.error:
        assert re.search(misfit.error, results["import"]["detail"])
        assert about["failure"].keys() == PLACES
    else:
        assert results["import"]["outcome"] == "passed"
        assert results["surroundings"]["outcome"] == ("failed" if misfit.changed else "passed")
        assert misfit.changed in results["surroundings"]["detail"]


# --------------------------------------------------------------------------------------------------------------------
# The process ends


WAY_OUT = "to disable the plugin: rllm-core plugins disable {name}, or RLLM_NO_PLUGINS={name}"


@pytest.mark.parametrize(("name", "code"), [("dies", 7), ("crashes", -11), ("aborts", -6)])
def test_when_the_process_dies_it_says_what_was_being_loaded(site: str, tmp_path: Path, name: str, code: int) -> None:
    run = process("workflows", path=site, cwd=tmp_path, RLLM_PLUGINS=f"testing,{name}")
    assert run.returncode == code
    named = f"plugin {name!r} ({LABEL}) was being loaded; {WAY_OUT.format(name=name)}"
    if name == "dies":
        assert run.stderr.splitlines()[-1] == f"the process ended while {named}"
    else:  # faulthandler has written where it was, and what was being loaded
        assert f"misfits/{name}.py" in run.stderr
        assert re.findall(r"line \d+ in (plugin .*)", run.stderr) == [named], "and nothing else"
    left_out = process("workflows", path=site, cwd=tmp_path, RLLM_PLUGINS=f"testing,{name}", RLLM_NO_PLUGINS=name)
    assert left_out.returncode == 0
    assert "being loaded" not in left_out.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spins", "holds"])
def test_what_never_ends_is_named_and_ended(site: str, tmp_path: Path, name: str) -> None:
    code = (
        "from rllm_core import cli\nfrom rllm_core.plugins import watch\n"
        "watch.SLOW_IMPORT_SECONDS, watch.PLUGIN_DEADLINE_SECONDS = 0.2, 5.0\ncli.main()"
    )
    run = process("workflows", "--json", path=site, cwd=tmp_path, code=code, RLLM_PLUGINS=f"{name},zz-victim")
    assert run.returncode == 1
    assert f"misfits/{name}.py" in run.stderr
    assert f"plugin {name!r} ({LABEL}) was being loaded; {WAY_OUT.format(name=name)}" in run.stderr
    if name == "spins":  # the other one lets no other thread run
        note, *_ = run.stderr.splitlines()
        assert re.search(r"^still importing plugin 'spins' .* after 0\.2 s, now at .*spins\.py:[34]; if it never", note)


def test_the_name_is_written_however_deep_the_crash_is(site: str, tmp_path: Path) -> None:
    """`faulthandler` prints a hundred calls of a thread."""
    run = process("workflows", path=site, cwd=tmp_path, RLLM_PLUGINS="testing,crashes-deeply")
    assert run.returncode == -11
    assert "in deep\n  ...\n" in run.stderr, "its own calls are cut off"
    assert f"plugin 'crashes-deeply' ({LABEL}) was being loaded; {WAY_OUT.format(name='crashes-deeply')}" in run.stderr


def test_a_class_that_imports_for_long_is_not_called_a_plugin_that_hangs(
    candidates: tuple[Candidate, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rllm_core.plugins import manager as manager_module
    from rllm_core.plugins import watch
    from rllm_core.providers import WorkflowProvider

    manager = manager_of(candidates, "play")
    chosen = manager.select(WorkflowProvider, "unbuilt")
    monkeypatch.setattr(watch, "SLOW_IMPORT_SECONDS", 0.01)
    noted = threading.Event()
    monkeypatch.setattr(watch.logger, "warning", lambda *args: (noted.set(), caplog.records.append(args)))
    resolve = manager_module.resolve
    monkeypatch.setattr(manager_module, "resolve", lambda target: noted.wait(30) and resolve(target))
    manager.load(chosen)
    [(form, *values)] = [record for record in caplog.records if isinstance(record, tuple)]
    line = form % tuple(values)
    assert line.startswith(f"still importing misfits.play:Unbuilt of plugin 'play' ({LABEL}) after 0.01 s, now at ")
    assert "--load" not in line
    assert "disable" not in line


# --------------------------------------------------------------------------------------------------------------------
# Later failures


@pytest.mark.parametrize(
    ("arguments", "problem", "place"),
    [
        (["train", "fussy", "-o", "fussy.level=2"], "TypeError: isinstance() arg 2", "misfits/play.py:13"),
        (["train", "unbuilt"], "KeyError: 'calculator'", "misfits/play.py:23"),
        (["train", "deaf-workflow"], "TypeError: Deaf.__init__() takes 1 positional", "misfits/play.py:27"),
        (["train", "no-tasks"], "ZeroDivisionError: division by zero", "misfits/play.py:33"),
        (["eval", "no-tasks"], "ZeroDivisionError: division by zero", "misfits/play.py:33"),
        (["stumble"], "KeyError: 'step'", "misfits/command.py:6"),
        (["train", "explodes"], "TypeError: must be real number, not str", "misfits/explodes.py:3"),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, list) and len(value) > 1 else "",
)
def test_a_failure_names_its_plugin_its_distribution_and_its_line(
    candidates: tuple[Candidate, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
    place: str,
) -> None:
    manager = manager_of(candidates, "play", "testing")
    options = ["--backend", "scripted", "--run-dir", str(tmp_path / "run")] if arguments[0] == "train" else []
    options = ["--backend", "scripted"] if arguments[0] == "eval" else options
    options += [] if arguments == ["stumble"] else ["--json"]
    assert in_process(manager, *arguments, *options) in (1, 2)
    shown = capsys.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert re.search(problem.replace("(", r"\(").replace(")", r"\)").replace("[", r"\["), line)
    assert place in line
    assert LABEL in line
    assert "Traceback" not in shown.err
    if "--json" in options:
        failure = json.loads(shown.out.splitlines()[-1])["failure"]
        assert failure.keys() == PLACES
        assert (failure["distribution"], failure["version"]) == ("rllm-misfits", "0.1")
        assert f"{failure['file']}:{failure['line']}".endswith(place)
    assert in_process(manager_of(candidates, "play", "testing"), "-v", *arguments, *options) in (1, 2)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_completes_ends_with_the_first_failures_in_full(
    candidates: tuple[Candidate, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = manager_of(candidates, "play", "testing")
    options = ["-o", "rollout.max_attempts=1", "-o", "training.trackers=['leaky']", "-o", "training.steps=3"]
    assert in_process(manager, *training("fails", tmp_path / "run"), *options) == 0
    shown = capsys.readouterr()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed"
    by_reason = {failure["reason"]: failure for failure in summary["failures"]}
    assert by_reason.keys() == {"error", "observer", "tracker"}
    assert "LookupError: no such tool" in by_reason["error"]["error"]
    assert by_reason["error"]["task"].endswith("1")
    assert by_reason["observer"]["count"] == 3
    assert by_reason["observer"]["error"] == (
        f"on_batch_end failed: plugin 'play' ({LABEL}), misfits/records.py:31: ValueError: observed too much"
    )
    assert by_reason["tracker"]["error"] == f"{LABEL}, misfits/leaky.py:12: OSError: no room"
    closing = [line for line in shown.err.splitlines() if line.startswith("failed, ")]
    assert closing == [
        f"failed, {f['count']} x {f['reason']}: {f['error']}"
        + {"error": f" (the first: task {f['task']}, {f['where']})", "tracker": " (the first: tracker 'leaky')"}.get(
            f["reason"], ""
        )
        for f in summary["failures"]
    ]
    assert shown.err.rstrip().splitlines()[-len(closing) :] == closing


# --------------------------------------------------------------------------------------------------------------------
# Metadata of any distribution


@pytest.mark.slow
def test_one_malformed_file_of_any_distribution_is_named_and_breaks_nothing(site: str, tmp_path: Path) -> None:
    path = os.pathsep.join([malformed(tmp_path / "odd"), site])
    only = {"RLLM_PLUGINS": "testing,odd-thing,devkit"}
    folder = tmp_path / "odd" / "odd_thing-3.0.dist-info"
    problem = (
        f"its entry_points.txt ({folder}) cannot be read: line 2, 'just words', has no '='; fix it, or: "
        "pip uninstall odd-thing"
    )
    trained = process(*training("say_yes", tmp_path / "run"), path=path, cwd=tmp_path, **only)
    assert trained.returncode == 0, trained.stderr
    assert f"plugin 'odd-thing' (odd-thing 3.0): {problem}" in trained.stderr
    made = process("new", "workflow", "mine", "--into", str(tmp_path / "mine"), path=path, cwd=tmp_path, **only)
    assert made.returncode == 0, made.stderr
    listed = process("plugins", "--json", path=path, cwd=tmp_path, **only)
    [row] = [row for row in json.loads(listed.stdout) if row["name"] == "odd-thing"]
    assert (row["status"], row["error"]) == ("broken", problem)
    doctor = process("doctor", "--json", path=path, cwd=tmp_path, **only)
    [found] = [p for p in json.loads(doctor.stdout)["problems"] if "odd-thing" in p["what"]]
    assert found == {"what": "plugin odd-thing (odd-thing 3.0)", "problem": problem, "mend": None}
    for run in (process, command_line):
        checked = run("plugins", "check", "odd-thing", path=path, cwd=tmp_path, **only)
        assert checked.returncode == 1
        assert "cannot be read: line 2" in " ".join(checked.stdout.split())


def test_what_reads_all_entry_points_is_not_blamed_for_one_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rllm_core.plugins import requirements

    found = find_plugins(importlib_metadata.distributions(path=[malformed(tmp_path / "odd")]))
    monkeypatch.setattr(requirements, "installed_plugins", lambda: found)
    monkeypatch.syspath_prepend(str(tmp_path / "odd"))
    with pytest.raises(TypeError) as raised:
        list(importlib_metadata.entry_points(group="torch.backends"))
    other = Candidate("local", "rllm-local", "0.1.0", "rllm_local")
    assert str(requirements.remedy(other, raised.value)).startswith(
        "plugin 'odd-thing' (odd-thing 3.0) is the cause: its entry_points.txt ("
    )


def test_the_process_of_somebody_else_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic's plugins are disabled, and hung imports ended, in the command's own process only."""
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["plugins", "--json"])
    assert "PYDANTIC_DISABLE_PLUGINS" not in os.environ
    from rllm_core.plugins import watch

    assert not watch._is_own_process
