"""Routes the calls of verifiers' agents to the conversations of their rollouts.

verifiers relays every call of a trace to the address in a client's config, with the trace id as a header. The bridge
listens at that address, so verifiers stays unchanged, even its private parts. An `rllm_gateway` endpoint per trace
keeps the tokens exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rllm_gateway import Endpoint, Gateway
from rllm_gateway.response import Response
from rllm_gateway.server import Server

from rllm_core.engine import Completer
from rllm_core.types import Step
from rllm_verifiers.folders import own

SESSION_HEADER = "x-session-id"


class Bridge:
    """One address for all traces of this process.

    Args:
        hide_tools: Whether to hide the tools from the model.
        hide_system: Whether to hide system messages from the model.
    """

    def __init__(self, *, hide_tools: bool = False, hide_system: bool = False) -> None:
        self._gateway = Gateway(hide_tools=hide_tools, hide_system=hide_system)
        self._server = Server(self._handle)
        self._seats: dict[str, Seats] = {}

    async def open(self) -> None:
        """Starts listening on a free port of the loopback interface."""
        await self._server.open()

    async def close(self) -> None:
        """Stops listening."""
        await self._server.close()

    @property
    def url(self) -> str:
        """Address for verifiers' client."""
        return f"http://127.0.0.1:{self._server.port}/v1"

    @asynccontextmanager
    async def rollout(self, completer: Completer) -> AsyncIterator[Seats]:
        """Serves the traces of one rollout.

        Raises:
            Exception: On exit, the engine's or parser's error in a call, even if the environment handled it.
        """
        async with AsyncExitStack() as stack:
            seats = Seats(self._gateway, completer, stack, self._seats)
            try:
                yield seats
            finally:
                seats.leave()

    async def _handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        trace_id = headers.get(SESSION_HEADER, "")
        seats = self._seats.get(trace_id)
        key = "" if seats is None else (await seats.endpoint(trace_id)).api_key
        authorized = {**headers, "authorization": f"Bearer {key}"}
        response: Response = await self._gateway.handle(method, path, authorized, body)
        return response


class Seats:
    """The agents of one rollout.

    Args:
        gateway: Gateway that opens their endpoints.
        completer: The rollout's completer.
        stack: Closes the endpoints when the rollout ends.
        listed: Where the server finds these seats, by trace id.
    """

    def __init__(self, gateway: Gateway, completer: Completer, stack: AsyncExitStack, listed: dict[str, Seats]) -> None:
        self._gateway = gateway
        self._completer = completer
        self._stack = stack
        self._listed = listed
        self._keys: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._endpoints: dict[str, Endpoint] = {}

    def seat(self, trace: Any) -> None:
        """Registers a trace, before its agent's first call.

        Its conversation is a fork named by the agent and the trace's number, so seeds do not depend on call order.
        """
        own(trace)
        name = trace.agent.name
        self._keys[trace.id] = f"{name} {self._counts[name]}"
        self._counts[name] += 1
        self._listed[trace.id] = self

    async def endpoint(self, trace_id: str) -> Endpoint:
        """Returns the endpoint of a trace; the first call opens it."""
        if trace_id not in self._endpoints:
            fork = self._completer.fork(key=self._keys[trace_id])
            self._endpoints[trace_id] = await self._stack.enter_async_context(self._gateway.rollout(fork))
        return self._endpoints[trace_id]

    def steps(self, trace_id: str) -> list[Step]:
        """Returns the sampled steps of a trace; empty if it has not called the model."""
        endpoint = self._endpoints.get(trace_id)
        if endpoint is None:
            return []
        return [step for trajectory in endpoint.trajectories() for step in trajectory.steps]

    def leave(self) -> None:
        """Rejects further calls."""
        for trace_id in self._keys:
            self._listed.pop(trace_id, None)
