"""Settings of MCP servers, the results of their tools, and the error of a failed server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from rllm_core.workflow import WorkflowConfig


class McpServer(WorkflowConfig):
    """``[WORKFLOW.servers.NAME]``: an MCP server, connected over standard input and output."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(
            min_length=1,
            description="Program (an absolute path, or a name on the PATH) and its arguments. Run without a shell.",
        ),
    ]
    pass_environment: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
        Field(
            description="Names of environment variables to pass in addition to HOME, LOGNAME, PATH, SHELL, TERM "
            "and USER."
        ),
    ] = ()
    start_timeout_seconds: Annotated[
        float,
        Field(
            gt=0, allow_inf_nan=False, description="Timeout for starting the server and listing its tools, in seconds."
        ),
    ] = 30.0
    call_timeout_seconds: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Timeout of one call, in seconds. On timeout, the server is restarted.",
        ),
    ] = 30.0
    max_concurrent_calls: Annotated[int, Field(ge=1, description="Maximum concurrent calls. Further calls wait.")] = 64

    @field_validator("command")
    @classmethod
    def _is_found_the_same_everywhere(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if Path(command[0]).name != command[0] and not Path(command[0]).is_absolute():
            raise ValueError(
                f"{command[0]!r} must be an absolute path or a name on the PATH; relative paths are not resolved"
            )
        return command


McpServers = dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,24}$")], McpServer]
"""Type of a workflow's key ``servers``: servers by name. Names consist of letters, digits and hyphens."""


class ToolServerError(RuntimeError):
    """Raised if a server died, timed out or violated the protocol; the rollout fails and gets no reward."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call, for the model.

    Attributes:
        text: The result, or an error message.
        is_error: Whether the call failed for a reason the model can correct.
    """

    text: str
    is_error: bool = False
