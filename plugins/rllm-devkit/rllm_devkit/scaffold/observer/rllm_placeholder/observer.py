"""``placeholder``: writes one line per optimizer step to a file in the run folder."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rllm_core import hookimpl

if TYPE_CHECKING:
    from rllm_core.events import TrainerState
    from rllm_core.types import Episode

FILE = "placeholder.log"

_ended: Counter[str] = Counter()


@hookimpl
def on_train_start(state: TrainerState) -> None:
    """Forgets an earlier run of this process."""
    _ended.clear()
    _write(state, f"start {state.incarnation} at step {state.step}")


@hookimpl
def on_episode_finished(episode: Episode) -> None:
    """Counts how training rollouts end. This is called most often, so keep it fast."""
    if not episode.is_validation:
        _ended[episode.termination_reason.value] += 1


@hookimpl
def on_batch_end(state: TrainerState, step: int, metrics: dict[str, float]) -> None:
    """Writes the reward, and how rollouts ended since the last line."""
    counts = ", ".join(f"{count} {reason}" for reason, count in _ended.most_common())
    reward = f"reward {metrics['reward_mean']:.3f}" if "reward_mean" in metrics else "no rewards"
    _write(state, f"step {step}: {reward}; rollouts: {counts or 'none'}")
    _ended.clear()


@hookimpl
def on_train_end(state: TrainerState, status: str) -> None:
    """Writes how the run ended; also called after errors."""
    _write(state, f"{status} at step {state.step}")


def _write(state: TrainerState, line: str) -> None:
    with (state.run_dir / FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
