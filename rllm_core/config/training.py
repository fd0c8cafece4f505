"""Keys of the training loop and of its rollouts."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from rllm_core.run_file import Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainingConfig(Section, use_attribute_docstrings=True):
    """``[training]``: the loop. An optimizer step trains ``groups_per_step`` groups of ``rollouts_per_group`` each."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps in the run."""
    init_from: Annotated[str | None, Field(min_length=1)] = None
    """Run folder with the initial weights: `RUN` for its latest checkpoint, or `RUN:STEP` for that of a step. The
    optimizer and counters start afresh. Relative to the run file. Defaults to the weights of the model.
    """
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed from which all other seeds of the run are derived."""
    sampler: str = "uniform"
    """Name of the task sampler, which chooses the tasks. `uniform` takes every task once per epoch."""
    sampler_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task sampler."""
    groups_per_step: Annotated[int, Field(ge=1)] = 16
    """Groups per optimizer step; a group is the rollouts of one task."""
    rollouts_per_group: Annotated[int, Field(ge=1)] = 8
    """Rollouts per group."""
    groups_per_forward_backward: Annotated[int | None, Field(ge=1)] = None
    """Groups per forward-backward pass; gradients accumulate over a step. Defaults to one pass per step."""
    staleness_threshold: Annotated[float, Field(ge=0)] = 0.0
    """How far generation may run ahead of training, in sync windows. 0 is synchronous."""
    trigger_parameter_sync_step: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two weight syncs."""
    partial_rollout: bool = False
    """Sync weights while rollouts are running, instead of waiting for them to finish."""
    staleness: Literal["quota", "strict"] = "quota"
    """What the threshold limits: the total lead of generation (`quota`), or the staleness of every trained group
    (`strict`).
    """
    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints. 0 saves one only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of latest checkpoints to keep."""
    validate_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. 0 validates only before and after training."""
    validation_rollouts: Annotated[int, Field(ge=0)] = 512
    """Rollouts per validation, spread evenly over its tasks. 0 disables validation."""
    groups_kept_per_step: Annotated[int, Field(ge=0)] = 1
    """Groups recorded in groups.jsonl per step; per validation, four times as many tasks. 0 records none."""
    answers_table_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between tables of the sampled answers in these groups, for trackers that show tables and, with
    rllm-viewer, for the terminal. 0 shows none.
    """
    trajectories_per_step: Annotated[int, Field(ge=0)] = 0
    """Deprecated: episodes written to trajectories.jsonl per step, and per validation. Use groups_kept_per_step."""
    buffer_max_bytes: Annotated[int, Field(ge=1)] = 8 * 2**30
    """Bytes of memory for complete groups waiting for training. Generation pauses at the limit."""
    buffer_spill: bool = False
    """Write groups beyond buffer_max_bytes to the run folder instead of pausing generation."""
    stall_timeout_seconds: Seconds = 1800.0
    """Seconds without progress after which the run ends with StallError."""
    backend_timeout_seconds: Seconds = 3600.0
    """Timeout of each backend call (allocation, pass, optimizer step, checkpoint), in seconds."""
    sync_timeout_seconds: Seconds = 600.0
    """Timeout of a weight sync, in seconds."""
    trackers: tuple[str, ...] = ()
    """Names of the trackers that receive the metrics."""

    @property
    def window_quota(self) -> int:
        """Maximum number of groups that are running, waiting or already trained in one sync window."""
        ahead = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * self.groups_per_step
        return math.floor(ahead + 1e-9)


class RolloutConfig(Section, use_attribute_docstrings=True):
    """``[rollout]``: sampling, timeouts and limits of rollouts."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divisor of the logits, in sampling and in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with at least this total probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most likely tokens. 0 disables the limit."""
    validation_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Temperature in validation. 0 is greedy."""
    max_response_tokens: Annotated[int, Field(ge=1)] = 1024
    """Maximum tokens per model call, including the stop token."""
    max_prompt_tokens: Annotated[int | None, Field(ge=1)] = None
    """Maximum tokens per prompt; a longer one ends the rollout."""
    on_segment_break: Literal["segment", "raise"] = "segment"
    """What to do if a prompt does not continue the earlier tokens exactly: start a new segment, or fail the rollout."""
    rollout_timeout_seconds: Seconds = 600.0
    """Timeout of one rollout, in seconds."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Maximum attempts per rollout; each starts from scratch."""
    request_timeout_seconds: Seconds = 600.0
    """Timeout of one engine call, in seconds."""
    max_request_attempts: Annotated[int, Field(ge=1)] = 6
    """Maximum attempts per call while the engine is busy or unreachable, with growing pauses."""
    max_consecutive_failures: Annotated[int, Field(ge=1)] = 256
    """Consecutive failed attempts after which the run stops."""
    max_failure_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the last 1000 attempts that may fail before the run stops."""
    quarantine_after_groups: Annotated[int, Field(ge=1)] = 2
    """Consecutive failed groups of a task after which the run stops using the task."""
    max_concurrent_rollouts: Annotated[int, Field(ge=1)] = 4096
    """Maximum concurrent rollouts."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 1024
    """Maximum concurrent engine calls. Identical prompts sent at the same moment share one call."""
    sandbox: str = "child"
    """Sandbox for model-written code. `child` limits time and memory, but does not isolate; `bwrap` does."""
    host: str = ""
    """Where rollouts run: `inline` in the process of the run, `processes` in others. Defaults to `inline`, or to
    `processes` if a key of its workers is set or the workflow asks for it.
    """
    workers: Annotated[int | None, Field(ge=1)] = None
    """Workers of a host that has them. Defaults to one per CPU core."""
    rollouts_per_worker: Annotated[int | None, Field(ge=1)] = None
    """Maximum concurrent rollouts in a worker. 1 gives each rollout a process of its own. Defaults to no limit."""
    replace_worker_after_rollouts: Annotated[int, Field(ge=0)] = 0
    """Replace a worker when it has run this many rollouts. 0 keeps it."""
    worker_memory_bytes: Annotated[int | None, Field(ge=64 << 20)] = None
    """Maximum memory of a worker. A worker that needs more is replaced, and its rollouts are repeated. Defaults to no
    limit.
    """
    python: Annotated[str | None, Field(min_length=1)] = None
    """Python interpreter of the workers, such as that of another environment. Defaults to that of the run."""
