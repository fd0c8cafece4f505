"""Tests group scorers: scores reach their rollouts, in every mode; what cannot be scored is never trained."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core.assembly.parts import Parts, assemble, host_of, workflow_of
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.backend import BackendProtocol
from rllm_core.errors import ConfigError, PluginError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.runs import evaluation
from rllm_devkit.scripted import ScriptedBackend
from rllm_viewer.verify import verify

RunScripted = Callable[..., Any]
pytestmark = pytest.mark.slow
ASYNCHRONOUS = ("training.staleness_threshold=2", "training.partial_rollout=true")
HEAD = """
import asyncio, json, os
from pathlib import Path

from rllm_core.algorithms.group_scorer import GroupScorer, ScorerModel, Unscorable
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.services import Score

HERE = Path(__file__).parent

def log(**fields):
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\\n")

def own(episode):
    return episode.trajectories[0].total_reward

"""


@pytest.fixture
def scorer(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file with a scorer whose ``score`` has this body, and returns the setting that selects it."""

    def write(body: str, more: str = "") -> str:
        lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
        path = tmp_path / "scorer.py"
        path.write_text(
            f"{HEAD}\nclass Scorer(GroupScorer):\n{more}\n    async def score(self, group, services):\n{lines}\n"
        )
        return f"algorithm.group_scorer={path}"

    return write


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


OWN = "return {e.rollout_id: own(e) for e in reversed(group.episodes)}"


@pytest.mark.parametrize("backend", ["scripted", "scripted_colocated"])
@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS])
def test_scores_are_trained_like_the_same_rewards_of_a_workflow(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path, backend: str, mode: tuple[str, ...]
) -> None:
    if mode and backend == "scripted_colocated":
        mode = ("training.trigger_parameter_sync_step=2",)
    expected = run_scripted(*mode, backend=backend, path=tmp_path / "own")
    run = run_scripted(scorer(OWN), *mode, backend=backend, path=tmp_path / "scored")
    assert run.error is None
    assert expected.error is None
    assert run.summary["books"]["trained"] == expected.summary["books"]["trained"] == 6 * 4 * 4
    if not mode:
        assert run.lines("metrics") == expected.lines("metrics")
    assert run.summary["validation"][0] == expected.summary["validation"][0]


def test_scores_take_the_place_of_rewards_and_are_recorded(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path
) -> None:
    body = """
log(ids=[e.rollout_id for e in group.episodes], seed=group.seed, validation=group.is_validation)
return {e.rollout_id: Score(7.0 + e.rollout_index, {"style": 0.5, "because": "it is \\ud800"}) for e in group.episodes}
"""
    run = run_scripted(scorer(body), "training.groups_kept_per_step=1")
    assert run.error is None
    assert {row["reward_mean"] for row in run.lines("metrics")} == {8.5}
    assert {row["workflow/scorer/style"] for row in run.lines("metrics")} == {0.5}
    groups = [group_at(run.path, entry) for entry in index_of(run.path)]
    trained = next(group for group in groups if group.outcome == "trained")
    assert [rollout.reward for rollout in trained.rollouts] == [7.0, 8.0, 9.0, 10.0]
    said = trained.rollouts[0].episode.metadata["group_scorer"]
    assert (said["parts"]["because"], said["reward"]) == (r"it is \ud800", 7.0)
    assert said["workflow_reward"] in (0.0, 1.0)
    assert {call["validation"] for call in calls(tmp_path)} == {True, False}
    seeds = [call["seed"] for call in calls(tmp_path) if not call["validation"]]
    assert len(set(seeds)) == len(seeds) == 6 * 4


def test_rollouts_need_no_reward_of_their_own(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path
) -> None:
    env = tmp_path / "env.py"
    env.write_text(
        "from rllm_core.types import Task\n"
        "from rllm_core.workflow import Workflow\n"
        "class Unlabeled(Workflow):\n"
        "    def tasks(self, split):\n"
        "        return [Task(task_id=f'{split}-{n}', data={}) for n in range(20)]\n"
        "    async def run(self, task, completer):\n"
        "        step = await completer.complete([{'role': 'user', 'content': 'say yes'}])\n"
        "        return self.episode(task, [step])\n"
    )
    body = "return {e.rollout_id: float(e.trajectories[0].steps[-1].text == 'yes') for e in group.episodes}"
    run = run_scripted(scorer(body), target=str(env))
    assert run.error is None
    rows = run.lines("metrics")
    assert rows[-1]["reward_mean"] > rows[0]["reward_mean"]
    assert run.summary["validation"][-1]["reward_mean"] is not None


@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS, ("algorithm.refill_filtered_groups=false",)])
def test_an_unscored_rollout_is_left_out_and_never_has_a_reward(
    run_scripted: RunScripted, scorer: Callable[..., str], mode: tuple[str, ...]
) -> None:
    body = "return {e.rollout_id: None if e.rollout_index == 1 else own(e) for e in group.episodes}"
    run = run_scripted(scorer(body), *mode)
    assert run.error is None
    by_reason = run.summary["books_by_reason"]
    assert by_reason["trained"] == {"trained": 6 * 4 * 3}
    assert by_reason["filtered"] == {"unscored": 6 * 4}
    assert {row["trajectories"] for row in run.lines("metrics")} == {12}
    for event in run.lines("events"):
        if event["event"] == "score":
            assert set(event) == {"event", "group", "rewards"}
            assert [reward is None for reward in event["rewards"].values()] == [False, True, False, False]
    for entry in index_of(run.path):
        for rollout in group_at(run.path, entry).rollouts:
            if rollout.episode.rollout_index == 1 and not rollout.episode.is_validation:
                assert (rollout.outcome, rollout.reason, rollout.reward) == ("filtered", "unscored", None)


BROKEN = {
    "dies": ("raise OSError('no route to the judge')", "OSError: no route to the judge"),
    "stalls": ("await asyncio.sleep(3600)", "did not end within"),
    "ends with text": ("return 'good'", "not a mapping"),
    "forgets one": (f"{OWN[:-1]} if e.rollout_index}}", "no score of rollout"),
    "knows another": (f"{OWN[:-1]}}} | {{'train-9': 1.0}}", "which is not in the group"),
    "answers with text": ("return {e.rollout_id: '1.0' for e in group.episodes}", "return a finite number"),
    "answers with a bool": ("return {e.rollout_id: True for e in group.episodes}", "return a finite number"),
    "scores none": ("return {e.rollout_id: None for e in group.episodes}", "scored no rollout: score() returned None"),
    "says why": ("raise Unscorable('too long')", "scored no rollout: too long"),
    "gives nan as a part": (
        "return {e.rollout_id: Score(1.0, {'x': float('nan')}) for e in group.episodes}",
        "returned the part ('x', nan)",
    ),
    "answers with more than training can add up": (
        "return {e.rollout_id: 1e300 for e in group.episodes}",
        "returned 1e+300 for rollout",
    ),
    "answers with a huge integer": (
        "return {e.rollout_id: 10**400 for e in group.episodes}",
        "returned 1000",
    ),
    "gives a part that has no mean": (
        "return {e.rollout_id: Score(1.0, {'x': 1.7e308}) for e in group.episodes}",
        "returned the part ('x', 1.7e+308)",
    ),
    "answers with nan": ("return {e.rollout_id: float('nan') for e in group.episodes}", "return a finite number"),
    "gives a part without a name": (
        "return {e.rollout_id: Score(1.0, {'': 1.0}) for e in group.episodes}",
        "returned the part ('', 1.0); a part has a name",
    ),
    "has a part without a value": (
        "return {e.rollout_id: Score(1.0, {'form': None}) for e in group.episodes}",
        "returned the part ('form', None)",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_scorer_trains_nothing_and_ends_the_run(
    run_scripted: RunScripted, scorer: Callable[..., str], how: str
) -> None:
    body, problem = BROKEN[how]
    run = run_scripted(
        scorer(body.replace("}}", "}") if how == "knows another" else body),
        f"algorithm.group_scorer_timeout_seconds={0.05 if how == 'stalls' else 60}",
        "algorithm.group_scorer_attempts=2",
        "algorithm.max_group_attempts=2",
        "training.validation_rollouts=0",
    )
    assert isinstance(run.error, RunError)
    assert "because rollouts are unscored" in str(run.error)
    assert "easier or harder tasks" not in str(run.error)
    books = run.summary["books"]
    assert books["trained"] == 0
    assert books["dispatched"] == books["filtered"] + books["cancelled"]
    scored = [event for event in run.lines("events") if event["event"] == "score"]
    assert {frozenset(event) for event in scored} == {frozenset({"event", "group", "rewards", "error"})}
    [failure] = run.summary["failures"]
    assert (failure["reason"], problem in failure["error"]) == ("unscored", True)


def test_a_scorer_is_asked_again(run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path) -> None:
    body = """
self.asked[group.seed] = self.asked.get(group.seed, 0) + 1
log(seed=group.seed)
if self.asked[group.seed] < 3:
    raise OSError("busy")
return {e.rollout_id: own(e) for e in group.episodes}
"""
    setting = scorer(body, "    async def open(self, services):\n        self.asked = {}\n")
    run = run_scripted(setting, "training.steps=2", "training.validation_rollouts=0")
    assert run.error is None
    assert run.summary["books"]["filtered"] == 0
    assert set(Counter(call["seed"] for call in calls(tmp_path)).values()) == {3}


def test_an_error_that_only_the_user_can_fix_ends_the_run(
    run_scripted: RunScripted, scorer: Callable[..., str]
) -> None:
    run = run_scripted(scorer("raise ConfigError('the judge refused the key')"))
    assert isinstance(run.error, ConfigError)


@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS])
def test_a_resumed_run_scores_no_complete_group_twice(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    body = f"""
for e in group.episodes:
    log(rollout=e.rollout_id, index=e.rollout_index, validation=group.is_validation)
{OWN}
"""

    def fail_in_step_four(assembly: Parts) -> None:
        backend: Any = assembly.backend
        assert isinstance(backend, ScriptedBackend)
        update = backend.update_policy

        async def failing(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await update(step)

        backend.update_policy = failing

    setting = scorer(body)
    first = run_scripted(setting, *mode, "training.checkpoint_every_steps=1", prepare=fail_in_step_four)
    assert first.error is not None
    again = run_scripted(setting, *mode, "training.checkpoint_every_steps=1", path=first.path, resume=True)
    assert again.error is None
    assert verify(again.path).holds
    scored = Counter(call["rollout"] for call in calls(tmp_path) if not call["validation"])
    assert set(scored.values()) == {1}
    restored = [e["restored"] for e in again.lines("events") if e["event"] == "begin"][1]
    events = [event for event in again.lines("events") if event["event"] in ("begin", "score")]
    after = events[[e["event"] for e in events].index("begin", 1) :]
    assert not {event["group"] for event in after if event["event"] == "score"} & set(restored)


def test_the_policy_can_be_asked(run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path) -> None:
    body = """
async def verdict(e):
    step = await services.complete([{"role": "user", "content": "good?"}], seed=group.seed + e.rollout_index,
                                   max_response_tokens=8, temperature=1.0)
    log(text=step.text, version=step.weight_version)
    return float(step.text == "yes")
found = await asyncio.gather(*map(verdict, group.episodes))
return {e.rollout_id: one for e, one in zip(group.episodes, found)}
"""
    run = run_scripted(scorer(body), backend="scripted_colocated")
    assert run.error is None
    asked = calls(tmp_path)
    assert len(asked) == 6 * 4 * 4 + 2 * 10
    assert {call["version"] for call in asked} == set(range(7))


def test_evaluations_are_scored(plugins: PluginManager, scorer: Callable[..., str], tmp_path: Path) -> None:
    body = """
log(validation=group.is_validation, size=len(group.episodes))
return {e.rollout_id: 0.25 for e in group.episodes}
"""
    setting = scorer(body)
    resolved = resolve_run("say_yes", plugins, overrides=(setting,), backend="scripted")
    parts = assemble(resolved.config, plugins)
    host = host_of(resolved, workflow_of(resolved))
    result = asyncio.run(
        evaluation.evaluate(
            resolved,
            host,
            evaluation.engine_of_backend(parts, None),
            split="validation",
            task_limit=5,
            samples=3,
            ks=(1,),
        )
    )
    assert result["reward_mean"] == 0.25
    assert calls(tmp_path) == [{"validation": True, "size": 3}] * 5


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("algorithm.group_scorer=nobody",), PluginError, "algorithm.group_scorer = 'nobody'"),
        (("algorithm.group_scorer_options={a=1}",), ConfigError, "algorithm.group_scorer is not"),
        (("SCORER", "algorithm.group_scorer_options={a=1}"), ConfigError, "algorithm.group_scorer_options.a"),
        (("SCORER", "algorithm.group_scorer_attempts=0"), ConfigError, "group_scorer_attempts"),
    ],
)
def test_wrong_settings_are_refused(
    plugins: PluginManager,
    scorer: Callable[..., str],
    overrides: tuple[str, ...],
    error: type[Exception],
    message: str,
) -> None:
    setting = scorer(OWN)
    given = tuple(setting if one == "SCORER" else one for one in overrides)
    with pytest.raises(error, match=message):
        assemble(load_run_config("say_yes", plugins, overrides=given, backend="scripted"), plugins)


def test_the_engine_of_a_scorers_model_must_exist(plugins: PluginManager, scorer: Callable[..., str]) -> None:
    setting = scorer(OWN, "    model = ScorerModel('nothing', 'folder')\n")
    with pytest.raises(PluginError, match="nothing"):
        assemble(load_run_config("say_yes", plugins, overrides=(setting,), backend="scripted"), plugins)


# ----------------------------------------------------------------------------------------------------------------------
# Version 0 of the policy

ASKING = """
async def verdict(e):
    step = await services.complete([{"role": "user", "content": "good?"}], seed=e.rollout_index,
                                   max_response_tokens=8, temperature=1.0)
    log(text=step.text, version=step.weight_version, rollout=e.rollout_id)
    return float(step.text == e.trajectories[0].steps[-1].text)
found = await asyncio.gather(*map(verdict, group.episodes))
return {e.rollout_id: one for e, one in zip(group.episodes, found)}
"""
FROZEN = "    frozen_version = 0\n"


@pytest.mark.parametrize("backend", ["scripted", "scripted_colocated"])
@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS])
def test_version_0_of_the_policy_can_be_asked(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path, backend: str, mode: tuple[str, ...]
) -> None:
    if mode and backend == "scripted_colocated":
        mode = ("training.trigger_parameter_sync_step=2",)
    run = run_scripted(scorer(ASKING, FROZEN), *mode, backend=backend)
    assert run.error is None
    asked = calls(tmp_path)
    assert {call["version"] for call in asked} == {0}
    # Every rollout index has a seed of its own, so weights that never change give it one answer in the whole run.
    assert len({(call["rollout"].split("-")[-2], call["text"]) for call in asked}) == 4
    assert len({row["skill"] for row in run.lines("metrics")}) > 1


def test_a_resumed_run_asks_the_same_version_0(
    run_scripted: RunScripted, scorer: Callable[..., str], tmp_path: Path
) -> None:
    source = run_scripted(path=tmp_path / "source")
    setting, start = scorer(ASKING, FROZEN), f"training.init_from={source.path}"
    whole = run_scripted(setting, start, path=tmp_path / "whole")
    expected = calls(tmp_path)
    (tmp_path / "calls.jsonl").unlink()

    def fail_in_step_four(assembly: Parts) -> None:
        backend: Any = assembly.backend
        update = backend.update_policy

        async def failing(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await update(step)

        backend.update_policy = failing

    saved, path = "training.checkpoint_every_steps=1", tmp_path / "cut"
    assert run_scripted(setting, start, saved, path=path, prepare=fail_in_step_four).error is not None
    resumed = run_scripted(setting, start, saved, path=path, resume=True)
    assert resumed.error is None
    backend = resumed.assembly.backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.reference_engine is not None
    assert backend.reference_engine.skill == source.lines("metrics")[-1]["skill"] != 0.5
    assert resumed.lines("metrics") == whole.lines("metrics")

    def answers(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {(call["rollout"].split("-", 2)[2], call["text"]) for call in found}

    assert answers(calls(tmp_path)) == answers(expected)


def test_a_backend_without_a_copy_of_version_0_refuses_it(
    run_scripted: RunScripted, scorer: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedBackend, "init_reference_engine", BackendProtocol.init_reference_engine)
    with pytest.raises(ConfigError, match="backend 'scripted' does not keep for sampling; export it") as error:
        run_scripted(scorer(ASKING, FROZEN))
    assert "\n" not in str(error.value)


def test_only_version_0_is_kept(run_scripted: RunScripted, scorer: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="asks version 3 of the policy, but a run keeps only version 0"):
        run_scripted(scorer(ASKING, "    frozen_version = 3\n"))


@pytest.mark.parametrize("trained", [True, False])
def test_evaluations_ask_version_0(
    run_scripted: RunScripted, plugins: PluginManager, scorer: Callable[..., str], tmp_path: Path, trained: bool
) -> None:
    source = run_scripted("training.checkpoint_every_steps=6", path=tmp_path / "source")
    setting = scorer(ASKING, FROZEN)
    start = f"training.init_from={source.path}:6"
    resolved = resolve_run("say_yes", plugins, overrides=(setting, start), backend="scripted")
    parts = assemble(resolved.config, plugins)
    next_run = run_scripted(setting, start, path=tmp_path / "next")
    (tmp_path / "calls.jsonl").unlink()
    opening = evaluation.engine_of_backend(parts, next_run.path if trained else None)
    asyncio.run(
        evaluation.evaluate(
            resolved,
            host_of(resolved, workflow_of(resolved)),
            opening,
            split="validation",
            task_limit=5,
            samples=3,
            ks=(1,),
        )
    )
    backend = parts.backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.reference_engine is not None
    assert backend.reference_engine.skill == source.lines("metrics")[-1]["skill"]
    assert (backend.skill == backend.reference_engine.skill) is not trained
    assert {call["version"] for call in calls(tmp_path)} == {0}


def test_an_evaluation_without_a_backend_has_no_version_0(plugins: PluginManager, scorer: Callable[..., str]) -> None:
    resolved = resolve_run(
        "say_yes", plugins, overrides=(scorer(ASKING, FROZEN),), backend="scripted", engine="scripted"
    )
    host = host_of(resolved, workflow_of(resolved))
    opening = evaluation.engine_by_name("scripted", resolved)
    with pytest.raises(ConfigError, match="only a backend keeps; evaluate without --engine"):
        asyncio.run(evaluation.evaluate(resolved, host, opening, split="validation", task_limit=1, samples=1, ks=(1,)))
