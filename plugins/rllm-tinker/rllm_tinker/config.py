"""``[tinker]``, the section that backend and parser share, and the API key, which is never in it. Imports no SDK."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from rllm_core.errors import ConfigError
from rllm_tinker.parser_config import ParserConfig

Service = Literal["hosted", "skyrl"]

KEY_VARIABLE = "TINKER_API_KEY"
URL_VARIABLE = "TINKER_BASE_URL"
# The SDK accepts this value as a key, for self-hosted servers that check none.
NO_KEY = "tml-none"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TinkerConfig(ParserConfig):
    """``[tinker]``: training through the tinker SDK."""

    base_url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s/?#@]+[^\s?#@]*)?$",
            description="URL of a Tinker-compatible server. Defaults to $TINKER_BASE_URL, or else the hosted service.",
        ),
    ] = ""
    service: Annotated[
        Literal["hosted", "skyrl"] | None,
        Field(
            description="How the server scales losses: hosted sums over tokens; skyrl (SkyRL's JAX engine) averages "
            "over tokens, then over sequences. Required with base_url."
        ),
    ] = None
    base_model: Annotated[
        str, Field(description="Name of the model on the server. Defaults to model.path, which also has the tokenizer.")
    ] = ""
    rank: Annotated[int, Field(ge=1, description="LoRA rank.")] = 32
    seed: Annotated[
        int | None, Field(ge=0, description="Seed of the initial adapter weights. Defaults to training.seed.")
    ] = None
    future_timeout_seconds: Annotated[
        Seconds, Field(description="Timeout of one training request, after which the server counts as lost.")
    ] = 300.0
    reconnect_timeout_seconds: Annotated[
        Seconds, Field(description="How long to wait for a lost server before the run ends.")
    ] = 200.0
    recovery_every_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Optimizer steps between recovery states, which the server stores in addition to checkpoints. "
            "If the server is lost, the steps since the last one are trained again, from memory.",
        ),
    ] = 25
    sync_tolerance: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Largest allowed difference between the log-probabilities of sampler and trainer, in nats: the "
            "mean over a step's tokens of the live weight version, without the largest eighth. The run ends if a step "
            "with at least 32 such tokens exceeds it.",
        ),
    ] = 0.1
    checkpoint_ttl_seconds: Annotated[
        int | None, Field(ge=1, description="How long the server keeps checkpoints. Defaults to permanently.")
    ] = None

    def address(self) -> str:
        """URL of the server; empty for the hosted service."""
        return self.base_url or os.environ.get(URL_VARIABLE, "")

    def scale(self) -> Service:
        """Loss scale of the server; ``hosted`` by default."""
        return self.service or "hosted"

    def check(self) -> None:
        """Checks combinations of settings.

        Raises:
            ConfigError: If the service at the base URL is not specified, or its API key is missing.
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
    """Returns the API key to use.

    Raises:
        ConfigError: If a required key is missing, or the key is malformed.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key and is_hosted:
        raise ConfigError(
            f"{KEY_VARIABLE} is not set: set it to your key for the hosted service (export {KEY_VARIABLE}=tml-...), "
            "or set tinker.base_url to your own server"
        )
    if key and not key.startswith(("tml-", "eyJ")):
        raise ConfigError(
            f"{KEY_VARIABLE} does not hold a Tinker key, which starts with 'tml-'; set it to yours (not shown here)"
        )
    return key or NO_KEY
