"""``rllm-core eval``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

from rllm_core.cli.completion import provided
from rllm_core.cli.options import CommandWithOverrides
from rllm_core.cli.tables import printing_apart


@click.command("eval", cls=CommandWithOverrides, short_help="Evaluate a model on a workflow (pass@k).")
@click.argument(
    "target", metavar="[WORKFLOW|ENV.py|RUN.toml]", required=False, shell_complete=provided("Workflow", files=True)
)
@click.option("--model", metavar="PATH", help="Model folder or Hugging Face model ID; replaces model.path.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint folder (runs/RUN/checkpoints/step-NNNNNN), or run folder to use its latest checkpoint.",
)
@click.option(
    "--backend", metavar="NAME", shell_complete=provided("Backend"), help="Backend to use instead of the run file's."
)
@click.option(
    "--engine",
    "engine_name",
    metavar="NAME",
    shell_complete=provided("Engine"),
    help="Engine to use instead of the backend's; no backend is started.",
)
@click.option(
    "--parser", metavar="NAME", shell_complete=provided("Parser"), help="Parser to use instead of the run file's."
)
@click.option("--split", type=click.Choice(["validation", "train"]), default="validation", show_default=True)
@click.option(
    "--tasks", type=click.IntRange(min=1), metavar="N", help="Number of tasks, evenly spaced. Defaults to all."
)
@click.option("-n", "samples", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts per task.")
@click.option(
    "-k", "ks", type=click.IntRange(min=1), multiple=True, help="k of pass@k; repeatable. Defaults to 1 and n."
)
@click.option("-o", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def evaluate(
    context: click.Context,
    target: str | None,
    model: str | None,
    checkpoint: Path | None,
    backend: str | None,
    engine_name: str | None,
    parser: str | None,
    split: Literal["train", "validation"],
    tasks: int | None,
    samples: int,
    ks: tuple[int, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate a model on a workflow (pass@k).

    The argument is that of rllm-core train. With --checkpoint it is optional, and defaults to the run file of the run:
    its workflow, parser, model and adapters.

    pass@k is the unbiased estimate 1 - C(n-c, k) / C(n, k) per task (arXiv 2107.03374), averaged over tasks. Its 95 %
    confidence interval is a bootstrap over tasks. The sampling temperature is rollout.validation_temperature.

    Ctrl-C prints the result of the rollouts that have finished.
    """
    from rllm_core.assembly.resolution import resolve_run
    from rllm_core.runs import starting
    from rllm_core.training.stopping import Interrupted

    given = [*overrides, *([f"model.path={json.dumps(model)}"] if model is not None else [])]
    target = starting.target_to_evaluate(target, checkpoint)
    plugins = context.obj.plugins
    with printing_apart(as_json):
        resolved = resolve_run(target, plugins, overrides=given, backend=backend, parser=parser, engine=engine_name)
    left: list[str] = []
    measured: list[dict[str, Any]] = []
    stdout = sys.stdout

    def show(result: dict[str, Any]) -> None:  # at once: the shutdown may hang until a second Ctrl-C ends the process
        measured.append(result)
        if as_json:
            click.echo(json.dumps(result), file=stdout)
        else:
            _print(result)

    try:
        with printing_apart(as_json):
            result = starting.evaluate(
                resolved,
                left,
                owns_process=context.obj.owns_process,
                checkpoint=checkpoint,
                engine=engine_name,
                split=split,
                tasks=tasks,
                samples=samples,
                ks=ks,
                measured=show,
            )
    except Interrupted as interrupted:
        if not measured:
            raise
        click.echo(str(interrupted), err=True)
        context.exit(interrupted.exit_code)
    finally:
        context.obj.leave_behind(left)
    if result["reward_mean"] is None and (scorer := resolved.config.algorithm.group_scorer):
        click.echo(f"error: group scorer {scorer!r} scored no rollout", err=True)
        context.exit(1)


def _print(result: dict[str, Any]) -> None:
    from rllm_core.run_folder.first_failures import lines
    from rllm_core.text import counted

    click.echo(
        f"{result['workflow']} ({result['split']}): {counted(result['tasks'], 'task')} x "
        f"{counted(result['rollouts_per_task'], 'rollout')}, "
        f"{result['failed']} failed"
    )
    if result["unfinished"]:
        planned = result["tasks"] * result["rollouts_per_task"]
        finished = f"{planned - result['unfinished']} of {planned} rollouts finished"
        click.echo(f"interrupted: {finished}; long ones are more often missing, so the figures may be off")
    for line in lines(result["failures"]):
        click.echo(line, err=True)
    mean = result["reward_mean"]
    click.echo("reward none" if mean is None else f"reward {mean:.3f}")
    for entry in result["pass_at_k"]:
        interval = f"95 % interval {entry['low']:.3f} to {entry['high']:.3f}"
        of = f", over {entry['tasks']} of {counted(result['tasks'], 'task')}" * (entry["tasks"] < result["tasks"])
        click.echo(f"pass@{entry['k']} {entry['value']:.3f}  ({interval}{of})")
