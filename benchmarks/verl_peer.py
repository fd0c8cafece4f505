"""What verl's own ``main_ppo`` loads in a comparison: a dataset that waits where a step begins, and the task's reward.

Both are verl's extension points (``data.custom_cls``, ``reward.custom_reward_function``), which take the path of this
file; nothing of verl is edited. Its loop fetches the prompts of a step from the dataset first of all, so a step lasts
from one wait to the next, with everything that the loop computes, logs and clears up meanwhile.
"""

from __future__ import annotations

import socket
from typing import IO, Any

from rllm_workflows.sort import score
from verl.utils.dataset.rl_dataset import RLHFDataset

from benchmarks.endless import even_share


class GatedDataset(RLHFDataset):  # type: ignore[misc]
    """verl's dataset, in whose loop the step waits for its turn, at the socket ``data.turns``."""

    _turns: IO[str] | None = None

    def __getitem__(self, item: int) -> dict[str, Any]:
        """A prompt; the first one of a step comes when it is allowed to."""
        step, position = divmod(item, self.config.train_batch_size)
        if position == 0:
            if self._turns is None:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(self.config.turns)
                self._turns = connection.makefile("rw", encoding="utf-8")
            self._turns.write(f"{step}\n")
            self._turns.flush()
            if not self._turns.readline():
                raise RuntimeError("the benchmark is gone")
        found: dict[str, Any] = super().__getitem__(item)
        return found


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward of the workflow that ``data_source`` names."""
    return even_share(solution_str) if data_source == "endless" else score(solution_str.strip(), ground_truth)
