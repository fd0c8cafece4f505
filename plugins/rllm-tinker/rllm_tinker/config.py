"""``[tinker]``, the section that backend and parser share, and the key, which is never in it. Light: no SDK."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from rllm_core.errors import ConfigError
from rllm_tinker.parser_config import ParserConfig

Service = Literal["hosted", "skyrl"]

KEY_VARIABLE = "TINKER_API_KEY"
URL_VARIABLE = "TINKER_BASE_URL"
# What the SDK accepts as a key; servers of one's own that check none get this.
NO_KEY = "tml-none"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TinkerConfig(ParserConfig):
    """``[tinker]``: training through the tinker SDK."""

    base_url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s/?#@]+[^\s?#@]*)?$",
            description="Address of a Tinker-compatible server; empty is $TINKER_BASE_URL, or else the hosted service.",
        ),
    ] = ""
    service: Annotated[
        Literal["hosted", "skyrl"] | None,
        Field(
            description="What answers there, because losses are scaled differently: hosted sums them over tokens; "
            "skyrl (SkyRL's JAX engine) averages over tokens, then sequences. Required with a base_url."
        ),
    ] = None
    base_model: Annotated[
        str, Field(description="What the server calls the model; empty is model.path, whose tokenizer is used here.")
    ] = ""
    rank: Annotated[int, Field(ge=1, description="Rank of the adapters.")] = 32
    seed: Annotated[
        int | None, Field(ge=0, description="Seed of the adapters' first weights; unset is training.seed.")
    ] = None
    future_timeout_seconds: Annotated[
        Seconds, Field(description="Deadline of one request for training; then the server is taken for lost.")
    ] = 300.0
    reconnect_timeout_seconds: Annotated[
        Seconds, Field(description="How long a lost server is waited for before the run ends.")
    ] = 200.0
    recovery_every_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Optimizer steps between two states saved on the server beside the checkpoints; after a loss, "
            "the steps since then are trained again, from memory.",
        ),
    ] = 25
    checkpoint_ttl_seconds: Annotated[
        int | None, Field(ge=1, description="How long the server keeps the states of checkpoints; unset is for good.")
    ] = None

    def address(self) -> str:
        """The server's; empty is the hosted one's."""
        return self.base_url or os.environ.get(URL_VARIABLE, "")

    def scale(self) -> Service:
        """Whose loss scale is meant; ``hosted`` where nothing says otherwise."""
        return self.service or "hosted"

    def check(self) -> None:
        """Check what goes together.

        Raises:
            ConfigError: If it is not clear what answers at the base URL, or there is no key for it.
        """
        if self.address() and self.service is None:
            where = "tinker.base_url" if self.base_url else URL_VARIABLE
            raise ConfigError(
                f"{where} = {self.address()!r} needs tinker.service: 'skyrl' for SkyRL's server, which averages "
                "losses, or 'hosted' for one that sums them, as the hosted service does"
            )
        if not self.address() and self.service == "skyrl":
            raise ConfigError("tinker.service = 'skyrl' needs tinker.base_url, the address of that server")
        api_key(is_hosted=not self.address())


def api_key(*, is_hosted: bool) -> str:
    """The key to use.

    Raises:
        ConfigError: If there is none and one is needed, or it can be none.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key and is_hosted:
        raise ConfigError(
            f"{KEY_VARIABLE} is not set: set it to your key of the hosted service (export {KEY_VARIABLE}=tml-...), or "
            "set tinker.base_url to a server of your own"
        )
    if key and not key.startswith(("tml-", "eyJ")):
        raise ConfigError(
            f"{KEY_VARIABLE} does not hold a Tinker key, which begins with 'tml-'; set it to yours (not shown here)"
        )
    return key or NO_KEY
