"""Forwards calls to another engine and logs each to a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rllm_core import providers
from rllm_core.config import RunConfig, Section
from rllm_core.engine import RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, SamplingParams, TokenIds, TokenInput, TokenOutput, text_only


class ProxyConfig(Section):
    """``[proxy]``."""

    engine: str = Field(description="Name of the engine that answers.")
    record: str = Field(default="", description="File that gets a line per call. Empty writes none.")


class ProxyEngine(RolloutEngine):
    """Adds nothing and takes nothing away."""

    name: ClassVar[str] = "proxy"
    config_model: ClassVar[type[Section]] = ProxyConfig
    computes_logprobs: ClassVar[bool] = True

    def __init__(self, inner: RolloutEngine, record: str) -> None:
        self.inner = inner
        self.parser = inner.parser
        self.record = record

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> "ProxyEngine":
        section: ProxyConfig = config.plugins[cls.name]
        plugins = PluginManager.from_environment()
        inner: type[RolloutEngine] = plugins.load(plugins.select(providers.EngineProvider, section.engine))
        return cls(inner.from_config(config, parser), section.record)

    async def wake_up(self) -> None:
        await self.inner.wake_up()
        self.vocabulary_size = self.inner.vocabulary_size

    async def sleep(self) -> None:
        await self.inner.sleep()

    @property
    def supports_token_in_token_out(self) -> bool:
        return self.inner.supports_token_in_token_out

    @property
    def max_model_tokens(self) -> int | None:
        return self.inner.max_model_tokens

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        [output] = await self.get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=[seed], is_validation=is_validation
        )
        return output

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        text_only(token_input, f"engine {self.name!r}")
        self._write(call="sample", completions=len(seeds))
        return await self.inner.get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=seeds, is_validation=is_validation
        )

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        self._write(call="score", tokens=len(tokens) - start)
        return await self.inner.compute_logprobs(tokens, start=start)

    def _write(self, **line: Any) -> None:
        if self.record:
            with Path(self.record).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
