"""Base class of workflows whose agent talks to the model through an endpoint."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rllm_core.workflow import Workflow, WorkflowConfig
from rllm_gateway.endpoint import MAX_REQUEST_BYTES
from rllm_gateway.gateway import Gateway


class GatewayConfig(WorkflowConfig):
    """Settings of every workflow that uses the gateway."""

    max_calls: Annotated[
        int | None, Field(ge=1, description="Maximum calls to the model per rollout. Defaults to no limit.")
    ] = None
    max_request_bytes: Annotated[
        int, Field(ge=1, description="Maximum number of bytes of all requests of a rollout to the model.")
    ] = MAX_REQUEST_BYTES
    hide_tools: Annotated[
        bool,
        Field(description="Hide tools from the model, for models that were taught to call them without a description."),
    ] = False
    hide_system: Annotated[
        bool,
        Field(
            description="Hide system messages from the model, for models that were taught a bare format, "
            "such as the starter model."
        ),
    ] = False
    unix_socket: Annotated[
        bool,
        Field(
            description="Whether the gateway is also served on a Unix socket, for agents in a container without this "
            "machine's network; RLLM_GATEWAY_SOCKET is its path."
        ),
    ] = False
    unsupported_fields: Annotated[
        Literal["refuse", "ignore"],
        Field(
            description="What to do with a field of a request that cannot be honored and on which an agent may rely, "
            "such as response_format."
        ),
    ] = "refuse"


class GatewayWorkflow(Workflow):
    """A workflow whose agent is a client of OpenAI's or Anthropic's APIs.

    ``run`` opens an endpoint for its rollout, runs the agent, and rewards the result:

        async def run(self, task, completer):
            async with self.gateway.rollout(completer) as endpoint:
                answer = await play(task.data["question"], base_url=endpoint.base_url, api_key=endpoint.api_key)
            return endpoint.episode(task, reward=score(answer))

    Attributes:
        gateway: The gateway, open as long as the workflow is.
    """

    config_model: ClassVar[type[WorkflowConfig]] = GatewayConfig
    config: GatewayConfig
    gateway: Gateway

    async def open(self) -> None:
        """Starts the gateway."""
        self.gateway = Gateway(
            max_calls=self.config.max_calls,
            max_request_bytes=self.config.max_request_bytes,
            unsupported_fields=self.config.unsupported_fields,
            hide_tools=self.config.hide_tools,
            hide_system=self.config.hide_system,
            unix_socket=self.config.unix_socket,
        )
        await self.gateway.open()

    async def close(self) -> None:
        """Stops the gateway."""
        if hasattr(self, "gateway"):
            await self.gateway.close()
