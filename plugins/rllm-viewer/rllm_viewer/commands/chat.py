"""``rllm-core chat``: a conversation with a trained model in the terminal."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

PROMPT = "you> "


@click.command("chat", short_help="Talk to a trained model in the terminal.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint. Defaults to the latest complete one.")
@click.option("--message", metavar="TEXT", help="Send one message, print the answer and exit.")
@click.pass_context
def chat(context: click.Context, run: Path, step: int | None, message: str | None) -> None:
    """Talk to a trained model in the terminal.

    RUN is a run folder. The model answers through the backend and the parser of the run, with
    rollout.validation_temperature and rollout.max_response_tokens. It can call the tools of the workflow; each call is
    a line on standard error. Ctrl-D ends the conversation.
    """
    from rllm_core.limits.running import run as run_in_loop

    talking = _talk(context.obj.plugins, run, step, message)
    left: list[str] = []
    try:
        run_in_loop(talking, left)
    finally:
        context.obj.leave_behind(left)


async def _talk(plugins: PluginManager, run: Path, step: int | None, message: str | None) -> None:
    from rllm_core.text import printable_lines
    from rllm_viewer.conversation import conversation

    async with conversation(run, plugins, step=step, note=lambda line: click.echo(line, err=True)) as opened:
        if message is not None:
            click.echo(printable_lines(await opened.answer(message)))
            return
        while (text := await _read_line()) is not None:
            if text.strip():
                click.echo(printable_lines(await opened.answer(text)))


async def _read_line() -> str | None:
    """Reads a line from standard input; returns None at the end of input.

    It reads in a daemon thread, because Ctrl-C does not interrupt a read.
    """
    if sys.stdin.isatty():
        click.echo(PROMPT, nl=False, err=True)
    line: concurrent.futures.Future[str] = concurrent.futures.Future()
    line.set_running_or_notify_cancel()  # a line that arrives after Ctrl-C is dropped without an error

    def read() -> None:
        try:
            line.set_result(sys.stdin.readline())
        except (OSError, ValueError) as error:
            line.set_exception(error)

    threading.Thread(target=read, name="chat-input", daemon=True).start()
    text = await asyncio.wrap_future(line)
    return text.removesuffix("\n") if text else None
