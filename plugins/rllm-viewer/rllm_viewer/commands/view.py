"""``rllm-core view``: shows runs in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import click

# While the first read of a long run takes all CPU time, each turn of a request would wait Python's usual 5 ms.
SWITCH_SECONDS = 0.0005


@click.command("view", short_help="Show runs in a browser: groups, conversations, every token.")
@click.argument("runs", metavar="[RUN]...", type=click.Path(path_type=Path), nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on this machine. Defaults to a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write groups to a file instead.")
@click.option("--step", type=click.IntRange(min=0), help="With --html: only groups of this step.")
@click.option("--group", type=click.IntRange(min=0), help="With --html: only the group with this number.")
@click.option("--filter", "filters", metavar="NAME=VALUE", multiple=True, help="With --html: only groups that match.")
def view(
    runs: tuple[Path, ...],
    port: int,
    opens: bool,
    html: Path | None,
    step: int | None,
    group: int | None,
    filters: tuple[str, ...],
) -> None:
    """Show runs in a browser: groups, conversations, every token.

    Each RUN is the folder of a finished or a running run, or a folder of run folders; defaults to ./runs. Serves a page
    on this machine only, and prints its address. Ctrl-C stops the server.

    With --html, writes the page with the chosen groups of one run to a file, which opens without a server or network.
    """
    from rllm_core.errors import ConfigError
    from rllm_viewer.view import index, server

    folders = _folders(runs)
    if html is not None:
        _write(folders, html, step, group, filters)
        return
    if step is not None or group is not None or filters:
        raise ConfigError("--step, --group and --filter need --html; without it, use the filters of the page")
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        serving = server.opened(folders, port, index.cache_folder())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"port {port} cannot be used: {reason}; use another --port, or none") from error
    shown = str(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
    click.echo(f"{shown}: {serving.address} (Ctrl-C stops the server)")
    try:
        if opens:
            click.launch(serving.address)
        serving.serve_forever()
    except KeyboardInterrupt:
        click.echo()
    finally:
        serving.server_close()


def _write(folders: list[Path], file: Path, step: int | None, group: int | None, filters: tuple[str, ...]) -> None:
    """Writes the chosen groups of a run to a file."""
    from rllm_core.errors import ConfigError
    from rllm_core.text import counted
    from rllm_viewer import recordings
    from rllm_viewer.view import filters as known
    from rllm_viewer.view import index, one_file
    from rllm_viewer.view.viewed_run import ViewedRun

    if len(folders) > 1:
        raise ConfigError(f"--html writes one run, but there are {len(folders)}; name one of them")
    if file.exists():
        raise ConfigError(f"{file} exists; choose another name")
    run = ViewedRun(folders[0], index.cache_folder())
    wanted = known.parsed(filters)
    run.index.update()
    rows = [row for row in run.index.rows() if row.rollouts is not None]
    if not rows:
        recordings.index_of(run.path)
    chosen = [row for row in rows if step in (None, row.step) and group in (None, row.group)]
    if wanted:
        chosen = [row for row in chosen if known.fitting(row, wanted)]
    if not chosen:
        raise ConfigError(f"{run.path} has {counted(len(rows), 'recorded group')}, but none that matches these options")
    size = one_file.write(run, chosen, file)
    rollouts = sum(len(row.rollouts or ()) for row in chosen)
    click.echo(
        f"{file}: {counted(len(chosen), 'group')}, {counted(rollouts, 'rollout')}, {size / 1e6:.1f} MB; "
        "open it in a browser"
    )


def _folders(runs: tuple[Path, ...]) -> list[Path]:
    """Returns the run folders that are named, or that are inside a named folder."""
    from rllm_core.errors import ConfigError
    from rllm_viewer.results import run_folders

    found: dict[Path, Path] = {}
    for folder in runs or (Path("runs"),):
        of_folder = run_folders(folder)
        if not of_folder:
            raise ConfigError(f"{folder} is not a run folder, and contains none: there is no run.toml")
        found |= {run.resolve(): run for run in of_folder}
    return list(found.values())
