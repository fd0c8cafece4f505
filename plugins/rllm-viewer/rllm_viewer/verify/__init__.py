"""Offline check of a run: replays ``events.jsonl``, and checks every other file of the run folder against it.

It checks these rules, event by event:

- Groups start in the order of the task stream, and none starts twice unless it was cancelled before.
- A rollout starts and ends once per attempt.
- A group is trained at most once, and only after all of its rollouts succeeded.
- The lead of generation stays within the sync window, and with ``staleness = "strict"`` the staleness of every trained
  group within its limit.
- Optimizer steps are consecutive and contain ``groups_per_step`` groups.
- Weight versions only grow, and sampled, complete and consumed groups have a version that was live at the time.

It then compares every number that is in two files: ``summary.json``, ``metrics.jsonl``, ``timings.jsonl``,
``groups.jsonl``, ``costs.jsonl``, ``plugins.json`` and the manifests with the journal, or with each other.

The check does not rely on the loop: it derives the expected content from the events and ``run.toml``.
"""

from rllm_viewer.verify.findings import MAX_PROBLEMS, Verification
from rllm_viewer.verify.run_check import verify

__all__ = ["MAX_PROBLEMS", "Verification", "verify"]
