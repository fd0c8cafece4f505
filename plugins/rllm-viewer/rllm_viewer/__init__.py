"""Tools for runs of rllm-core; importing this module imports none of them."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

__all__ = ["__version__", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """``chat``, ``compare``, ``export-model``, ``runs``, ``show`` and ``verify``."""
    return [
        CommandProvider(
            name="verify",
            load="rllm_viewer.commands.verify:verify",
            summary="Verify that every rollout in a run is accounted for.",
        ),
        CommandProvider(
            name="export-model",
            load="rllm_viewer.commands.export_model:export_model",
            summary="Export a trained model or its adapters for transformers, PEFT and vLLM.",
        ),
        CommandProvider(
            name="chat",
            load="rllm_viewer.commands.chat:chat",
            summary="Talk to a trained model in the terminal.",
        ),
        CommandProvider(
            name="show",
            load="rllm_viewer.commands.show:show",
            summary="Show recorded groups of a run: conversations, rewards, advantages, tokens.",
        ),
        CommandProvider(
            name="runs",
            load="rllm_viewer.commands.runs:runs",
            summary="List the runs in a folder, each with its result.",
        ),
        CommandProvider(
            name="compare",
            load="rllm_viewer.commands.compare:compare",
            summary="Compare runs: differing settings, validations, last metrics, plot.",
        ),
    ]
