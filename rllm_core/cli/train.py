"""``rllm-core train``."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rllm_core.cli.completion import provided
from rllm_core.cli.options import CommandWithOverrides
from rllm_core.cli.tables import printing_apart
from rllm_core.cli.waiting import waiting
from rllm_core.errors import ConfigError

if TYPE_CHECKING:
    from rllm_core.assembly.parts import Parts


@click.command(cls=CommandWithOverrides, short_help="Train a model on a workflow.")
@click.argument(
    "target", metavar="[WORKFLOW|ENV.py|RUN.toml]", required=False, shell_complete=provided("Workflow", files=True)
)
@click.option(
    "--backend", metavar="NAME", shell_complete=provided("Backend"), help="Backend to use instead of the run file's."
)
@click.option(
    "--parser", metavar="NAME", shell_complete=provided("Parser"), help="Parser to use instead of the run file's."
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Run folder. Defaults to runs/WORKFLOW-DATE-TIME."
)
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir from its latest complete checkpoint.")
@click.option(
    "--init-from",
    metavar="RUN[:STEP]",
    help="Start from the weights of another run's latest checkpoint, or that of a step; replaces training.init_from.",
)
@click.option("-o", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check the run without starting it; print settings, their sources and the resulting limits. -v adds defaults.",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="With --dry-run: predict the costs from what this run has spent.",
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="With --dry-run: memory of each device, such as 80GB, if the run's devices are not on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary (or the dry run) as JSON.")
@click.pass_context
def train(
    context: click.Context,
    target: str | None,
    backend: str | None,
    parser: str | None,
    run_dir: Path | None,
    resume: bool,
    init_from: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    like: Path | None,
    device_memory: str | None,
    as_json: bool,
) -> None:
    """Train a model on a workflow.

    The argument is the name of a workflow (NAME, or NAME/VARIANT if it has several environments), a Python file with a
    workflow (ENV.py, or ENV.py:NAME if it contains several), or a run file, which ends in .toml. With --resume it is
    optional, and defaults to the run file in the run folder.

    Exit codes: 0 completed, 1 failed, 2 invalid usage or run file, 3 stopped by the budget, 130 interrupted (SIGINT),
    143 terminated (SIGTERM), 129 terminal closed (SIGHUP).
    """
    from rllm_core.assembly.parts import parts_of
    from rllm_core.assembly.resolution import resolve_run
    from rllm_core.memory import parse_bytes
    from rllm_core.runs import starting

    if resume and init_from is not None:
        raise ConfigError("--init-from starts a new run; leave out --resume, and choose a new --run-dir")
    if like is not None and not dry_run:
        raise ConfigError("--like needs --dry-run: it predicts costs without starting the run")
    if device_memory is not None and not dry_run:
        raise ConfigError("--device-memory needs --dry-run: a run uses the memory of its devices")
    device_bytes = None if device_memory is None else parse_bytes(device_memory)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    run_dir = run_dir and run_dir.expanduser()  # shells leave --run-dir=~/DIR as it is
    target = starting.target_to_train(target, run_dir, resume=resume)
    plugins = context.obj.plugins
    given = [*overrides, *([f"training.init_from={json.dumps(init_from)}"] if init_from is not None else [])]
    with waiting("checking the run file, the plugins and the tasks"), printing_apart(as_json):
        parts = parts_of(resolve_run(target, plugins, overrides=given, backend=backend, parser=parser))
    if dry_run:
        _print_dry_run(parts, device_bytes, as_json, like, show_defaults=context.obj.verbose)
        return
    path = starting.folder_of(parts, run_dir)
    left: list[str] = []
    try:
        with printing_apart(as_json):
            summary = starting.train(parts, path, left, resume=resume, owns_process=context.obj.owns_process)
    finally:
        context.obj.leave_behind(left)
        context.obj.has_hung_threads |= bool(parts.left_running)
    if as_json:
        click.echo(json.dumps({**summary, "run": str(path)}))
        return
    _print_summary(summary)
    click.echo(f"run: {path}")


def _amounts(amounts: Mapping[str, Any]) -> str:
    """Formats amounts with their names, without values that are not numbers."""
    known = {name.replace("_", " "): value for name, value in amounts.items() if isinstance(value, int | float)}
    forms = {"money": ",.6g", "seconds": ",.1f"}
    return ", ".join(f"{value:{forms.get(name, ',.0f')}} {name}" for name, value in known.items())


def _print_summary(summary: dict[str, Any]) -> None:
    from rllm_core.text import counted

    books = summary["books"]
    click.echo(
        f"{summary['status']}: {summary['optimizer_steps']} of {counted(summary['planned_steps'], 'step')} in "
        f"{summary['seconds']:.0f} s; rollouts: " + ", ".join(f"{books[key]} {key}" for key in books)
    )
    if "costs" in summary:
        click.echo(f"spent: {_amounts(summary['costs'])}")
    validations = summary["validation"]
    shown = [("first", validations[0]), ("last", validations[-1])] if len(validations) > 1 else []
    for label, validation in shown or [("only", validation) for validation in validations]:
        numbers = [
            f"{name} {validation[key]:.3f}"
            for name, key in (("reward", "reward_mean"), ("solved", "solved"), ("nll per token", "nll_per_token"))
            if validation[key] is not None
        ] or ["reward none"]
        click.echo(f"{label} validation (step {validation['step']}): {', '.join(numbers)}")


def _print_dry_run(
    parts: Parts, device_bytes: int | None, as_json: bool, like: Path | None, *, show_defaults: bool
) -> None:
    from rllm_core.config import to_toml
    from rllm_core.run_file import leaf_keys
    from rllm_core.run_folder.initial import checked, with_step
    from rllm_core.run_folder.prediction import predict
    from rllm_core.training.validation import plan

    derived, config = parts.derived(), with_step(parts.config)
    if (initial := checked(config)) is not None:
        parts.notes.append(f"starts from the weights of {initial.run} after step {initial.step}")
    rollouts, samples = config.training.validation_rollouts, parts.workflow.samples
    validation = plan(parts.tasks.of("validation") if rollouts else (), rollouts, samples=samples)
    prediction = predict(config, len(validation), like, samples=samples).to_dict(config)
    for name, limit in config.costs.budget.model_dump(exclude_none=True).items():
        if prediction[name] > limit:
            parts.notes.append(f"costs.budget.{name} = {limit:,} is less than the prediction, so it may end the run")
    memory = parts.memory(device_bytes)
    not_checked = [*parts.not_checked, *([memory] if isinstance(memory, str) else [])]
    tables = config.to_tables()
    sources = {key: parts.resolved.sources.get(key, "default") for key in leaf_keys(tables)}
    if as_json:
        click.echo(
            json.dumps(
                {
                    "resolved": tables,
                    "sources": sources,
                    "derived": derived,
                    "prediction": prediction,
                    "memory": None if isinstance(memory, str) else memory.to_json(),
                    "notes": parts.notes,
                    "not_checked": not_checked,
                }
            )
        )
        return
    click.echo(to_toml(tables if show_defaults else _only(parts.resolved.sources, tables), sources))
    if not show_defaults:
        click.echo("# all other keys have their defaults; rllm-core -v train ... --dry-run\n# shows them, too\n")
    click.echo("# derived")
    for key, value in derived.items():
        click.echo(f"# {key} = {value}")
    click.echo(f"#\n# predicted costs: {_amounts(prediction)}")
    for kind, amounts in prediction["by_kind"].items():
        click.echo(f"# {kind}: {_amounts(amounts)}")
    click.echo(f"# ({prediction['how']})")
    for line in [] if isinstance(memory, str) else memory.lines():
        click.echo(f"# {line}")
    for note in parts.notes:
        click.echo(f"# note: {note}")
    for line in not_checked:
        click.echo(f"# not checked: {line}")


def _only(wanted: Collection[str], tables: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the tables without the values whose dotted keys are not ``wanted``."""
    from rllm_core.run_file import toml_key

    kept: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{path}.{toml_key(name)}" if path else toml_key(name)
        if isinstance(value, dict):
            if inner := _only(wanted, value, key):
                kept[name] = inner
        elif key in wanted:
            kept[name] = value
    return kept
