"""Tools for the runs of rllm-core. Importing this module does not import the tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

if TYPE_CHECKING:
    from rllm_core.events import TrainerState

__all__ = ["__version__", "cli_commands", "closing_lines", "remarks"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Provides the commands for a run's files and model, and for rollouts in other formats."""
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
            name="view",
            load="rllm_viewer.commands.view:view",
            summary="Show runs in a browser: groups, conversations, every token.",
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
        CommandProvider(
            name="diagnose",
            load="rllm_viewer.commands.diagnose:diagnose",
            summary="Report problems of a run, with their usual causes.",
        ),
        CommandProvider(
            name="export",
            load="rllm_viewer.commands.export:export",
            summary="Export recorded rollouts for training, or in the formats of other tools.",
        ),
        CommandProvider(
            name="import",
            load="rllm_viewer.commands.import_:import_",
            summary="Import rollouts of other tools into a folder for show and view.",
        ),
    ]


@hookimpl
def remarks(state: TrainerState, metrics: dict[str, float], books: dict[str, dict[str, int]]) -> list[str]:
    """Shows sampled answers at a configured interval, and reports each problem as soon as it is certain."""
    from rllm_viewer import answers_table, warnings_of_runs

    shown = answers_table.lines(state) if metrics else []
    return [*shown, *warnings_of_runs.lines(state, metrics, books)]


@hookimpl
def closing_lines(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """Draws the run's plot, and reports what the run achieved, what went wrong, and what to do next."""
    from rllm_viewer import closing, plot

    return [*plot.notes(run_dir, summary), *closing.lines(run_dir, summary)]
