"""``rllm-core verify``: verifies that every rollout in a run is accounted for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import ConfigError
from rllm_core.text import counted


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(context: click.Context, run: Path, as_json: bool) -> None:
    """Verify that every rollout in a run is accounted for.

    RUN is a run folder. Replays its events.jsonl, and checks that every rollout has exactly one outcome, no group is
    trained twice or before it is complete, steps and weight versions are consecutive, and staleness stays within its
    limit. Exits with 1 if a check fails.
    """
    from rllm_viewer.results import is_running
    from rllm_viewer.verify import verify as check

    was_running, written = is_running(run), _bytes_of_events(run)
    result = check(run)
    if was_running and result.status == "interrupted":
        result.status = "running"
    if was_running and not result.holds and _bytes_of_events(run) != written:
        raise ConfigError(
            f"{run} is still running, and has written into its files while they were compared; verify it when it has "
            "ended"
        )
    if as_json:
        echo_json({"holds": result.holds, **asdict(result)})
    else:
        rows = [
            (account, reason, str(rollouts))
            for account, why in result.books.items()
            for reason, rollouts in why.items()
        ]
        echo_table(("OUTCOME", "REASON", "ROLLOUTS"), rows)
        click.echo(
            f"{result.status}: {result.steps} of {counted(result.planned_steps, 'step')}, "
            f"weight version {result.weight_version}, {result.incarnations} "
            f"launch{'' if result.incarnations == 1 else 'es'}, {counted(result.events, 'event')}, "
            f"max lead {counted(result.max_lead, 'group')}, max staleness {counted(result.max_staleness, 'version')}"
        )
        for problem in result.problems:
            click.echo(problem, err=True)
        click.echo(
            "every rollout is accounted for" if result.holds else f"NOT verified: {len(result.problems)} problem(s)"
        )
    context.exit(0 if result.holds else 1)


def _bytes_of_events(run: Path) -> int:
    journal = run / "events.jsonl"
    return journal.stat().st_size if journal.is_file() else 0
