"""One session with a server; every request has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from rllm_core.errors import ConfigError, RunError
from rllm_tinker import sdk
from rllm_tinker.sdk import Lost

logger = logging.getLogger(__name__)

Samplers = Literal["snapshots", "shared", "separate"]

CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class ServerSettings:
    """Server, model and timeouts.

    Attributes:
        base_url: URL of the server; empty for the hosted service.
        key: API key; never shown.
        base_model: Name of the model on the server.
        rank: LoRA rank.
        seed: Seed of the initial adapter weights.
        samplers: Source of the samplers' weights, see `rllm_tinker.remote`.
        orders_requests: Whether an ``optim_step`` is guaranteed to wait for requests sent before it.
        future_timeout_seconds: Timeout of one request.
        reconnect_timeout_seconds: How long to wait for a lost server.
        recovery_every_steps: Steps between recovery states.
    """

    base_url: str
    key: str = field(repr=False)
    base_model: str
    rank: int
    seed: int
    samplers: Samplers
    orders_requests: bool
    future_timeout_seconds: float
    reconnect_timeout_seconds: float
    recovery_every_steps: int

    @property
    def label(self) -> str:
        """Name of the server in error messages."""
        return f"the Tinker server at {self.base_url}" if self.base_url else "the hosted Tinker service"


class Connection:
    """A session, which can be restarted.

    Args:
        settings: Server, model and timeouts.

    Attributes:
        max_model_tokens: Maximum length of prompt plus completion, if the server reports it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.max_model_tokens: int | None = None
        self._service: Any = None

    async def open(self) -> Any:
        """Starts the first session, and creates a new model.

        Raises:
            UserError: If the server does not respond, or rejects the request.
        """
        await self.reach()
        seconds = self.settings.reconnect_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.connect()
                return await self.create("the model")
        except TimeoutError:
            raise RunError(
                f"{self.settings.label} did not answer within {seconds:g} s (tinker.reconnect_timeout_seconds)"
            ) from None
        except Lost as lost:
            raise RunError(f"{self.settings.label} does not respond correctly: {lost}") from None

    async def reach(self) -> None:
        """Fails early if nothing listens at a self-hosted server's address, because the SDK would retry for minutes.

        Raises:
            RunError: If nothing listens there.
        """
        url = urlsplit(self.settings.base_url)
        if not url.hostname or url.scheme in getproxies():
            return
        try:
            async with asyncio.timeout(self.settings.reconnect_timeout_seconds):
                port = url.port or (443 if url.scheme == "https" else 80)
                _, writer = await asyncio.open_connection(url.hostname, port)
                writer.close()
                await writer.wait_closed()
        except OSError as error:
            raise RunError(
                f"nothing answers at tinker.base_url = {self.settings.base_url!r} ({error.strerror or error}); check "
                "the address, and that the server runs"
            ) from None

    async def create(self, what: str) -> Any:
        """Creates a separate model, whose initial adapters have no effect.

        Raises:
            Lost: If the server does not respond.
            UserError: If the server rejects the request.
        """
        return await self.made(f"creating {what}", self._created)

    def _created(self) -> Any:
        return self._service.create_lora_training_client(
            base_model=self.settings.base_model, rank=self.settings.rank, seed=self.settings.seed
        )

    async def connect(self) -> None:
        """Starts a session.

        Raises:
            Lost: If the server does not respond.
            ConfigError: If the user's own server does not serve the model.
        """
        service = sdk.service_client(self.settings.base_url, self.settings.key)
        capabilities = await self.made(
            "asking for the server's models", sdk.capabilities, service, self.settings.base_url, self.settings.key
        )
        self._service = service
        served = {model.model_name: model for model in capabilities.supported_models}
        model = served.get(self.settings.base_model)
        if model is None and served and self.settings.base_url:  # SkyRL's server would train its own model instead
            raise ConfigError(
                f"{self.settings.label} does not serve model {self.settings.base_model!r}; it serves "
                f"{', '.join(map(repr, served))}: set tinker.base_model to that name, and model.path to that model"
            )
        self.max_model_tokens = getattr(model, "max_context_length", None)

    async def from_state(self, path: str) -> Any:
        """Creates a model from a saved state, including its optimizer.

        Raises:
            Lost: If the server does not respond.
            RunError: If the server does not have the state.
        """
        return await self._loaded(path, self._service.create_training_client_from_state_with_optimizer)

    async def from_weights(self, path: str) -> Any:
        """Creates a model from the weights of a saved state, with a new optimizer.

        Raises:
            Lost: If the server does not respond.
            RunError: If the server does not have the state.
        """
        return await self._loaded(path, self._service.create_training_client_from_state)

    async def _loaded(self, path: str, create: Callable[..., Any]) -> Any:
        try:
            return await self.made(f"loading {path}", create, path)
        except Lost as lost:
            if "not found" in str(lost).lower():
                raise RunError(f"{self.settings.label} no longer has state {path} ({lost})") from None
            raise

    async def made(self, what: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """See `rllm_tinker.sdk.made`."""
        return await sdk.made(self.settings.future_timeout_seconds, what, make, *arguments)

    async def answer(self, what: str, future: Any) -> Any:
        """See `rllm_tinker.sdk.answer`."""
        return await sdk.answer(self.settings.future_timeout_seconds, what, future)

    def archive_url(self, model: str, checkpoint: str) -> str:
        """Returns a signed URL of a sampler's weights on the hosted service; blocks.

        Raises:
            ConfigError: If this SDK has no function for it.
        """
        client = self._service.create_rest_client()
        if not hasattr(client, "get_checkpoint_archive_url"):
            raise ConfigError(
                "this version of the tinker SDK cannot download adapters from the hosted service; "
                "pip install 'tinker==0.24.1' can"
            )
        return str(client.get_checkpoint_archive_url(model, checkpoint).result().url)

    async def delete(self, path: str) -> None:
        """Deletes a saved state. Only logs failures, because a leftover state costs nothing but storage."""

        def deleted() -> Any:
            return self._service.create_rest_client().delete_checkpoint_from_tinker_path(path)

        try:
            await self.made(f"deleting {path}", deleted)
        except (Lost, RunError) as error:
            logger.warning("%s", error)

    async def disconnect(self) -> None:
        """Ends the session, if the server still responds."""
        if self._service is not None:
            service, self._service = self._service, None
            with contextlib.suppress(Lost):  # the session is already gone
                await sdk.made(CLOSE_SECONDS, "ending the session", sdk.disconnect, service)
