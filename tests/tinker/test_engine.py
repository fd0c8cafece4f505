"""The engine on the real server."""

from __future__ import annotations

import numpy as np
import pytest

from rllm_core.backend import PolicyUpdate
from rllm_core.engine import EngineError
from rllm_core.types import FinishReason, SamplingParams

pytestmark = pytest.mark.every_sdk


@pytest.fixture
def params(parser) -> SamplingParams:
    return SamplingParams(max_response_tokens=6, stop_token_ids=tuple(parser.get_stop_token_ids()))


async def test_a_group_is_one_request(server, make_backend, parser, prompt_ids, params) -> None:
    backend = make_backend(server)
    engine = await backend.init_rollout_engine(parser)
    await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
    seen = server.request_count()
    outputs = await engine.get_token_outputs_from_token_input(prompt_ids, sampling_params=params, seeds=range(16))
    assert server.requests(seen)["asample"] == 1
    assert len(outputs) == 16
    assert len({output.token_ids.tobytes() for output in outputs}) > 8
    for output in outputs:
        stopped = output.token_ids[-1] in params.stop_token_ids
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert len(output.token_ids) == 6 or stopped
    again = await engine.get_token_outputs_from_token_input(prompt_ids, sampling_params=params, seeds=range(16))
    assert [list(output.token_ids) for output in again] == [list(output.token_ids) for output in outputs]
    await backend.shutdown()


async def test_given_tokens_have_the_log_probabilities_they_were_sampled_with(
    server, make_backend, parser, prompt_ids, params
) -> None:
    backend = make_backend(server)
    engine = await backend.init_rollout_engine(parser)
    await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
    output = await engine.get_token_output_from_token_input(prompt_ids, sampling_params=params, seed=3)
    scored = await engine.compute_logprobs(np.concatenate([prompt_ids, output.token_ids]), start=len(prompt_ids))
    np.testing.assert_allclose(scored, output.logprobs, atol=1e-4)
    await backend.shutdown()


async def test_ids_outside_the_vocabulary_are_not_sent(server, make_backend, parser, params) -> None:
    backend = make_backend(server)
    engine = await backend.init_rollout_engine(parser)
    await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
    seen = server.request_count()
    outside = len(parser.tokenizer)
    with pytest.raises(EngineError, match=f"token id {outside} is outside the vocabulary of {outside} tokens"):
        await engine.get_token_output_from_token_input(np.array([1, outside]), sampling_params=params, seed=0)
    with pytest.raises(EngineError, match="at least one prompt token"):
        await engine.get_token_output_from_token_input(np.array([], np.int32), sampling_params=params, seed=0)
    assert server.requests(seen)["asample"] == 0
    await backend.shutdown()
