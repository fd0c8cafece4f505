"""The section ``[verifiers]`` of the run file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rllm_core.workflow import WorkflowConfig


class VerifiersConfig(WorkflowConfig):
    """``[verifiers]``: the environment, its arguments, and the sizes of the splits."""

    environment: Annotated[
        str,
        Field(
            min_length=1,
            description="Taskset as verifiers loads it, such as gsm8k or owner/name of an installed package of the "
            "Hub, or the path of a taskset of yours, such as ./words.py.",
        ),
    ]
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Keys of the taskset's own config. The taskset checks them."
    )
    env_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Other keys of verifiers' [env] table: those of an agent, or id, which plays the taskset in "
        "another environment, such as user-sim. verifiers checks them.",
    )
    train_size: Annotated[
        int | None,
        Field(
            ge=1, description="Maximum number of training tasks. Defaults to all, or 1,000,000 of an infinite taskset."
        ),
    ] = None
    validation_size: Annotated[
        int,
        Field(
            ge=0,
            description="Number of tasks to hold out: the first ones of the taskset, and at most a fifth of them. No "
            "task with the same question is trained.",
        ),
    ] = 100
    solved_at: Annotated[
        float,
        Field(
            allow_inf_nan=False,
            description="Minimum reward of every trainable agent at which a task counts as solved.",
        ),
    ] = 1.0
    hide_tools: Annotated[
        bool,
        Field(description="Hide tools from the model, for models that were taught to call them without a description."),
    ] = False
    hide_system: Annotated[
        bool,
        Field(description="Hide system messages from the model, for models that were taught a bare format."),
    ] = False
    warm_start: Annotated[
        str,
        Field(
            description="Function warm_start(rng) that yields example conversations for a model made from scratch, as "
            "./FILE.py:NAME or package.module:NAME. They teach the form of answers, not which are good."
        ),
    ] = ""
