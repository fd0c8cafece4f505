"""A plugin without faults."""

from rllm_core import hookimpl
from rllm_core.providers import Backend, Command, Parser, Workflow

heard = []


@hookimpl
def backends():
    return [Backend(name="good", load="rllm_good.stack:GoodBackend", summary="A good backend.", default_parser="plain")]


@hookimpl
def parsers():
    yield Parser(name="plain", load="rllm_good.stack:PlainParser", summary="A good parser.")


@hookimpl
def workflows():
    return (
        Workflow(name="echo", load="rllm_good.stack:Echo", summary="Says it again."),
        Workflow(name="not-there", load="rllm_good.stack:Nothing", summary="Points at a class that does not exist."),
    )


@hookimpl
def cli_commands():
    return [
        Command(name="plugins count", load="rllm_good.commands:count", summary="Counts plugins."),
        Command(name="hello", load="rllm_good.commands:hello", summary="Greets."),
        Command(name="unloadable", load="rllm_good.no_such_module:command", summary="Cannot be loaded."),
        Command(name="no-command", load="rllm_good.stack:Echo", summary="Is not a click command."),
    ]


@hookimpl
def on_batch_end(step):
    heard.append(("on_batch_end", step))


@hookimpl
async def on_policy_updated(update, state):
    heard.append(("on_policy_updated", update))
