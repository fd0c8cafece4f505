"""Builds, installs, lists, tests and uses unmodified packages of ``rllm-core new``, in separate processes.

Those that train are forks of a process that has imported torch.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from forked import Forks
from made import NAMES, environment

from rllm_devkit.templates import PackageNames, try_package

pytestmark = pytest.mark.slow

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]
Run = Callable[..., subprocess.CompletedProcess[str]]

every_kind = pytest.mark.parametrize("kind", NAMES)


@pytest.fixture(scope="module")
def wheels(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds the wheel of each package; returns the paths by kind."""
    target = tmp_path_factory.mktemp("wheels")
    wheel = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(target)]
    subprocess.run([*wheel, *map(str, packages.values())], check=True)
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in target.iterdir()}
    return {kind: built[folder.name] for kind, folder in packages.items()}


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which all packages are installed."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "install", *OFFLINE, "--target", str(target), *map(str, wheels.values())], check=True)
    return target


@every_kind
def test_the_wheel(wheels: dict[str, Path], kind: str) -> None:
    module = module_of(kind)
    with zipfile.ZipFile(wheels[kind]) as archive:
        packed = set(archive.namelist())
    about = f"{module}-0.1.0.dist-info/"
    assert packed == {
        f"{module}/__init__.py",
        f"{module}/{kind}.py",
        f"{module}/py.typed",
        *([f"{module}/parser.py"] if kind in ("backend", "engine") else []),
        *(about + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")),
    }


@pytest.fixture(scope="module")
def listed(rllm_core: Run, site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a listing that loads every plugin says of each, by name."""
    rows = json.loads(rllm_core("plugins", "--load", "--json", cwd=tmp_path_factory.mktemp("listed"), site=site).stdout)
    return {row["name"]: row for row in rows}


IMPORTS = """
import importlib, json, os, sys
heavy = {}
for name in sys.argv[1:]:
    ours, theirs = os.pipe()
    if not os.fork():  # each as the first of its process
        importlib.import_module(name)
        os.write(theirs, json.dumps(sorted({"torch", "transformers", "numpy"} & set(sys.modules))).encode())
        os._exit(0)
    os.close(theirs)
    heavy[name] = json.loads(os.read(ours, 1000))
print(json.dumps(heavy))
"""


@pytest.fixture(scope="module")
def heavy(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The heavy modules that each package imports, by its module."""
    folder = tmp_path_factory.mktemp("heavy")
    command = [sys.executable, "-P", "-c", IMPORTS, *map(module_of, NAMES)]
    done = subprocess.run(command, env=environment(folder, site), cwd=folder, check=True, capture_output=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def module_of(kind: str) -> str:
    return "rllm_" + NAMES[kind].replace("-", "_")


@every_kind
def test_it_is_listed_healthy_and_light(
    listed: dict[str, dict[str, Any]], heavy: dict[str, list[str]], kind: str
) -> None:
    name = NAMES[kind]
    plugin = listed[name]
    assert (plugin["status"], plugin["error"], plugin["warnings"]) == ("loaded", None, [])
    if kind == "observer":  # it provides nothing
        assert "on_batch_end" in plugin["hooks"]
    else:
        assert name in {provided["name"] for provided in plugin["provides"]}
    assert heavy[module_of(kind)] == []


@every_kind
def test_its_own_tests_pass(packages: dict[str, Path], site: Path, tmp_path: Path, kind: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=packages[kind],
        env=environment(tmp_path, site),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    last = result.stdout.splitlines()[-1]
    # A command and an observer have no contract beyond being loaded.
    assert int(last.partition(" passed")[0]) > (2 if kind in ("command", "observer") else 10)
    assert "warning" not in last


# One with one provider of each sort of contract, with two, and with none. The other kinds are covered by their own
# tests, which check the same contracts, and all share one project file.
@pytest.mark.parametrize("kind", ["workflow", "backend", "reward", "command"])
def test_rllm_core_finds_nothing_wrong_but_what_is_the_templates(
    rllm_core: Run, site: Path, tmp_path: Path, kind: str
) -> None:
    alone = f"{NAMES[kind]},devkit"  # the check of a workflow or a backend probes all others, too
    checked = rllm_core("plugins", "check", NAMES[kind], "--json", cwd=tmp_path, site=site, RLLM_PLUGINS=alone)
    assert checked.returncode == 0, checked.stdout
    document = json.loads(checked.stdout)
    assert document["contract"] == "passed"
    [packaging] = [group for group in document["groups"] if group["kind"] == "packaging"]
    [warning] = [check for check in packaging["checks"] if check["outcome"] == "warning"]
    assert warning["name"] == "template"
    for leftover in ("description of pyproject.toml", "README.md"):
        assert f"{leftover}: " in warning["detail"]
    [provider] = [group["kind"] for group in document["groups"][2:3]] or [None]
    assert provider is None or f"summary of {provider} {NAMES[kind]!r}: " in warning["detail"]


def go_on(kind: str, folder: str = "") -> list[str]:
    """Returns the arguments of the first command printed as the next step."""
    program, *arguments = shlex.split(try_package(kind, PackageNames(NAMES[kind]), folder)[0])
    assert program == "rllm-core"
    return arguments


Train = Callable[..., None]


@pytest.fixture
def train(forking: Forks, site: Path, tmp_path: Path) -> Train:
    """``train(*arguments)``: runs a command that trains and succeeds, beside all packages."""

    def run(*arguments: str) -> None:
        around = {"folder": tmp_path, "environment": environment(tmp_path, site), "path": [str(site)]}
        process = forking.start(arguments, output=tmp_path / "output", **around)
        assert process.wait() == 0, process.err

    return run


def test_packages_of_strangers_train_together(rllm_core: Run, train: Train, site: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = go_on("workflow")
    for kind in ("parser", "loss", "tracker", "estimator", "correction", "scorer", "sampler"):
        command, workflow, *options = go_on(kind)
        assert (command, workflow, options[:2]) == ("train", "sort", ["--backend", "local"])
        arguments += options[2:]
    workflow, loss, tracker, estimator = (NAMES[kind] for kind in ("workflow", "loss", "tracker", "estimator"))
    train(
        *arguments, "--run-dir", str(run_dir), "-o", "algorithm.loss_options.width=0.3",
        "-o", f"{tracker}.metrics=['reward_mean']", "-o", "training.steps=3", "-o", f"{workflow}.letters=abcde",
    )  # fmt: skip
    config = tomllib.loads((run_dir / "run.toml").read_text())
    assert (config["workflow"], config["parser"], config["algorithm"]["loss"]) == (workflow, NAMES["parser"], loss)
    assert (config["algorithm"]["name"], config["algorithm"]["corrections"]) == (estimator, [NAMES["correction"]])
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    assert all(step["grad_norm"] > 0 for step in metrics)
    assert all(step["segment_breaks"] == 0 for step in metrics)
    assert all(0 <= step["reward_mean"] <= 1 for step in metrics)
    assert all(f"workflow/{NAMES['scorer']}/value" in step for step in metrics)
    assert all("sampler/solved_share" in step for step in metrics[1:])
    assert all(0 < step["correction_weight_mean"] <= 1 for step in metrics)
    written = (run_dir / "trackers" / tracker / "metrics.csv").read_text().splitlines()
    assert written == ["step,metric,value", *(f"{step['step']},reward_mean,{step['reward_mean']}" for step in metrics)]
    assert rllm_core("verify", str(run_dir), cwd=tmp_path, site=site).returncode == 0
    lines = (run_dir / f"{NAMES['observer']}.log").read_text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (5, "start 0 at step 0", "completed at step 3")
    for step in metrics:
        assert lines[step["step"]].startswith(f"step {step['step']}: reward {step['reward_mean']:.3f}; rollouts: ")
    drawn = rllm_core(NAMES["command"], str(run_dir), cwd=tmp_path, site=site)
    assert [float(line.split()[1]) for line in drawn.stdout.splitlines()] == [
        pytest.approx(step["reward_mean"], abs=1e-3) for step in metrics
    ]


def rewards(run_dir: Path) -> list[float]:
    return [json.loads(line)["reward_mean"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_is_learned_with_an_estimator(train: Train, packages: dict[str, Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _, _, *with_estimator = go_on("estimator")
    arguments = [*go_on("reward", str(packages["reward"])), *with_estimator[2:], "--run-dir", str(run_dir)]
    fewer = ("-o", "training.steps=20", "-o", "training.validation_rollouts=0")
    train(*arguments, *fewer)
    algorithm = tomllib.loads((run_dir / "run.toml").read_text())["algorithm"]
    assert algorithm["name"] == NAMES["estimator"]
    assert fmean(rewards(run_dir)[-3:]) > fmean(rewards(run_dir)[:3]) + 0.1


def test_the_engine_is_evaluated(rllm_core: Run, site: Path, tmp_path: Path) -> None:
    result = rllm_core(*go_on("engine"), "--tasks", "20", "-n", "4", "--json", cwd=tmp_path, site=site)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert (measured["tasks"], measured["failed"]) == (20, 0)
    assert measured["reward_mean"] < 0.1


def test_the_backend_learns(train: Train, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fewer = ("-o", "sort.letters=abcd", "-o", "training.steps=30")
    train(*go_on("backend"), *fewer, "--run-dir", str(run_dir))
    assert fmean(rewards(run_dir)[-5:]) > 3 * fmean(rewards(run_dir)[:5]) > 0
