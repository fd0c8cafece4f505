"""Servers that go down, come back, stall and reject requests."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import StartRun
from rllm_tinker import sdk
from rllm_tinker.backend import TinkerBackend
from rllm_tinker.engine import TinkerEngine
from server import TinkerServer
from test_weights import ANSWER, LONG_ANSWER, OVERLAPPING, begin, logprobs_of, policy_of, rows, train

from rllm_core.backend import PolicyUpdate
from rllm_core.engine import EngineError
from rllm_core.errors import ConfigError, RunError
from rllm_core.types import Floats, SamplingParams
from rllm_viewer.verify import verify

KEY = "tml-a-key-that-must-not-show-anywhere-4f1c"


def test_a_server_that_is_killed_in_a_step_ends_a_run_or_is_waited_for(
    server: TinkerServer, start_run: StartRun
) -> None:
    """Of two runs, the impatient one gives up and names its last state; the other continues when the server is back."""
    # Compiling the first step takes the server longer than the impatient run would wait.
    assert start_run(server, "training.steps=1", name="first").wait() == 0
    impatient = start_run(
        server,
        "training.steps=300",
        "training.checkpoint_every_steps=1",
        "tinker.future_timeout_seconds=30",
        "tinker.reconnect_timeout_seconds=25",
        "rollout.request_timeout_seconds=12",
        name="impatient",
    )
    impatient.wait_for_step(1)
    patient = start_run(
        server,
        "training.steps=6",
        "training.checkpoint_every_steps=2",
        "training.staleness_threshold=1",
        "training.partial_rollout=true",
        "algorithm.loss=ppo_clip",
        name="patient",
        key=KEY,
    )
    patient.wait_for_step(3)
    server.stall_in_a_sample(KEY)
    server.kill()
    assert impatient.wait() == 1, impatient.printed()
    assert "did not come back within 25 s" in impatient.printed()
    assert "last state saved there: tinker://" in impatient.printed()
    assert verify(impatient.path).problems == []

    server.start()
    assert patient.wait() == 0, patient.printed()
    summary = patient.summary()
    assert summary["optimizer_steps"] == 6
    assert summary["books"]["dispatched"] == summary["books"]["trained"] + summary["books"]["failed"]
    assert summary["retries"] > 0
    assert verify(patient.path).problems == []
    gaps = [line.get("rollout_logprob_difference_max", 0.0) for line in patient.lines("metrics")]
    assert 0 < max(gaps) < 1e-4
    for artefact in [patient.log, *(path for path in patient.path.rglob("*") if path.is_file())]:
        assert KEY.encode() not in artefact.read_bytes(), artefact


async def test_lost_weights_are_trained_again(server, make_backend, parser, sample_of, prompt_ids) -> None:
    """Killed after a pass was sent, two steps after the last saved state: recovery restores the lost weights."""
    up, down = sample_of(ANSWER, 1.0, logprobs=[-1.0] * 4), sample_of(LONG_ANSWER, -1.0, logprobs=[-1.0] * 8)
    scored = np.concatenate([prompt_ids, ANSWER]).astype(np.int32)

    async def begin_step_3(overrides: Sequence[str]) -> tuple[TinkerBackend, TinkerEngine, Floats]:
        backend = make_backend(server, *overrides, "algorithm.aggregation=sequence_mean_token_sum")
        engine = await begin(backend, parser)
        await train(backend, [up], step=1)
        await backend.on_policy_updated(PolicyUpdate(1, 1, "step"))
        live = await engine.compute_logprobs(scored, start=len(prompt_ids))
        await train(backend, [down], step=2)
        await backend.process_backend_batch(backend.transform_to_backend_batch(rows([up])))
        return backend, engine, live

    async def end_step_3(backend: TinkerBackend) -> list[Floats]:
        await train(backend, [down], step=3)
        return await logprobs_of(backend, up, down)

    modes = {"synchronous": (), "asynchronous": OVERLAPPING}
    expected = {}
    for mode, overrides in modes.items():
        backend, _, live = await begin_step_3(overrides)
        expected[mode] = [live, *await end_step_3(backend)]
        await backend.shutdown()
    begun = {mode: await begin_step_3(overrides) for mode, overrides in modes.items()}
    # The server may have let an optimizer step run ahead (see README.md); from here on none is sent ahead.
    earlier = {mode: policy_of(backend).recoveries for mode, (backend, _, _) in begun.items()}
    server.kill()
    server.start()
    for mode, (backend, engine, live) in begun.items():
        found = [live, *await end_step_3(backend)]
        for before, after in zip(expected[mode], found, strict=True):
            np.testing.assert_allclose(after, before, atol=1e-4, err_msg=mode)
        assert policy_of(backend).recoveries == earlier[mode] + 1
        if mode == "asynchronous":  # separate samplers have the live version's weights again
            again = await engine.compute_logprobs(scored, start=len(prompt_ids))
            np.testing.assert_allclose(again, live, atol=1e-4)
        await backend.shutdown()


@pytest.mark.every_sdk
async def test_a_request_for_a_model_that_is_forgotten_is_an_engine_error_and_the_next_one_is_answered(
    server, make_backend, parser, prompt_ids
) -> None:
    """Same as after a restart: the model is restored while the first request fails."""
    backend = make_backend(server)
    engine = await begin(backend, parser)
    params = SamplingParams(max_response_tokens=6)
    server.unload_models()
    with pytest.raises(EngineError, match="lost a request"):
        await engine.get_token_output_from_token_input(prompt_ids, sampling_params=params, seed=0)
    output = await engine.get_token_output_from_token_input(prompt_ids, sampling_params=params, seed=0)
    assert output.weight_version == 0
    await backend.shutdown()


def test_an_engine_that_stalls_for_a_minute_is_waited_for(server: TinkerServer, start_run: StartRun) -> None:
    run = start_run(server, "training.steps=5")
    run.wait_for_step(2)
    server.stall(is_stalled=True)
    try:
        time.sleep(60)
    finally:
        server.stall(is_stalled=False)
    assert run.wait() == 0, run.printed()
    assert run.summary()["books"]["failed"] == 0
    assert verify(run.path).problems == []


async def test_a_name_that_is_taken_costs_one_deadline(server, make_backend, parser, monkeypatch) -> None:
    """The SDK treats the rejection as temporary, so later requests wait; the restored model saves under a new name."""
    backend = make_backend(server)
    await begin(backend, parser)
    policy = policy_of(backend)
    await policy.save(None)
    patient, deadlines = policy._server.answer, [6.0]

    async def answer(what: str, future: Any) -> Any:
        """Gives up soon on the first answer, which never comes, and waits for all others as long as always."""
        return await (sdk.answer(deadlines.pop(), what, future) if deadlines else patient(what, future))

    monkeypatch.setattr(policy._server, "answer", answer)
    policy._saves -= 1  # reuse the last name
    path = await policy.save(None)
    assert policy.recoveries == 1
    assert path.startswith("tinker://")
    await backend.shutdown()


async def test_a_rank_that_the_server_has_not_got(server, make_backend, parser) -> None:
    backend = make_backend(server, "tinker.rank=4096")
    with pytest.raises(RunError, match=r"rank 4096 must be between 1 and 8"):
        await backend.init_rollout_engine(parser)


async def test_a_model_that_the_server_does_not_serve(server, make_backend, parser) -> None:
    """SkyRL's server would take the name and train its own model."""
    backend = make_backend(server, "tinker.base_model=other/model")
    try:
        with pytest.raises(ConfigError, match=f"does not serve model 'other/model'; it serves '{server.model}'"):
            await backend.init_rollout_engine(parser)
    finally:
        await backend.shutdown()


async def test_nobody_listens(server, make_backend, parser) -> None:
    backend = make_backend(server, "tinker.base_url=http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"nothing answers at tinker.base_url = 'http://127.0.0.1:9'.*check the address"):
        await backend.init_rollout_engine(parser)


@pytest.mark.parametrize("loss", ["gspo", "dual_clip", "no_such_loss"])
def test_a_loss_that_no_server_has(server, make_backend, loss: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss = '{loss}' is not supported by backend 'tinker'"):
        make_backend(server, f"algorithm.loss={loss}")


class Refusing(http.server.BaseHTTPRequestHandler):
    """Responds to everything with 401 and the key it received, which a server should never do."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"detail": f"bad key {self.headers.get('X-API-Key')}"}).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Does nothing, to keep the test's output clean."""


@dataclass
class RefusingServer:
    base_url: str
    model: object


@pytest.fixture
def refusing_server(model) -> Iterator[RefusingServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield RefusingServer(f"http://127.0.0.1:{listening.server_port}", model)
        listening.shutdown()


def test_a_key_that_the_server_refuses_is_not_shown(refusing_server, start_run: StartRun) -> None:
    run = start_run(refusing_server, key=KEY)
    assert run.wait() == 2, run.printed()
    assert "set TINKER_API_KEY to a key that is valid there" in run.printed()
    assert "bad key <TINKER_API_KEY>" in run.printed()
    for artefact in [run.log, *(path for path in run.path.rglob("*") if path.is_file())]:
        assert KEY.encode() not in artefact.read_bytes(), artefact
