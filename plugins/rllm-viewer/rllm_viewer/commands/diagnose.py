"""``rllm-core diagnose``: reports the problems of a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rllm_core.errors import RunError


@click.command("diagnose", short_help="Report problems of a run, with their usual causes.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diagnose(run: Path, as_json: bool) -> None:
    """Report problems of a run, with their usual causes.

    RUN is the folder of a finished or a running run. Each problem is reported with its first step, its usual causes,
    the command that distinguishes them, and a section of the documentation.
    """
    from rllm_core.text import counted
    from rllm_viewer import diagnosis
    from rllm_viewer.terminal import visible_line
    from rllm_viewer.warnings_of_runs import wrapped

    try:
        found = diagnosis.of_folder(run)
    except RunError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{run} cannot be diagnosed, because a file is damaged: {error}") from error
    if as_json:
        findings = [finding.to_json(run) for finding in found.findings]
        click.echo(json.dumps({"steps": found.steps, "nothing_trained": found.nothing_trained, "findings": findings}))
        return
    if found.nothing_trained:
        click.echo(f"NOTHING WAS TRAINED: none of the {found.steps} steps had a gradient")
    for finding in found.findings:
        click.echo("\n".join(wrapped(visible_line(finding.text(run)))))
    if not found.findings and not found.nothing_trained:
        click.echo(f"no problems in the metrics of {counted(found.steps, 'step')}")
