"""``rllm-core diagnose``: reports what went wrong in a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rllm_core.errors import RunError


@click.command("diagnose", short_help="Name what went wrong in a run, and what usually causes it.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diagnose(run: Path, as_json: bool) -> None:
    """Name what went wrong in a run, and what usually causes it.

    RUN is a run folder, finished or not. Each line says what was seen, since which step, the usual causes, the command
    that tells them apart, and the section of the documentation.
    """
    from rllm_viewer import diagnosis
    from rllm_viewer.terminal import visible_line
    from rllm_viewer.warnings_of_runs import wrapped

    try:
        found = diagnosis.of_folder(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{run} cannot be diagnosed, a file is damaged: {error}") from error
    if as_json:
        findings = [finding.to_json(run) for finding in found.findings]
        click.echo(json.dumps({"steps": found.steps, "nothing_trained": found.nothing_trained, "findings": findings}))
        return
    if found.nothing_trained:
        click.echo(f"NOTHING WAS TRAINED: none of the {found.steps} steps had a gradient")
    for finding in found.findings:
        click.echo("\n".join(wrapped(visible_line(finding.text(run)))))
    if not found.findings and not found.nothing_trained:
        click.echo(f"nothing went wrong in {found.steps} steps, as far as their metrics say")
