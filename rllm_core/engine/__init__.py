"""Rollout engines (token ids in, token ids out), and the completers through which a workflow calls them."""

from rllm_core.engine.completers import Completer
from rllm_core.engine.contract import EngineBusy, EngineError, RolloutEngine, Terminated, TokenSource
from rllm_core.engine.tito import TITOCompleter
from rllm_core.seeds import derive_seed

__all__ = [
    "Completer",
    "EngineBusy",
    "EngineError",
    "RolloutEngine",
    "TITOCompleter",
    "Terminated",
    "TokenSource",
    "derive_seed",
]
