"""One session with an OpenEnv server, in the JSON messages over a WebSocket that OpenEnv's own client uses.

A session sends ``{"type": "reset" | "step" | "close", "data": {...}}``. The server answers
``{"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}`` or
``{"type": "error", "data": {"message": "...", "code": "..."}}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rllm_core.errors import ConfigError

INSTALL = "pip install 'rllm-environments[openenv]'"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
WRONG_ACTION = "VALIDATION_ERROR"


class OpenEnvError(Exception):
    """The server failed or ended a session, so the rollout failed and has no reward."""


class Unreachable(OpenEnvError):
    """Nothing listens at the address, perhaps because the server restarts."""


class SessionRefused(OpenEnvError):
    """The server has no room for another session."""


class WrongAction(Exception):
    """The server could not read an action, which is the fault of the action's author."""


@dataclass(frozen=True)
class OpenEnvObservation:
    """An observation of the environment with its reward.

    Attributes:
        observation: Observation, as the server wrote it.
        reward: Reward of the last action, or None if it has none.
        is_done: Whether the episode has ended.
    """

    observation: Mapping[str, Any]
    reward: float | None
    is_done: bool


def address(url: str) -> str:
    """Returns the address of a server's sessions, ``ws://host:8000/ws``.

    Raises:
        ConfigError: If the URL is not that of a server.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(
            f"openenv.url = {url!r:.100} is not the URL of a server; write ws://host:port, wss://..., http://... or "
            "https://..."
        )
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return parts._replace(scheme=SCHEMES[parts.scheme], path=path).geturl()


class OpenEnvSession:
    """An open session; see `session`."""

    def __init__(self, socket: Any, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._has_begun = False

    async def reset(self, parameters: Mapping[str, Any]) -> OpenEnvObservation:
        """Starts an episode.

        Raises:
            SessionRefused: If the server refuses the session, even by closing it normally.
            OpenEnvError: If the server failed.
        """
        shown = await self._asked("reset", parameters)
        self._has_begun = True
        return shown

    async def step(self, action: Mapping[str, Any]) -> OpenEnvObservation:
        """Takes an action.

        Raises:
            WrongAction: If the server cannot read it.
            OpenEnvError: If the server failed, or closed the session before the episode ended.
        """
        return await self._asked("step", action)

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> OpenEnvObservation:
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise OpenEnvError(
                f"the server did not answer {kind!r} within {self._timeout_seconds:g} seconds"
            ) from error
        except ConnectionClosed as error:
            raise self._closed(kind, error) from error
        except ValueError as error:
            raise OpenEnvError(f"the server answered {kind!r} with something that is not JSON: {error}") from error
        return self._read(kind, answer)

    def _closed(self, kind: str, error: Any) -> OpenEnvError:
        code = error.rcvd.code if error.rcvd is not None else None
        if not self._has_begun:
            return SessionRefused(
                f"the server closed the session before it began (code {code}): it may allow fewer sessions at once "
                "than openenv.sessions, or have another client"
            )
        return OpenEnvError(f"the server closed the session before the episode ended (code {code}, during {kind!r})")

    def _read(self, kind: str, answer: Any) -> OpenEnvObservation:
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise OpenEnvError(
                f"the server answered {kind!r} with {str(answer)!r:.200}, which is not an OpenEnv message"
            )
        if answer.get("type") == "error":
            code, message = data.get("code"), f"{str(data.get('message'))!r:.300}"
            if code == "CAPACITY_REACHED":
                raise SessionRefused(f"the server has no room for another session: {message}; lower openenv.sessions")
            if code == WRONG_ACTION and kind == "step":
                raise WrongAction(message)
            raise OpenEnvError(f"the server answered {kind!r} with error {code}: {message}")
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if answer.get("type") != "observation" or not isinstance(observation, dict):
            raise OpenEnvError(f"the server answered {kind!r} with a message of type {str(answer.get('type'))!r:.40}")
        if reward is not None and not isinstance(reward, int | float):
            raise OpenEnvError(f"the server's reward is {reward!r:.80}, which is not a number")
        if not isinstance(done, bool):
            raise OpenEnvError(f"the server's done is {done!r:.80}, which is not true or false")
        return OpenEnvObservation(observation, None if reward is None else float(reward), done)


@asynccontextmanager
async def session(url: str, timeout_seconds: float) -> AsyncIterator[OpenEnvSession]:
    """Opens a session, and closes it on exit.

    Args:
        url: Address, as `address` returns it.
        timeout_seconds: Timeout of each message.

    Raises:
        OpenEnvError: If there is no connection; `Unreachable` if nothing listens there.
    """
    connect = _client()
    try:
        socket = await connect(url, open_timeout=timeout_seconds, max_size=MAX_MESSAGE_BYTES)
    except Exception as error:  # websockets raises many kinds
        kind = Unreachable if isinstance(error, ConnectionRefusedError) else OpenEnvError
        raise kind(f"no connection to {url}: {type(error).__name__}: {error}") from error
    try:
        yield OpenEnvSession(socket, timeout_seconds)
    finally:
        await _left(socket)


async def _left(socket: Any) -> None:
    """Tells the server that the session ends, and closes the socket, which may be closed already."""
    from websockets.exceptions import ConnectionClosed

    try:
        await socket.send(json.dumps({"type": "close"}))
    except ConnectionClosed:
        return
    await socket.close()


def _client() -> Any:
    try:
        from websockets.asyncio.client import connect
    except ModuleNotFoundError as error:
        raise ConfigError(f"workflow 'openenv' needs websockets, which is not installed: {INSTALL}") from error
    return connect
