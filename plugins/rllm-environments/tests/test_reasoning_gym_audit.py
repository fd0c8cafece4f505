from __future__ import annotations

import pytest
from rllm_environments import catalog
from rllm_environments.reasoning_gym import datasets
from rllm_environments.reasoning_gym.audit import audits, names

COMMITTED = datasets.AUDIT_FILES.read()
SAMPLE = ["chain_sum", "composite", "game_of_life_halting"]


def test_the_audit_is_of_the_installed_version():
    assert COMMITTED.version == catalog.installed_version("reasoning-gym")


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    """Takes the files that some generators write, as that of codeio; child processes begin in this folder, too."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMITTED.environments))
def test_each_audit_is_as_committed(name):
    [(_, found)] = audits([name])
    assert found == COMMITTED.environments[name]


def test_a_sample_of_the_audit_is_as_committed():
    assert dict(audits(SAMPLE)) == {name: COMMITTED.environments[name] for name in SAMPLE}


def test_every_dataset_is_listed_and_most_were_played():
    assert sorted(COMMITTED.environments) == names()
    counted = COMMITTED.environments.values()
    assert sum(found["played"] for found in counted) >= 94
    assert all(found["played"] <= found["audited"] for found in counted)
    assert all(bool(found["refused"]) != found["audited"] for found in counted)
