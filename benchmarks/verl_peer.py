"""Dataset and reward for verl's own ``main_ppo`` in a comparison; the dataset waits at the start of each step.

Both use verl's extension points (``data.custom_cls``, ``reward.custom_reward_function``) with the path of this file;
verl is not modified. Its loop starts a step by fetching prompts from the dataset. So a step lasts from one wait to the
next, including all computation, logging and cleanup.
"""

from __future__ import annotations

import socket
from typing import IO, Any

from rllm_workflows.sort import score
from verl.utils.dataset.rl_dataset import RLHFDataset

from benchmarks.endless import even_share


class GatedDataset(RLHFDataset):  # type: ignore[misc]
    """verl's dataset; each step waits for its turn at the socket ``data.turns``."""

    _turns: IO[str] | None = None

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Returns a prompt; the first one of a step waits for its turn."""
        step, position = divmod(item, self.config.train_batch_size)
        if position == 0:
            if self._turns is None:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(self.config.turns)
                self._turns = connection.makefile("rw", encoding="utf-8")
            self._turns.write(f"{step}\n")
            self._turns.flush()
            if not self._turns.readline():
                raise RuntimeError("the benchmark process has exited")
        found: dict[str, Any] = super().__getitem__(item)
        return found


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Computes the reward of the workflow named by ``data_source``."""
    return even_share(solution_str) if data_source == "endless" else score(solution_str.strip(), ground_truth)
