"""A plugin without faults."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider, CommandProvider, ParserProvider, WorkflowProvider

heard = []


@hookimpl
def backends():
    return [
        BackendProvider(
            name="good", load="rllm_good.stack:GoodBackend", summary="A good backend.", default_parser="plain"
        )
    ]


@hookimpl
def parsers():
    yield ParserProvider(name="plain", load="rllm_good.stack:PlainParser", summary="A good parser.")


@hookimpl
def workflows():
    return (
        WorkflowProvider(name="echo", load="rllm_good.stack:Echo", summary="Says it again."),
        WorkflowProvider(
            name="not-there", load="rllm_good.stack:Nothing", summary="Points at a class that does not exist."
        ),
    )


@hookimpl
def cli_commands():
    return [
        CommandProvider(name="plugins count", load="rllm_good.commands:count", summary="Counts plugins."),
        CommandProvider(name="hello", load="rllm_good.commands:hello", summary="Greets."),
        CommandProvider(name="unloadable", load="rllm_good.no_such_module:command", summary="Cannot be loaded."),
        CommandProvider(name="no-command", load="rllm_good.stack:Echo", summary="Is not a click command."),
    ]


@hookimpl
def on_batch_end(step):
    heard.append(("on_batch_end", step))


@hookimpl
async def on_policy_updated(update, state):
    heard.append(("on_policy_updated", update))
