"""One complete backend, and several broken ones, named after their fault."""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider


@hookimpl
def backends():
    return [
        BackendProvider(
            name="able",
            load="rllm_backends.stacks:Able",
            summary="Can do everything.",
            config="rllm_backends.stacks:AbleConfig",
        ),
        BackendProvider(
            name="needy",
            load="rllm_backends.stacks:Able",
            summary="Needs a setting.",
            config="rllm_backends.stacks:NeedyConfig",
        ),
        BackendProvider(name="fails", load="rllm_backends.stacks:Fails", summary="Cannot say what it can do."),
        BackendProvider(name="no-backend", load="rllm_backends.stacks:AbleConfig", summary="Is none."),
        BackendProvider(name="unloadable", load="rllm_backends.no_such_module:Any", summary="Cannot be imported."),
        BackendProvider(name="exits", load="rllm_backends.exits:Any", summary="Ends the process."),
    ]
