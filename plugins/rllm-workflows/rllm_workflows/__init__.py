"""Workflows for rllm-core; each is in the module of its name, and imported when it is selected."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Workflow

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[Workflow]:
    """``sort``, ``guess``, ``calculator`` and ``countdown``."""
    return [
        Workflow(
            name="sort",
            load="rllm_workflows.sort:SortWorkflow",
            config="rllm_workflows.sort:SortConfig",
            run_file="rllm_workflows.sort:run_file",
            summary="Put four letters in order; the starter task.",
        ),
        Workflow(
            name="guess",
            load="rllm_workflows.guess:GuessWorkflow",
            config="rllm_workflows.guess:GuessConfig",
            run_file="rllm_workflows.guess:run_file",
            summary="Find a number from higher/lower feedback in a few turns.",
        ),
        Workflow(
            name="calculator",
            load="rllm_workflows.calculator:CalculatorWorkflow",
            config="rllm_workflows.calculator:CalculatorConfig",
            run_file="rllm_workflows.calculator:run_file",
            summary="Call a tool, read its result, report it; several turns.",
        ),
        Workflow(
            name="countdown",
            load="rllm_workflows.countdown:CountdownWorkflow",
            config="rllm_workflows.countdown:CountdownConfig",
            run_file="rllm_workflows.countdown:run_file",
            summary="Reach a target from given numbers with + - * /.",
        ),
    ]
