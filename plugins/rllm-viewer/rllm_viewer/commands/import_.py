"""``rllm-core import``: reads rollouts of other tools into a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import click

from rllm_viewer.commands.export import FORMATS, lost_lines, print_lines


@click.command("import", short_help="Import rollouts of other tools into a folder for show and view.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--from", "kind", type=click.Choice(FORMATS), required=True, help="Format of the file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_(file: Path, folder: Path, kind: str, as_json: bool) -> None:
    """Import rollouts of other tools into a folder for show and view.

    FILE is a file of the format, such as one that export has written. FOLDER must be new or empty, and appears once the
    import is complete. Text without token ids is never tokenized, and gets no log-probabilities. Data that a run folder
    cannot hold is left out; the command prints what was left out, and how often.
    """
    from rllm_viewer.travel.exports import bring_in
    from rllm_viewer.travel.formats import FORMATS as formats

    found = bring_in(file, formats[kind], folder)
    if as_json:
        click.echo(json.dumps(found))
        return
    from rllm_core.text import counted

    rollouts, groups = counted(found["rollouts"], "rollout"), counted(found["groups"], "group")
    print_lines(
        f"{counted(found['rows'], 'row')}: {rollouts} in {groups}",
        *lost_lines(found["lost"], "left out, because a run folder cannot hold it:"),
        f"to look at it: rllm-core view {quote(str(folder))}",
        f"in the terminal: rllm-core show {quote(str(folder))}",
    )
