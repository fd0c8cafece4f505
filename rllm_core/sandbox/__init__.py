"""Foreign code at arm's length: reward functions in children that can be killed, model-written code in a sandbox.

A child process ends runaway computations: it has a wall clock, and limits on its memory and output, and whatever it
does to its own interpreter stays there. It is not a sandbox: it runs as the same user, with the same files and network.
What must not be trusted with those belongs into a real one, which a plugin can provide (hook ``sandboxes``).
"""

from rllm_core.sandbox.child import ChildSandbox
from rllm_core.sandbox.contract import CodeResult, Limits, Sandbox
from rllm_core.sandbox.functions import (
    ChildDied,
    ChildError,
    ChildFunction,
    ChildOutOfMemory,
    ChildOutputTooLong,
    ChildRaised,
    ChildTimeout,
)

__all__ = [
    "ChildDied",
    "ChildError",
    "ChildFunction",
    "ChildOutOfMemory",
    "ChildOutputTooLong",
    "ChildRaised",
    "ChildSandbox",
    "ChildTimeout",
    "CodeResult",
    "Limits",
    "Sandbox",
]
