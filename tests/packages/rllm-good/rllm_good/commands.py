"""A command of a plugin."""

import click


@click.command()
@click.option("--name", default="world")
def hello(name):
    """Greets."""
    click.echo(f"hello {name}")
