"""A plugin that prints when imported and when its hooks are called."""

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

print("chatty says hello at import")


@hookimpl
def workflows():
    print("chatty was asked for workflows")
    return [WorkflowProvider(name="chat", load="rllm_chatty:Chat", summary="Talks.")]


class Chat:
    pass
