"""Untrusted code in other processes: reward functions in child processes, model-written code in a sandbox.

A child process stops runaway computations: it has limits on time, memory and output, and damage to its interpreter
does not spread. It does not isolate: it runs as the same user, with the same files and network. Run code that must not
access those in a real sandbox, which a plugin can provide (hook ``sandboxes``).
"""

from rllm_core.moved import moved_names
from rllm_core.sandbox.called_programs import SandboxedFunction
from rllm_core.sandbox.child_functions import (
    ChildDied,
    ChildError,
    ChildFunction,
    ChildNotStarted,
    ChildOutOfMemory,
    ChildOutputTooLong,
    ChildRaised,
    ChildTimeout,
    call_with_retry,
)
from rllm_core.sandbox.contract import Sandbox
from rllm_core.sandbox.keeper import ProcessKeeper
from rllm_core.sandbox.keeper_process import kill_marked
from rllm_core.sandbox.programs import result_of
from rllm_core.sandbox.results import CodeResult, Limits

__getattr__ = moved_names(__name__)

__all__ = [
    "ChildDied",
    "ChildError",
    "ChildFunction",
    "ChildNotStarted",
    "ChildOutOfMemory",
    "ChildOutputTooLong",
    "ChildRaised",
    "ChildTimeout",
    "CodeResult",
    "Limits",
    "ProcessKeeper",
    "Sandbox",
    "SandboxedFunction",
    "call_with_retry",
    "kill_marked",
    "result_of",
]
