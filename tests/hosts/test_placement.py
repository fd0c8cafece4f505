"""Tests that a workflow's record decides where its rollouts may run."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_core.assembly.merging import merged_by_choice
from rllm_core.assembly.placement import host_notes, with_host
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.providers import WorkflowProvider


def record(**wants: bool) -> WorkflowProvider:
    return WorkflowProvider(name="game", load="game:Game", summary="A game.", **wants)


def placed(wants: dict[str, bool], **rollout: Any) -> tuple[str, int | None]:
    """The host, and the rollouts per worker."""
    config = RunConfig.model_validate({"workflow": "game", "rollout": rollout})
    chosen = with_host(config, record(**wants)).rollout
    return chosen.host, chosen.rollouts_per_worker


@pytest.mark.parametrize(
    ("wants", "rollout", "expected"),
    [
        ({}, {}, ("inline", None)),
        ({}, {"workers": 2}, ("processes", None)),
        ({}, {"host": "ray"}, ("ray", None)),
        ({"blocks": True}, {}, ("processes", None)),
        ({"blocks": True}, {"host": "ray"}, ("ray", None)),
        ({"blocks": True}, {"rollouts_per_worker": 4}, ("processes", 4)),
        ({"global_state": True}, {}, ("processes", 1)),
        ({"global_state": True}, {"host": "ray", "rollouts_per_worker": 1}, ("ray", 1)),
        ({"waits_for_others": True}, {}, ("inline", None)),
    ],
)
def test_rollouts_run_where_the_workflow_can(
    wants: dict[str, bool], rollout: dict[str, Any], expected: tuple[str, int | None]
) -> None:
    assert placed(wants, **rollout) == expected


def test_settings_of_workers_are_dropped_if_a_higher_layer_replaces_the_workers() -> None:
    before = {"rollout": {"host": "processes", "workers": 2, "rollouts_per_worker": 3, "max_attempts": 4}}
    merged = merged_by_choice(before, {"rollout": {"host": "inline"}})
    assert merged == {"rollout": {"host": "inline", "max_attempts": 4}}
    assert merged_by_choice(before, {"rollout": {"host": "ray"}})["rollout"]["workers"] == 2


@pytest.mark.parametrize(
    ("wants", "rollout", "message"),
    [
        ({"blocks": True}, {"host": "inline"}, "'inline' does not work with workflow 'game', which blocks its process"),
        ({"global_state": True}, {"host": "inline"}, "which changes the state of its process; leave it out, or choose"),
        (
            {"global_state": True},
            {"rollouts_per_worker": 8},
            "rollouts_per_worker = 8 does not work with workflow 'game'",
        ),
        ({}, {"host": "inline", "python": "python3"}, "rollout.python has no effect with rollout.host = 'inline'"),
    ],
)
def test_what_cannot_work_is_refused(wants: dict[str, bool], rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(wants, **rollout)
    assert message in str(refused.value)


def test_a_dry_run_says_what_the_workflow_wants() -> None:
    config = RunConfig(workflow="game")
    assert host_notes(config, record()) == []
    assert "blocks its process" in host_notes(config, record(blocks=True))[0]
    assert "a worker of its own" in host_notes(config, record(global_state=True))[0]
    [waits] = host_notes(config, record(waits_for_others=True))
    assert "not byte-identical" in waits
    assert "'game'" in waits
