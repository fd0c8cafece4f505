"""Engine ``local`` without a backend: samples from or scores with a model that is never trained."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from rllm_core.config import RunConfig
from rllm_core.parser import BaseParser
from rllm_local.config import LocalConfig
from rllm_local.decoders import max_model_tokens
from rllm_local.engine import LocalEngine
from rllm_local.model import (
    load_model,
    make_decoder,
    max_cache_positions,
    use_matching_attention,
    vocabulary_size,
)
from rllm_local.vision import image_source


class StandaloneEngine(LocalEngine):
    """Loads ``model.path`` in `wake_up`, with the settings of ``[local]``, and releases it in `sleep`."""

    def __init__(self, config: RunConfig, parser: BaseParser) -> None:
        self._config = config
        self.parser = parser
        self._is_closed = True

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> StandaloneEngine:
        """See `RolloutEngine.from_config`."""
        return cls(config, parser)

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rllm-local-engine")
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._load)
        except BaseException:
            self._executor.shutdown(wait=False)
            raise

    def _load(self) -> None:
        local: LocalConfig = self._config.plugins.get("local") or LocalConfig()
        settings = local.model_copy(update={"lora": None})  # adapters only exist in training
        path = self._config.model.path
        model = load_model(path, settings)
        use_matching_attention(model, torch.get_float32_matmul_precision())
        assert self.parser is not None
        images = image_source(model, self.parser)
        super().__init__(
            make_decoder(model, settings, shares_weights=True, images=images),
            self.parser,
            self._executor,
            device=model.device,
            vocabulary_size=vocabulary_size(model),
            max_model_tokens=max_model_tokens(model),
            max_batch_rows=settings.max_batch_rows,
            takes_media=images is not None,
            max_cache_positions=max_cache_positions(model, settings),
        )

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if self._is_closed:
            return
        self.close()
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
        del self._decoder
