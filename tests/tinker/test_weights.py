"""Losses, sampled weights and saved states on the server, with the backend in this process."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rllm_tinker.backend import TinkerBackend
from rllm_tinker.losses import LOSSES
from rllm_tinker.remote import RemotePolicy
from server import ENGINE

from rllm_core.backend import OptimizerStep, Policy, PolicyUpdate
from rllm_core.errors import ConfigError
from rllm_core.types import Floats, SamplingParams, TrainingSample

ROWS = ENGINE["train_micro_batch_size"]
ANSWER, LONG_ANSWER = [20, 21, 22, 2], [30, 31, 32, 33, 34, 35, 36, 2]
OVERLAPPING = ("training.staleness_threshold=1", "training.partial_rollout=true")
STILL = "optimizer.learning_rate=1e-30"
GREATEST_GAP = 1e-4


def counts(samples: Sequence[TrainingSample], step: int = 1) -> OptimizerStep:
    return OptimizerStep(
        step=step,
        total_steps=10,
        samples=len(samples),
        sampled_tokens=sum(sample.sampled_tokens for sample in samples),
        trajectories=len(samples),
    )


def rows(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Repeats samples to fill the engine's batch, so that it compiles nothing again; means stay the same."""
    copies = max(1, ROWS // len(samples))
    assert len(samples) * copies % ROWS == 0
    return [sample for _ in range(copies) for sample in samples]


async def train(backend: TinkerBackend, *passes: Sequence[TrainingSample], step: int = 1) -> dict[str, float]:
    passes = tuple(rows(samples) for samples in passes)
    for samples in passes:
        await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
    together = [sample for samples in passes for sample in samples]
    return (await backend.update_policy(counts(together, step))).metrics


async def logprobs_of(backend: TinkerBackend, *samples: TrainingSample, policy: Policy = "current") -> list[Floats]:
    return (await backend.compute_logprobs(rows(samples), policy))[: len(samples)]


def policy_of(backend: TinkerBackend) -> RemotePolicy:
    assert backend._policy is not None
    return backend._policy


async def begin(backend: TinkerBackend, parser: Any) -> Any:
    engine = await backend.init_rollout_engine(parser)
    await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
    return engine


async def test_the_server_optimises_the_aggregation_that_was_asked_for(
    server, make_backend, run_config, parser, sample_of
) -> None:
    """A sample without advantage next to one with: the aggregation decides how much it dilutes the gradient."""
    norm_tokens = 5
    tokens, others = len(ANSWER), len(LONG_ANSWER)
    expected = {
        "token_mean": 1 / (tokens + others),
        "sequence_mean_token_mean": 1 / tokens / 2,
        "sequence_mean_token_sum": 1 / 2,
        "sequence_mean_token_sum_norm": 1 / norm_tokens / 2,
    }
    backend = make_backend(server, STILL)
    await begin(backend, parser)
    norms = {}
    for step, aggregation in enumerate(expected, start=1):
        backend.config = run_config(
            server, STILL, f"algorithm.aggregation={aggregation}", f"algorithm.aggregation_norm_tokens={norm_tokens}"
        )
        batch = [sample_of(ANSWER, 1.5), sample_of(LONG_ANSWER, 0.0)]
        norms[aggregation] = (await train(backend, batch, step=step))["grad_norm"]
    await backend.shutdown()
    of_a_token = norms["sequence_mean_token_sum"] / expected["sequence_mean_token_sum"]
    assert of_a_token > 0.1
    for aggregation, factor in expected.items():
        assert norms[aggregation] == pytest.approx(of_a_token * factor, rel=1e-4), aggregation


async def test_passes_that_go_out_as_groups_arrive_make_the_gradient_of_one_pass(
    server, make_backend, parser, sample_of
) -> None:
    first = rows([sample_of(ANSWER, 1.0)])
    second = rows([sample_of(LONG_ANSWER, -0.5), sample_of(ANSWER[::-1], 0.7)])
    backend = make_backend(server, STILL, "algorithm.aggregation=sequence_mean_token_mean")
    assert type(backend).capabilities(backend.config).deferred_normalisation
    await begin(backend, parser)
    norms = []
    for step, passes in enumerate(([first + second], [first, second]), start=1):
        norms.append((await train(backend, *passes, step=step))["grad_norm"])
    await backend.shutdown()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.every_sdk
async def test_losses_agree_where_their_formulas_do(server, make_backend, run_config, parser, sample_of) -> None:
    """On-policy, every ratio is 1, so all policy losses have the gradient of reinforce."""
    backend = make_backend(server, STILL)
    await begin(backend, parser)
    [logprobs] = await logprobs_of(backend, sample_of(ANSWER, 1.0))
    sample = sample_of(ANSWER, -2.0, logprobs=logprobs)
    norms = {}
    for step, loss in enumerate(sorted(LOSSES), start=1):
        backend.config = run_config(server, STILL, f"algorithm.loss={loss}")
        norms[loss] = (await train(backend, [sample], step=step))["grad_norm"]
    await backend.shutdown()
    assert norms["reinforce"] > 0.1
    assert len({round(norm / norms["reinforce"], 4) for norm in norms.values()}) == 1, norms


async def test_clipped_tokens_get_no_gradient(server, make_backend, parser, sample_of) -> None:
    backend = make_backend(server, STILL, "algorithm.loss=ppo_clip", "algorithm.loss_options.clip_high=0.3")
    await begin(backend, parser)
    [logprobs] = await logprobs_of(backend, sample_of(ANSWER, 1.0))
    beyond = await train(backend, [sample_of(ANSWER, 1.0, logprobs=logprobs - np.log(1.31))])
    within = await train(backend, [sample_of(ANSWER, 1.0, logprobs=logprobs - np.log(1.29))], step=2)
    assert beyond["grad_norm"] == 0
    assert within["grad_norm"] > 0.1
    await backend.shutdown()


@pytest.mark.every_sdk
@pytest.mark.parametrize("overrides", [(), OVERLAPPING], ids=["synchronous", "asynchronous"])
async def test_trainer_and_sampler_agree_at_equal_version(
    server, make_backend, parser, prompt_ids, sample_of, overrides
) -> None:
    backend = make_backend(server, *overrides)
    engine = await begin(backend, parser)
    for version in range(3):
        params = SamplingParams(max_response_tokens=6, stop_token_ids=tuple(parser.get_stop_token_ids()))
        outputs = await engine.get_token_outputs_from_token_input(
            prompt_ids, sampling_params=params, seeds=range(ROWS * version, ROWS * (version + 1))
        )
        assert {output.weight_version for output in outputs} == {version}
        samples = [
            sample_of(output.token_ids, 1.0 if place % 2 else -1.0, logprobs=output.logprobs, version=version)
            for place, output in enumerate(outputs)
        ]
        current = await backend.compute_logprobs(samples)
        gap = max(float(np.abs(mine - sample.logprobs).max()) for mine, sample in zip(current, samples, strict=True))
        assert gap < GREATEST_GAP
        metrics = await train(backend, samples, step=version + 1)
        assert metrics["rollout_logprob_difference_max"] < GREATEST_GAP
        await backend.on_policy_updated(PolicyUpdate(version + 1, version + 1, "step"))
    await backend.shutdown()


@pytest.mark.every_sdk
async def test_a_version_is_sampled_from_its_own_weights_while_others_are_trained(
    server, make_backend, parser, prompt_ids, sample_of
) -> None:
    """Also if training is several steps ahead, and if a sampler gets its first request long after its creation."""
    backend = make_backend(server, *OVERLAPPING, "training.trigger_parameter_sync_step=3")
    engine = await begin(backend, parser)
    scored = np.concatenate([prompt_ids, ANSWER]).astype(np.int32)
    sample = sample_of(ANSWER, 1.0)

    async def sampler_says() -> Any:
        return await engine.compute_logprobs(scored, start=len(prompt_ids))

    async def trainer_says() -> Any:
        return (await logprobs_of(backend, sample))[0]

    first = await sampler_says()
    for step in (1, 2, 3):
        await train(backend, [sample], step=step)
        np.testing.assert_allclose(await sampler_says(), first, atol=GREATEST_GAP)
    third = await trainer_says()
    assert np.abs(third - first).max() > 0.1
    await backend.on_policy_updated(PolicyUpdate(1, 3, "step"))
    for step in (4, 5):
        await train(backend, [sample], step=step)
    fifth = await trainer_says()
    assert np.abs(fifth - third).max() > 0.1
    np.testing.assert_allclose(await sampler_says(), third, atol=GREATEST_GAP)
    np.testing.assert_allclose(await trainer_says(), fifth, atol=GREATEST_GAP)
    await backend.shutdown()


@pytest.mark.every_sdk
async def test_the_reference_is_the_base_model(server, make_backend, parser, sample_of) -> None:
    backend = make_backend(server)
    await begin(backend, parser)
    sample = sample_of(ANSWER, 1.0)
    [before] = await logprobs_of(backend, sample)
    await train(backend, [sample])
    [reference] = await logprobs_of(backend, sample, policy="reference")
    [proximal] = await logprobs_of(backend, sample, policy="proximal")
    np.testing.assert_allclose(reference, before, atol=1e-5)
    assert np.abs(proximal - before).max() > 1e-3
    await backend.shutdown()


@pytest.mark.every_sdk
async def test_a_checkpoint_holds_the_optimizer_too(server, make_backend, parser, sample_of, tmp_path: Path) -> None:
    """After different gradients, Adam without its moments would take a different step."""
    up, down = sample_of(ANSWER, 1.0), sample_of(LONG_ANSWER, -1.0)
    backend = make_backend(server)
    await begin(backend, parser)
    await train(backend, [up], step=1)
    await train(backend, [down], step=2)
    await backend.save_checkpoint(tmp_path)
    state = backend.state_dict()
    await train(backend, [up], step=3)
    expected = await logprobs_of(backend, up, down)
    await backend.shutdown()

    resumed = make_backend(server)
    await resumed.init_rollout_engine(parser)
    resumed.load_state_dict(state)
    await resumed.load_checkpoint(tmp_path)
    await resumed.on_policy_updated(PolicyUpdate(2, 2, "resume"))
    await train(resumed, [up], step=3)
    found = await logprobs_of(resumed, up, down)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    await resumed.shutdown()


@pytest.mark.every_sdk
async def test_only_the_weights_of_another_run_are_loaded_also_into_the_reference(
    server, make_backend, parser, sample_of, tmp_path: Path
) -> None:
    """With the other run's moments, a step without advantages would still move the weights."""
    up, down, still = sample_of(ANSWER, 1.0), sample_of(LONG_ANSWER, -1.0), sample_of(ANSWER, 0.0)
    backend = make_backend(server)
    await begin(backend, parser)
    await train(backend, [up], step=1)
    await train(backend, [down], step=2)
    await backend.save_checkpoint(tmp_path)
    expected = await logprobs_of(backend, up, down)
    await train(backend, [still], step=3)
    moved = await logprobs_of(backend, up, down)
    assert np.abs(np.concatenate(moved) - np.concatenate(expected)).max() > 1e-3
    await backend.shutdown()

    new = make_backend(server)
    await new.init_rollout_engine(parser)
    await new.load_weights(tmp_path)
    await new.on_policy_updated(PolicyUpdate(0, 0, "start"))
    for _ in range(2):  # before and after a step
        found = [*await logprobs_of(new, up, down), *await logprobs_of(new, up, down, policy="reference")]
        for mine, theirs in zip(found, [*expected, *expected], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        await train(new, [still], step=1)
    await train(new, [up], step=2)
    [current], [reference] = await logprobs_of(new, up), await logprobs_of(new, up, policy="reference")
    assert np.abs(current - expected[0]).max() > 1e-3
    np.testing.assert_allclose(reference, expected[0], atol=1e-5)
    await new.shutdown()


async def test_adapters_of_another_rank_are_refused_with_both(server, make_backend, parser, tmp_path: Path) -> None:
    backend = make_backend(server)
    await begin(backend, parser)
    await backend.save_checkpoint(tmp_path)
    state = json.loads((tmp_path / "tinker.json").read_text())
    (tmp_path / "tinker.json").write_text(json.dumps({**state, "rank": 4}))
    with pytest.raises(ConfigError, match=r"rank 4, and this run trains .* rank 8"):
        await backend.load_weights(tmp_path)
    await backend.shutdown()


class Sent:
    """A training client that leaves no choice to SkyRL's engine, which polls for passes and optimizer steps in turn."""

    def __init__(self, client: Any, *, step_first: bool) -> None:
        self.client = client
        self.step_first = step_first
        self.held: list[Any] = []

    def forward_backward(self, *arguments: Any) -> concurrent.futures.Future[Any]:
        self.held.append((arguments, concurrent.futures.Future()))
        return self.held[-1][1]

    def optim_step(self, adam: Any) -> Any:
        stepped = self.client.optim_step(adam) if self.step_first else None
        for arguments, answer in self.held:
            passed = self.client.forward_backward(*arguments).future()
            passed.add_done_callback(lambda done, answer=answer: answer.set_result(done.result()))
        if stepped is None:
            concurrent.futures.wait([answer for _, answer in self.held])
            stepped = self.client.optim_step(adam)
        return stepped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


async def test_a_step_that_went_ahead_of_its_gradient_is_done_again(server, make_backend, parser, sample_of) -> None:
    up, down = sample_of(ANSWER, 1.0), sample_of(LONG_ANSWER, -1.0)
    found = []
    for step_first in (False, True):
        backend = make_backend(server)
        await begin(backend, parser)
        await train(backend, [up], step=1)
        policy = policy_of(backend)
        policy._trainer = Sent(policy._trainer, step_first=step_first)
        earlier = policy.recoveries
        norm = (await train(backend, [down], step=2))["grad_norm"]
        assert policy.recoveries - earlier == step_first
        found.append([np.array([norm]), *await logprobs_of(backend, up, down)])
        await backend.shutdown()
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
