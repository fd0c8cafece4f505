"""``rllm-core completion``, and completion of names that plugins provide."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from rllm_core.cli import session
from rllm_core.errors import PluginError

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager
    from rllm_core.providers import Provider

PROGRAM = "rllm-core"
VARIABLE = "_RLLM_CORE_COMPLETE"
SHELLS = ("bash", "fish", "zsh")

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell completion script for commands, options and installed names.

    Add to ~/.bashrc: eval "$(rllm-core completion bash)". Add the same with zsh to ~/.zshrc, after compinit. Add to
    ~/.config/fish/config.fish: rllm-core completion fish | source.
    """
    complete_class = get_completion_class(shell)
    assert complete_class is not None
    root = context.find_root().command
    # Not `source()`: it runs the shell to get its version, but the shell may not be installed here.
    completing = complete_class(root, {}, PROGRAM, VARIABLE)
    click.echo(completing.source_template % completing.source_vars())


def provided(kind: str, *, files: bool = False) -> Complete:
    """Completes the names of one kind of provider, or files if no name matches.

    Args:
        kind: Name of a record class in `rllm_core.providers`, without ``Provider``.
        files: Whether a path is allowed as well.
    """

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from rllm_core import providers

        chosen: type[Provider] = getattr(providers, f"{kind}Provider")
        items: list[CompletionItem] = []
        with _silence():
            plugins = session(context).plugins
            found = [] if chosen is not providers.WorkflowProvider else _variants(plugins, incomplete)
            found = found or [
                CompletionItem(name, help=one.record.summary) for name, one in plugins.providers(chosen).items()
            ]
            items = [item for item in found if item.value.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def _variants(plugins: PluginManager, incomplete: str) -> list[CompletionItem]:
    """Returns the variants of the only matching workflow; empty if it has none, or several workflows match."""
    from rllm_core.assembly.variants import variants_of
    from rllm_core.providers import WorkflowProvider

    meant = [
        (name, found)
        for name, found in plugins.providers(WorkflowProvider).items()
        if name.startswith(incomplete) or incomplete.startswith(f"{name}/")
    ]
    if len(meant) != 1:
        return []
    [(name, found)] = meant
    return [CompletionItem(f"{name}/{variant}") for variant in variants_of(found, plugins)]


def installed(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of plugins."""
    with _silence():
        infos = session(context).plugins.plugins()
        return [CompletionItem(info.name, help=info.label) for info in infos if info.name.startswith(incomplete)]
    return []


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses errors and output of plugins while the shell completes."""
    logging.disable()
    try:
        with contextlib.suppress(PluginError), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
