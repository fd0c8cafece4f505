"""``rllm-core``: the command line from its arguments to its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from rllm_core.cli.groups import LazyGroup
from rllm_core.cli.options import Session, no_plugins_option, set_verbose
from rllm_core.cli.process_exit import leave_threads
from rllm_core.errors import UserError
from rllm_core.plugins.watch import own_process
from rllm_core.version import __version__

PYDANTIC_VARIABLE, PYDANTIC_OFF = "PYDANTIC_DISABLE_PLUGINS", "__all__"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    callback=set_verbose,
    expose_value=False,
    is_eager=True,
    help="Show tracebacks and debug messages.",
)
@no_plugins_option
@click.version_option(__version__, prog_name="rllm-core")
def cli() -> None:
    """Train and evaluate language agents with reinforcement learning."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line. An error prints one line on stderr and sets the exit code.

    Args:
        args: Arguments to use instead of ``sys.argv[1:]``.
    """
    current = Session(owns_process=args is None)
    if current.owns_process:
        # Pydantic reads the entry points of all installed packages, so one malformed entry_points.txt would break the
        # first model. Set the variable to an empty string to use pydantic plugins.
        os.environ.setdefault(PYDANTIC_VARIABLE, PYDANTIC_OFF)
        _open_closed_streams()
        own_process()
    try:
        run_command(current, args)
    except SystemExit as leaving:
        if current.owns_process:
            leave_threads(leaving.code if isinstance(leaving.code, int) else 1, current.has_hung_threads)
        raise


def _open_closed_streams() -> None:
    """Replaces standard streams that the caller has closed; otherwise the next files opened would get their output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: PTH123, SIM115 - stays open, with the descriptor that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def run_command(current: Session, args: Sequence[str] | None) -> NoReturn:
    """Runs a command with a session. Reports an error in one line; the exit code is in SystemExit."""
    try:
        cli.main(args=None if args is None else list(args), prog_name="rllm-core", obj=current)
    except UserError as error:
        _report(current, error, f"{error.label}{error}", args)
        sys.exit(error.exit_code)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # plugins may raise anything
        from rllm_core.plugins.blame import blamed

        hint = "" if current.verbose else " (run rllm-core -v ... for the traceback)"
        _report(current, error, f"error: {blamed(error)}{hint}", args)
        sys.exit(1)
    sys.exit(0)


def _report(current: Session, error: BaseException, line: str, args: Sequence[str] | None) -> None:
    """Prints one line on stderr, after the traceback with ``-v``; with ``--json`` also an object on stdout."""
    with contextlib.suppress(OSError):  # a closed terminal, or a full disk; the exit code remains
        if current.verbose:
            traceback.print_exception(error)
        click.echo(line, err=True)
        if "--json" in (sys.argv[1:] if args is None else args):
            from rllm_core.plugins.blame import blamed_json

            click.echo(json.dumps({"failure": blamed_json(error)}))
