"""vLLM workers that load something else than what was sent, if a file says so; see `Faults`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from rllm_verl.served import ReportingWorker

VARIABLE = "VERL_TEST_FAULTS"  # with the prefix of the variables that all processes get
WORKER = '"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"="faulty_servers.FaultyWorker"'
Weights = list[tuple[str, torch.Tensor]]


class Faults:
    """Sets the fault of the next weight syncs, from the test's process.

    Args:
        path: File that the workers read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clear()

    def set(self, fault: str, servers: tuple[int, ...]) -> None:
        """``fault`` is the name of a method of `FaultyWorker`."""
        self._path.write_text(json.dumps({"fault": fault, "servers": servers}), encoding="utf-8")

    def clear(self) -> None:
        """Lets the workers load what is sent."""
        self._path.write_text("{}", encoding="utf-8")


class FaultyWorker(ReportingWorker):
    """Keeps what it was sent first and last, to load that instead."""

    def _update_weights(self, weights: Weights, peft_config: Any, base_sync_done: bool) -> None:
        if not hasattr(self, "sent_first"):
            self.sent_first: dict[str, torch.Tensor] = {}
            self.sent_last: dict[str, torch.Tensor] = {}
        sent = {name: weight.clone() for name, weight in weights}
        loaded: dict[str, torch.Tensor] = sent
        fault = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        if fault and int(os.environ["VERL_REPLICA_RANK"]) in fault["servers"]:
            if fault["fault"] == "wrong_alpha":
                peft_config = peft_config | {"lora_alpha": 2 * peft_config["lora_alpha"]}
            else:
                loaded = getattr(self, fault["fault"])(sent)
        self.sent_first = {**sent, **self.sent_first}
        self.sent_last.update(sent)
        if loaded:
            super()._update_weights(list(loaded.items()), peft_config=peft_config, base_sync_done=base_sync_done)

    def withheld(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads nothing, as in verl#7495."""
        return {}

    def stale(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads the version before."""
        return {name: self.sent_last[name] for name in sent}

    def doubled(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads twice the change since the first version."""
        return {name: 2 * weight - self.sent_first[name] for name, weight in sent.items()}

    def half(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads every second layer's adapters, and those of the version before for the others."""
        return {name: self.sent_last[name] if ".layers.1." in name else weight for name, weight in sent.items()}

    def one_bit(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads the next larger number in one place of each tensor."""
        for weight in sent.values():
            weight.view(-1)[:1] = torch.nextafter(weight.view(-1)[:1], torch.tensor(torch.inf))
        return sent
