"""A command of a plugin."""

import click

from rllm_core.cli import session


@click.command()
@click.option("--name", default="world")
def hello(name):
    """Greets."""
    click.echo(f"hello {name}")


@click.command()
@click.pass_context
def count(context):
    """Counts plugins."""
    click.echo(len(session(context).plugins.plugins()))
