"""``rllm-core verify``: prove that a run's books balance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from rllm_core.cli.tables import echo_json, echo_table


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(context: click.Context, run: Path, as_json: bool) -> None:
    """Prove that a run's books balance.

    RUN is a run folder. Replays its events.jsonl: every rollout ends in exactly one account, no group is trained twice
    or before it is complete, steps and weight versions follow each other, staleness stays within the declared bound.
    Exits with 1 if anything does not hold.
    """
    from rllm_core.training.verify import verify as check

    result = check(run)
    if as_json:
        echo_json({"holds": result.holds, **asdict(result)})
    else:
        rows = [
            (account, reason, str(rollouts))
            for account, why in result.books.items()
            for reason, rollouts in why.items()
        ]
        echo_table(("ACCOUNT", "REASON", "ROLLOUTS"), rows)
        click.echo(
            f"{result.status}: {result.steps} of {result.planned_steps} steps, weight version {result.weight_version}, "
            f"{result.incarnations} start(s), {result.events} events; at most {result.max_lead} groups ahead and "
            f"{result.max_staleness} versions old"
        )
        for problem in result.problems:
            click.echo(problem, err=True)
        click.echo("the books balance" if result.holds else f"NOT proven: {len(result.problems)} problem(s)")
    context.exit(0 if result.holds else 1)
