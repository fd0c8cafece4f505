"""The backend in this process, with separated servers: weights, versions, checkpoints and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from hold import eventually
from sessions import Session, greatest, keep_weights_only, opened, rollout_logprobs
from verl_runs import GREATEST_GAP_LEARNT, SEPARATED, command_line, run_config

from rllm_core.backend import PolicyUpdate
from rllm_core.engine import EngineError
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.providers import KINDS
from rllm_core.types import MediaChunk, SamplingParams, TokenOutput, token_ids

GREATEST_GAP = 1e-5
LONG_TOKENS = 200
LOSSES = ("algorithm.loss=ppo_clip", "algorithm.proximal_policy=forward", "verl.old_logprob=last_sync")
KL = ("algorithm.kl.coefficient=0.1",)
STALE = ("training.staleness_threshold=1", "training.partial_rollout=true", "training.trigger_parameter_sync_step=2")
FAST = ("optimizer.learning_rate=0.001", "optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def session(model: Path) -> Iterator[Session]:
    with opened(run_config(model, *SEPARATED, *LOSSES, *KL, *STALE, *FAST, "verl.mini_batches=2")) as session:
        yield session


def test_trainer_and_servers_agree_at_one_version_and_clearly_differ_at_two(session: Session) -> None:
    for greatest_gap in (GREATEST_GAP, GREATEST_GAP_LEARNT, GREATEST_GAP_LEARNT):
        samples = session.sampled(session.run(session.sample(8)), [1, -1] * 4)
        assert {version for sample in samples for version in sample.weight_versions} == {session.version}
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) <= greatest_gap
        metrics = session.train(samples)
        assert metrics["rollout_logprob_difference_max"] <= greatest_gap
        stale = greatest(session.logprobs(samples), rollout_logprobs(samples))
        assert stale > 1000 * GREATEST_GAP
        session.publish()


def test_advantages_move_log_probabilities_their_way(session: Session) -> None:
    samples = session.sampled(session.run(session.sample(8, seed=100)), [1, -1] * 4)
    before = session.logprobs(samples)
    metrics = session.train(samples)
    after = session.logprobs(samples)
    gain = [
        float((new - old).sum()) * np.sign(sample.advantages[0])
        for new, old, sample in zip(after, before, samples, strict=True)
    ]
    assert sum(gain) > 0
    assert np.isfinite([metrics[name] for name in ("loss", "grad_norm", "kl_reference", "clip_fraction")]).all()


def test_the_reference_stays_and_so_do_the_weights_of_the_last_sync(session: Session) -> None:
    session.publish()
    samples = session.sampled(session.run(session.sample(8, seed=200)), [1, -1] * 4)
    reference, at_sync = session.logprobs(samples, "reference"), session.logprobs(samples)
    session.train(samples)
    current = session.logprobs(samples)
    assert greatest(session.logprobs(samples, "proximal"), at_sync) == 0
    assert greatest(current, at_sync) > 1000 * GREATEST_GAP
    assert greatest(session.logprobs(samples), current) == 0  # the temporary weights have no lasting effect
    assert greatest(session.logprobs(samples, "reference"), reference) == 0
    assert greatest(reference, at_sync) > 1000 * GREATEST_GAP


def test_a_completion_goes_on_over_a_weight_sync(session: Session) -> None:
    session.publish()
    samples = session.sampled(session.run(session.sample(8, seed=300)), [1, -1] * 4)
    session.train(samples)

    async def sample_over_a_sync(wait_seconds: float) -> TokenOutput:
        long = asyncio.create_task(session.sample(1, LONG_TOKENS, stop=False))
        await asyncio.sleep(wait_seconds)
        await session.backend.on_policy_updated(PolicyUpdate(session.version + 1, session.step, "step"))
        return (await long)[0]

    # How long the first token and the last one take depends on the machine.
    wait_seconds = 0.3
    for _ in range(12):
        first = session.version
        output = session.run(sample_over_a_sync(wait_seconds))
        session.version += 1
        assert len(output.token_ids) == LONG_TOKENS
        assert output.logprobs is not None
        if output.weight_version > first:  # no token before the sync
            wait_seconds *= 1.6
        elif output.newest_weight_version is None:  # all of them before it
            wait_seconds /= 2
        else:
            break
        session.train(samples)
    assert (output.weight_version, output.newest_weight_version) == (first, first + 1)
    (current,) = session.logprobs(session.sampled([output]))
    gaps = np.abs(current - output.logprobs)
    # The old weights sampled the tokens up to the sync, the new weights all later ones.
    old = int(np.flatnonzero(gaps > GREATEST_GAP).max()) + 1
    assert 0 < old < LONG_TOKENS
    assert gaps[old:].max() <= GREATEST_GAP


def test_a_checkpoint_brings_weights_and_optimizer_back(session: Session, tmp_path: Path) -> None:
    samples = session.sampled(session.run(session.sample(8, seed=400)), [1, -1] * 4)
    session.run(session.backend.save_checkpoint(tmp_path))
    saved, step = session.logprobs(samples), session.step
    session.train(samples)
    after = session.logprobs(samples)
    assert greatest(after, saved) > 1000 * GREATEST_GAP
    session.run(session.backend.load_checkpoint(tmp_path))
    assert greatest(session.logprobs(samples), saved) == 0
    session.step = step
    session.train(samples)
    assert greatest(session.logprobs(samples), after) <= 1e-6


def test_only_the_weights_of_another_run_are_loaded_also_into_the_reference(session: Session, tmp_path: Path) -> None:
    samples = session.sampled(session.run(session.sample(8, seed=500)), [1, -1] * 4)
    session.train(samples)
    session.run(session.backend.save_checkpoint(tmp_path))
    saved = session.logprobs(samples)
    assert greatest(session.logprobs(samples, "reference"), saved) > 1000 * GREATEST_GAP
    session.train(samples)
    keep_weights_only(tmp_path)
    session.run(session.backend.load_weights(tmp_path))
    assert greatest(session.logprobs(samples), saved) == 0
    session.train(samples)
    assert greatest(session.logprobs(samples), saved) > 1000 * GREATEST_GAP
    assert greatest(session.logprobs(samples, "reference"), saved) <= GREATEST_GAP


def test_weights_of_other_workers_are_refused_with_both(session: Session, tmp_path: Path) -> None:
    session.run(session.backend.save_checkpoint(tmp_path))
    state = json.loads((tmp_path / "verl.json").read_text())
    (tmp_path / "verl.json").write_text(json.dumps({**state, "trainers": 7}))
    with pytest.raises(RunError, match=r"on 7 devices.*this run has .* on 1\."):
        session.run(session.backend.load_weights(tmp_path))


def test_what_no_server_can_answer_is_refused(session: Session) -> None:
    params = SamplingParams(max_response_tokens=4)

    def ask(tokens: Any, params: SamplingParams = params) -> None:
        session.run(session.engine.get_token_output_from_token_input(tokens, sampling_params=params, seed=0))

    with pytest.raises(EngineError, match="at least one prompt token"):
        ask([])
    with pytest.raises(EngineError, match=r"token id 100000 is outside the vocabulary of \d+ tokens"):
        ask([1, 100000])
    with pytest.raises(EngineError, match=r"do not fit the model's \d+ positions; raise verl.max_model_tokens"):
        ask([1], SamplingParams(max_response_tokens=10**6))
    with pytest.raises(ValueError, match="engine 'verl' takes text only"):
        ask([1, MediaChunk(sha256="0" * 64, kind="image", length_tokens=1)])
    ask([1])


def test_servers_that_did_not_get_the_weights_end_the_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = session.sampled(session.run(session.sample(8, seed=500)), [1, -1] * 4)
    session.train(samples)
    servers = session.backend._servers
    assert servers is not None

    async def only_the_version(version: int, *, deadline_seconds: float) -> None:
        for replica in servers._manager.get_replicas():
            await replica._server_handle.set_global_steps.remote(version)

    with monkeypatch.context() as patched:
        patched.setattr(servers, "synchronize", only_the_version)
        with pytest.raises(RunError, match="server 0 of 1 servers does not serve the trainer's weights: 8 of 8 "):
            session.publish()
    session.publish()


def test_workers_see_the_plugins_of_this_process(session: Session) -> None:
    def seen(plugins: PluginManager) -> dict[str, list[str]]:
        """Every plugin with its version and state, and every provider record."""
        records = [
            f"{kind.kind} {name}: {provided.record} of {provided.plugin.label}"
            for kind in KINDS
            for name, provided in plugins.providers(kind).items()
        ]
        return {"records": records, "plugins": [str(info.to_json()) for info in plugins.plugins()]}

    @ray.remote
    def seen_there() -> dict[str, list[str]]:
        from rllm_verl.worker_process import plugins

        return seen(plugins)

    here = seen(PluginManager.from_environment())
    assert any("backend verl" in record for record in here["records"])
    assert ray.get(seen_there.remote()) == here


def processes(name: str) -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if name in command_line(each)]


def test_a_weight_sync_that_hangs_has_a_deadline(session: Session) -> None:
    servers = session.backend._servers
    assert servers is not None
    (worker,) = processes("ray::CheckpointEngineWorker")
    worker.suspend()
    try:
        with pytest.raises(RunError, match=r"weight sync to version \d+ did not end within 3 s"):
            session.run(servers.synchronize(session.version + 1, deadline_seconds=3))
    finally:
        worker.resume()
    session.run(session.sample(1))  # once the sync goes on; a server that dies in one would leave requests unanswered


def test_what_dies_is_named(session: Session) -> None:
    """An engine in a sync that waits for a worker, then a trainer. Must run last: it leaves nothing to test.

    Runs of the command line lose an engine between syncs.
    """
    servers, cluster = session.backend._servers, session.backend._cluster
    assert servers is not None
    assert cluster is not None

    async def synchronize_and_kill() -> None:
        synchronizing = asyncio.create_task(servers.synchronize(session.version + 1, deadline_seconds=600))
        await asyncio.sleep(0.3)
        assert not synchronizing.done()
        (engine,) = processes("VLLM::EngineCore")
        os.kill(engine.pid, signal.SIGKILL)
        await synchronizing

    (worker,) = processes("ray::CheckpointEngineWorker")
    worker.suspend()
    with pytest.raises(RunError, match=r"weight sync to version \d+: the engine of server 0 died"):
        session.run(synchronize_and_kill())
    samples = session.sampled([TokenOutput(token_ids=token_ids([5]), finish_reason="length", weight_version=0)])
    for worker in processes("ray::PolicyWorker"):  # trainer and reference
        os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: "trainer 0" in cluster.dead())
    with pytest.raises(RunError, match=r"computing log-probabilities: trainer 0(, [^:]+)? died"):
        session.run(asyncio.wait_for(session.backend.compute_logprobs(samples), 600))
