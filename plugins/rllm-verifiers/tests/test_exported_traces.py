"""Traces that ``rllm-core export`` writes, read by verifiers itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from verifiers.v1.trace import WireTrace
from verifiers.v1.utils.trace_store import read_episodes

sys.path.insert(0, str(Path(__file__).parents[2] / "rllm-viewer" / "tests"))

from recorded_runs import failed, sorting, with_tools, write_run

from rllm_viewer.travel.exports import bring_in, export
from rllm_viewer.travel.formats import FORMATS
from rllm_viewer.travel.selection import Filters, picked


def test_verifiers_reads_tokens_masks_and_rewards(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(), with_tools(step=5, group=188), failed(step=6, group=189)])
    export(run, tmp_path / "traces.jsonl", FORMATS["verifiers"], Filters())
    episodes = read_episodes(tmp_path, WireTrace)
    chosen = list(picked(run, Filters()))
    assert len(episodes) == len(chosen) == 4
    for episode, one in zip(episodes, chosen, strict=True):
        [trace] = episode.traces
        assert episode.ok == (one.rollout.outcome != "failed")
        assert trace.reward == (one.rollout.reward or 0.0)
        steps = [step for trajectory in one.rollout.episode.trajectories for step in trajectory.steps]
        assert trace.num_turns == len(steps)
        assert trace.num_output_tokens == sum(len(step.completion_ids) for step in steps)
        assert sum(sum(branch.sampled_mask) for branch in trace.branches) == trace.num_output_tokens
        for branch in trace.branches:
            last = next(s for s in steps if branch.token_ids == [*s.prompt_ids.tolist(), *s.completion_ids.tolist()])
            assert branch.messages[-1].content == last.text
            known = [number for number, sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if sampled]
            np.testing.assert_allclose(known[-len(last.completion_ids) :], last.logprobs, rtol=1e-6)


def test_what_verifiers_writes_again_comes_back(tmp_path: Path) -> None:
    """Its own records have rounded numbers and more fields, such as counts and times."""
    run = write_run(tmp_path / "run", [sorting(), with_tools(step=5, group=188)])
    export(run, tmp_path / "traces.jsonl", FORMATS["verifiers"], Filters())
    lines = [json.dumps(episode.to_record()) + "\n" for episode in read_episodes(tmp_path, WireTrace)]
    (tmp_path / "theirs.jsonl").write_text("".join(lines))
    bring_in(tmp_path / "theirs.jsonl", FORMATS["verifiers"], tmp_path / "back")
    before, after = (list(picked(folder, Filters())) for folder in (run, tmp_path / "back"))
    for mine, theirs in zip(before, after, strict=True):
        assert mine.rollout.reward == theirs.rollout.reward
        pairs = zip(mine.rollout.episode.trajectories, theirs.rollout.episode.trajectories, strict=True)
        for step, again in ((a, b) for one, other in pairs for a, b in zip(one.steps, other.steps, strict=True)):
            assert step.prompt_ids.tolist() == again.prompt_ids.tolist()
            assert step.completion_ids.tolist() == again.completion_ids.tolist()
            assert step.messages == again.messages
