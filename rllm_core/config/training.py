"""Keys of the training loop and of its rollouts."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from rllm_core.run_file import Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainingConfig(Section):
    """``[training]``: the loop. An optimizer step trains ``groups_per_step`` groups of ``rollouts_per_group`` each."""

    steps: Annotated[int, Field(ge=0, description="Optimizer steps in the run.")] = 100
    seed: Annotated[int, Field(ge=0, description="Seed from which all other seeds of the run are derived.")] = 0
    groups_per_step: Annotated[
        int, Field(ge=1, description="Groups per optimizer step; a group is the rollouts of one task.")
    ] = 16
    rollouts_per_group: Annotated[int, Field(ge=1, description="Rollouts per group.")] = 8
    groups_per_forward_backward: Annotated[
        int | None,
        Field(
            ge=1,
            description="Groups per forward-backward pass; gradients accumulate over a step. Defaults to one pass per "
            "step.",
        ),
    ] = None
    staleness_threshold: Annotated[
        float,
        Field(ge=0, description="How far generation may run ahead of training, in sync windows. 0 is synchronous."),
    ] = 0.0
    trigger_parameter_sync_step: Annotated[
        int, Field(ge=1, description="Optimizer steps between two weight syncs.")
    ] = 1
    partial_rollout: Annotated[
        bool, Field(description="Sync weights while rollouts are running, instead of waiting for them to finish.")
    ] = False
    staleness: Annotated[
        Literal["quota", "strict"],
        Field(
            description="What the threshold limits: the total lead of generation (`quota`), or the staleness of every "
            "trained group (`strict`)."
        ),
    ] = "quota"
    checkpoint_every_steps: Annotated[
        int, Field(ge=0, description="Steps between checkpoints. 0 saves one only at the end.")
    ] = 0
    keep_checkpoints: Annotated[int, Field(ge=1, description="Number of latest checkpoints to keep.")] = 2
    validate_every_steps: Annotated[
        int, Field(ge=0, description="Steps between validations. 0 validates only before and after training.")
    ] = 0
    validation_rollouts: Annotated[
        int, Field(ge=0, description="Rollouts per validation, spread evenly over its tasks. 0 disables validation.")
    ] = 512
    trajectories_per_step: Annotated[
        int, Field(ge=0, description="Episodes written to trajectories.jsonl per step, and per validation.")
    ] = 8
    buffer_max_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Bytes of memory for complete groups waiting for training. Generation pauses at the limit.",
        ),
    ] = 8 * 2**30
    buffer_spill: Annotated[
        bool,
        Field(description="Write groups beyond buffer_max_bytes to the run folder instead of pausing generation."),
    ] = False
    stall_timeout_seconds: Annotated[
        Seconds, Field(description="Seconds without progress after which the run ends with StallError.")
    ] = 1800.0
    backend_timeout_seconds: Annotated[
        Seconds,
        Field(description="Timeout of each backend call (allocation, pass, optimizer step, checkpoint), in seconds."),
    ] = 3600.0
    sync_timeout_seconds: Annotated[Seconds, Field(description="Timeout of a weight sync, in seconds.")] = 600.0
    trackers: Annotated[tuple[str, ...], Field(description="Names of the trackers that receive the metrics.")] = ()

    @property
    def window_quota(self) -> int:
        """Maximum number of groups that are running, waiting or already trained in one sync window."""
        ahead = (1 + self.staleness_threshold) * self.trigger_parameter_sync_step * self.groups_per_step
        return math.floor(ahead + 1e-9)


class RolloutConfig(Section):
    """``[rollout]``: sampling, timeouts and limits of rollouts."""

    temperature: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Divisor of the logits, in sampling and in training.")
    ] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Sample from the smallest set of tokens with at least this total probability."),
    ] = 1.0
    top_k: Annotated[int, Field(ge=0, description="Sample from the k most likely tokens. 0 disables the limit.")] = 0
    validation_temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="Temperature in validation. 0 is greedy.")
    ] = 1.0
    max_response_tokens: Annotated[
        int, Field(ge=1, description="Maximum tokens per model call, including the stop token.")
    ] = 1024
    max_prompt_tokens: Annotated[
        int | None, Field(ge=1, description="Maximum tokens per prompt; a longer one ends the rollout.")
    ] = None
    on_segment_break: Annotated[
        Literal["segment", "raise"],
        Field(
            description="What to do if a prompt does not continue the earlier tokens exactly: start a new segment, or "
            "fail the rollout."
        ),
    ] = "segment"
    rollout_timeout_seconds: Annotated[Seconds, Field(description="Timeout of one rollout, in seconds.")] = 600.0
    max_attempts: Annotated[int, Field(ge=1, description="Maximum attempts per rollout; each starts from scratch.")] = 3
    request_timeout_seconds: Annotated[Seconds, Field(description="Timeout of one engine call, in seconds.")] = 600.0
    max_request_attempts: Annotated[
        int,
        Field(
            ge=1, description="Maximum attempts per call while the engine is busy or unreachable, with growing pauses."
        ),
    ] = 6
    max_consecutive_failures: Annotated[
        int, Field(ge=1, description="Consecutive failed attempts after which the run stops.")
    ] = 256
    max_failure_share: Annotated[
        float, Field(gt=0, le=1, description="Share of the last 1000 attempts that may fail before the run stops.")
    ] = 0.5
    quarantine_after_groups: Annotated[
        int, Field(ge=1, description="Consecutive failed groups of a task after which the run stops using the task.")
    ] = 2
    max_concurrent_rollouts: Annotated[int, Field(ge=1, description="Maximum concurrent rollouts.")] = 4096
    max_concurrent_requests: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum concurrent engine calls. Identical prompts sent at the same moment share one call.",
        ),
    ] = 1024
    sandbox: Annotated[
        str,
        Field(description="Sandbox for model-written code. `child` limits time and memory, but does not isolate."),
    ] = "child"
