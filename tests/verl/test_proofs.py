"""Servers that did not get what was sent: each weight sync is checked, and the first wrong one ends the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_servers import VARIABLE, WORKER, Faults
from rllm_verl.canary import TOKENS
from sessions import Session, opened
from verl_runs import ONE_PROCESS, SEPARATED, run_config

from rllm_core.errors import RunError

ADAPTERS = ("verl.lora.rank=8",)
FAST = ("optimizer.learning_rate=0.005", "optimizer.warmup_steps=0")
TWO_SERVERS = {
    "full": (*SEPARATED, "verl.rollout_devices_per_node=2"),
    "merged": (*ADAPTERS, *SEPARATED, "verl.rollout_devices_per_node=2"),
    "adapters": (*ADAPTERS, "verl.devices_per_node=2"),
}


@dataclass(frozen=True)
class Trial:
    """A session with two servers that may be told to fail.

    Attributes:
        sends: Key of ``TWO_SERVERS``.
        session: The session, after a weight sync without a fault.
        faults: Faults of the next syncs.
        start: Checkpoint of the initial weights.
    """

    sends: str
    session: Session
    faults: Faults
    start: Path

    def train(self) -> None:
        """Takes a step, so that the next weight sync sends something new."""
        session = self.session
        session.train(session.sampled(session.run(session.sample(8, seed=session.step)), [1, -1] * 4))


@pytest.fixture(
    scope="module",
    params=["full", "adapters", pytest.param("merged", marks=pytest.mark.slow)],  # merged weights are sent like others
)
def trial(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("faults")
    faults = Faults(folder / "faults.json")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, VARIABLE, str(folder / "faults.json"))
        options = (*TWO_SERVERS[request.param], *FAST, f"verl.overrides={{{WORKER}, {ONE_PROCESS}}}")
        with opened(run_config(model, *options)) as session:
            start = folder / "start"
            start.mkdir()
            session.run(session.backend.save_checkpoint(start))
            yield Trial(request.param, session, faults, start)


@pytest.fixture(autouse=True)
def sound(trial: Trial) -> Iterator[None]:
    """Servers have the trainer's weights before and after each test."""
    trial.train()
    trial.session.publish()
    yield
    trial.faults.clear()
    trial.session.publish()


@pytest.mark.parametrize("servers", [(0, 1), (1,)], ids=["all", "one-of-two"])
@pytest.mark.parametrize("fault", ["withheld", "stale", "doubled", "one_bit"])
def test_the_first_sync_of_other_weights_ends_the_run(trial: Trial, fault: str, servers: tuple[int, ...]) -> None:
    trial.train()
    trial.faults.set(fault, servers)
    said = f"weight sync to version {trial.session.version + 1}: server {servers[0]} of 2 servers "
    has_none = trial.sends == "adapters" and fault == "withheld"  # verl removes the old adapters first
    with pytest.raises(RunError, match=said + ("serves no adapters" if has_none else "does not serve the trainer's")):
        trial.session.publish()


@pytest.mark.parametrize("trial", ["adapters"], indirect=True)
def test_half_of_the_adapters_is_not_enough(trial: Trial) -> None:
    trial.train()
    trial.faults.set("half", (1,))
    with pytest.raises(RunError, match=r"server 1 of 2 servers does not serve .*: 14 of 36 compared .*layers\.1\."):
        trial.session.publish()


@pytest.mark.parametrize("trial", ["adapters"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("withheld", "serves no adapters"),
        ("wrong_alpha", "serves adapters of rank 8 and scaling 8, and the trainer has rank 8 and scaling 4"),
    ],
)
def test_adapters_whose_product_is_zero_are_told_apart_by_their_tensors_only(
    trial: Trial, fault: str, said: str
) -> None:
    session = trial.session
    session.run(session.backend.load_checkpoint(trial.start))
    trial.faults.set(fault, (1,))
    with pytest.raises(RunError, match=f"server 1 of 2 servers {said}"):
        session.publish()
    proofs = session.backend._proofs
    assert proofs is not None
    session.run(
        proofs._canary.check(session.version, TOKENS)
    )  # log-probabilities are those of the base model, on all servers
