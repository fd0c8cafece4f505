"""``rllm-core view``: shows runs in a browser."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("view", short_help="Show runs in a browser: groups, conversations, every token.")
@click.argument("runs", metavar="[RUN]...", type=click.Path(path_type=Path), nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on this machine. Defaults to a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def view(runs: tuple[Path, ...], port: int, opens: bool) -> None:
    """Show runs in a browser: groups, conversations, every token.

    Each RUN is a run folder, of a finished or a running run, or a folder of run folders; defaults to ./runs. Serves a
    page on this machine only, and prints its address. Ctrl-C ends it.
    """
    from rllm_core.errors import ConfigError
    from rllm_viewer.view import index, server

    folders = _folders(runs)
    try:
        serving = server.opened(folders, port, index.cache_folder())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"port {port} cannot be used: {reason}; use another --port, or none") from error
    shown = str(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
    click.echo(f"{shown}: {serving.address} (Ctrl-C ends it)")
    try:
        if opens:
            click.launch(serving.address)
        serving.serve_forever()
    except KeyboardInterrupt:
        click.echo()
    finally:
        serving.server_close()


def _folders(runs: tuple[Path, ...]) -> list[Path]:
    """Returns the run folders that are named, or that a named folder has."""
    from rllm_core.errors import ConfigError
    from rllm_viewer.results import run_folders

    found: dict[Path, Path] = {}
    for folder in runs or (Path("runs"),):
        of_folder = run_folders(folder)
        if not of_folder:
            raise ConfigError(f"{folder} is not a run folder, and has none: it has no run.toml")
        found |= {run.resolve(): run for run in of_folder}
    return list(found.values())
