"""What a person sees of a run whose generation is ahead of training."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_core.training.progress import PlainProgress


@pytest.mark.parametrize("threshold", [0, 2])
def test_lines_of_an_asynchronous_run_say_how_stale_and_how_idle(
    run_scripted: Any, capsys: pytest.CaptureFixture[str], threshold: int
) -> None:
    run = run_scripted(f"training.staleness_threshold={threshold}", progress=PlainProgress())
    assert run.error is None
    [last] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 6/6")]
    metrics, timings = run.lines("metrics")[-1], run.lines("timings")[-1]
    stale = f"staleness {metrics['staleness_mean']:.1f} (at most {metrics['staleness_max']:.0f})"
    idle = f"trainer idle {timings['generation_wait_seconds'] / timings['step_seconds']:.0%}"
    assert (stale in last) == (idle in last) == (threshold > 0)
