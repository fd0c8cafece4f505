"""Workflows for rllm-core, each in the module of its name and imported when selected."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import RewardFunctionProvider, WorkflowProvider

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Provides the workflows of this package."""
    return [
        WorkflowProvider(
            name="sort",
            load="rllm_workflows.sort:SortWorkflow",
            config="rllm_workflows.sort:SortConfig",
            run_file="rllm_workflows.sort:run_file",
            summary="Sort four letters; the starter task.",
        ),
        WorkflowProvider(
            name="guess",
            load="rllm_workflows.guess:GuessWorkflow",
            config="rllm_workflows.guess:GuessConfig",
            run_file="rllm_workflows.guess:run_file",
            summary="Find a number from higher/lower feedback in a few turns.",
        ),
        WorkflowProvider(
            name="calculator",
            load="rllm_workflows.calculator:CalculatorWorkflow",
            config="rllm_workflows.calculator:CalculatorConfig",
            run_file="rllm_workflows.calculator:run_file",
            summary="Call a tool, read its result and report it, over several turns.",
        ),
        WorkflowProvider(
            name="countdown",
            load="rllm_workflows.countdown:CountdownWorkflow",
            config="rllm_workflows.countdown:CountdownConfig",
            run_file="rllm_workflows.countdown:run_file",
            summary="Reach a target from the given numbers with + - * /.",
        ),
        WorkflowProvider(
            name="math",
            load="rllm_workflows.math:MathWorkflow",
            config="rllm_workflows.math:MathConfig",
            run_file="rllm_workflows.math:run_file",
            summary="Solve math problems; final answers are compared by value.",
        ),
        WorkflowProvider(
            name="dataset",
            load="rllm_workflows.dataset:DatasetWorkflow",
            config="rllm_workflows.dataset:DatasetConfig",
            run_file="rllm_workflows.dataset:run_file",
            summary="Answer questions from JSON Lines, Parquet or Hugging Face datasets.",
        ),
        WorkflowProvider(
            name="solver_judge",
            load="rllm_workflows.solver_judge:SolverJudgeWorkflow",
            config="rllm_workflows.solver_judge:SolverJudgeConfig",
            run_file="rllm_workflows.solver_judge:run_file",
            summary="Several solvers answer at once, and a judge picks one of their answers.",
        ),
        WorkflowProvider(
            name="sft",
            load="rllm_workflows.sft:SFTWorkflow",
            config="rllm_workflows.sft:SFTConfig",
            run_file="rllm_workflows.sft:run_file",
            summary="Supervised fine-tuning on a file of conversations.",
        ),
    ]


@hookimpl
def reward_functions() -> list[RewardFunctionProvider]:
    """Provides the standard reward functions, for any workflow."""
    return [
        RewardFunctionProvider(
            name="exact_match",
            load="rllm_workflows.rewards:exact_match",
            summary="1 if the text equals the answer.",
        ),
        RewardFunctionProvider(
            name="contains",
            load="rllm_workflows.rewards:contains",
            summary="1 if the answer occurs in the text as whole words.",
        ),
        RewardFunctionProvider(
            name="numeric",
            load="rllm_workflows.rewards:numeric",
            summary="1 if the last numbers in text and answer are equal.",
        ),
        RewardFunctionProvider(
            name="math",
            load="rllm_workflows.rewards:math",
            summary="1 if the final answer of the text has the answer's value, in any notation.",
        ),
        RewardFunctionProvider(
            name="multiple_choice",
            load="rllm_workflows.rewards:multiple_choice",
            summary="1 if the text chooses the answer's letter.",
        ),
        RewardFunctionProvider(
            name="f1",
            load="rllm_workflows.rewards:f1",
            summary="Word overlap of text and answer.",
        ),
    ]
