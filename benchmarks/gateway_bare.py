"""Workflow ``bare_agent``: workflow ``agent``, but that the model is shown neither tools nor system messages.

The starter model knows how to call the calculator's tools, but cannot read a prompt as long as their descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec
from rllm_gateway import Gateway
from rllm_gateway.agent import AgentWorkflow
from rllm_gateway.gateway import Response

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

RLLM_CORE_API = "1.0"
NAME = "bare_agent"


class BareGateway(Gateway):
    """Reads requests without their tools and system messages."""

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """See `Gateway.handle`."""
        if body:
            request = msgspec.json.decode(body)
            request.pop("tools", None)
            request["messages"] = [one for one in request["messages"] if one["role"] not in ("system", "developer")]
            body = msgspec.json.encode(request)
        return await super().handle(method, path, headers, body)


class BareAgent(AgentWorkflow):
    """See the module."""

    name: ClassVar[str] = NAME

    async def open(self) -> None:
        """See `Workflow.open`."""
        self.gateway = BareGateway()
        await self.gateway.open()


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """The workflow above."""
    return [
        WorkflowProvider(
            name=NAME,
            load=f"{__name__}:BareAgent",
            config="rllm_gateway.agent:AgentConfig",
            summary="An agent whose model is shown neither tools nor system messages.",
            blocks=True,
            waits_for_others=True,
        )
    ]
