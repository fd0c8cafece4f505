from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from in_process import run_in_process
from rllm_environments import catalog
from rllm_environments.reasoning_gym import datasets
from rllm_environments.reasoning_gym.workflow import ReasoningGymWorkflow

FOUND = datasets.AUDIT_FILES.read().environments


@pytest.fixture
def command(tmp_path):
    return lambda *arguments: run_in_process(["environments", *arguments], folder=tmp_path, environment=os.environ)


def test_ecosystems_are_listed_with_counts_from_their_audits(command):
    done = command("list")
    assert done.returncode == 0
    [row] = [line.split() for line in done.stdout.splitlines() if line.startswith("reasoning_gym")]
    played, refused = (sum(bool(found[key]) for found in FOUND.values()) for key in ("played", "refused"))
    assert row[1:] == [str(len(FOUND)), str(played), str(len(FOUND) - played - refused), str(refused)]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_environments_are_listed_with_their_states(command):
    done = command("list", "reasoning_gym")
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[1:]}
    assert states.keys() == FOUND.keys()
    assert states["spell_backward"] == "played"
    assert states["coin_flip"] == "refused"
    assert states["game_of_life_halting"] == "refused"
    listed = json.loads(command("list", "reasoning_gym", "--json").stdout)["reasoning_gym"]
    assert [each["name"] for each in listed] == sorted(FOUND)
    assert all({"turns", "players", "needs", "audited", "played", "refused"} <= each.keys() for each in listed)


def test_an_environment_is_described(command):
    done = command("show", "reasoning_gym/n_queens")
    assert "needs: a sandbox that isolates" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert json.loads(command("show", "reasoning_gym/n_queens", "--json").stdout)["executes_answers"] is True
    assert "refused: " in command("show", "reasoning_gym/list_functions").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "reasoning_gym/n_queen"), "did you mean n_queens"),
        (("show", "reasoning_gym"), "write ECOSYSTEM/NAME"),
        (("list", "sort"), "'sort' does not exist; choose one of: "),
        (("audit", "reasoning_gym/chain_sum", "--write"), "leave /NAME out"),
        (("audit", "reasoning_gym/chain_summ"), "did you mean chain_sum"),
    ],
)
def test_what_does_not_exist_is_an_error_of_one_line(command, arguments, message):
    done = command(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_audit_without_the_package_says_how_to_install_it(command, monkeypatch):
    monkeypatch.setattr(catalog, "installed_version", lambda distribution: None)
    done = command("audit", "reasoning_gym/chain_sum")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: workflow 'reasoning_gym' needs reasoning-gym: pip install ")


def test_an_audit_that_differs_from_the_committed_one_fails(command, monkeypatch):
    def audit(variants):
        yield "chain_sum", {**FOUND["chain_sum"], "junk": 0.75}

    monkeypatch.setattr("rllm_environments.reasoning_gym.audit.audits", audit)
    done = command("audit", "reasoning_gym/chain_sum")
    assert done.returncode == 1
    assert "not as committed" in done.stdout
    done = command("audit", "reasoning_gym/chain_sum", "--json")
    assert json.loads(done.stdout)["changed"] == ["chain_sum"]


def test_an_audit_is_written_and_read_again(tmp_path, monkeypatch):
    package = tmp_path / "some_audits"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    files = catalog.AuditFiles("reasoning_gym", "reasoning-gym", "some_audits")
    assert not files.read().environments
    path = files.write({"b": {"played": True}, "a": {"refused": "why"}})
    assert path == package / "audits" / f"reasoning_gym-{files.read().version}.json"
    assert files.read().environments == {"a": {"refused": "why"}, "b": {"played": True}}
    assert list(files.read().environments) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["workflows"], "reasoning_gym"), (["environments", "list"], "textarena"),
     (["environments", "list", "reasoning_gym"], "spell_backward")],
)  # fmt: skip
def test_listing_imports_no_package_of_environments(tmp_path, arguments, shown):
    packages = {"reasoning_gym", "sympy", "torch", "textarena", "gymnasium", "minigrid", "websockets"}
    assert all(map(importlib.util.find_spec, packages))
    code = (
        "import sys; from rllm_core.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass\n"
        f"assert not {packages} & sys.modules.keys(), {packages} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_an_audit_that_is_not_kept_is_only_shown(command, monkeypatch):
    def audit(variants):
        yield "chain_sum", {"refused": "why"}

    monkeypatch.setattr("rllm_environments.reasoning_gym.audit.audits", audit)
    monkeypatch.delattr(ReasoningGymWorkflow, "audit_files")
    done = command("audit", "reasoning_gym/chain_sum")
    assert (done.returncode, done.stdout) == (0, "chain_sum: refused\n")
    refused = command("audit", "reasoning_gym", "--write")
    assert refused.returncode != 0
    assert "leave out --write" in refused.stderr
