"""verl's merger of FSDP checkpoints, changed to float32: the original rounds every weight to bfloat16.

Runs in a process of its own, because it changes torch there: ``python -m rllm_verl.merger merge ...``, with the
arguments of ``python -m verl.model_merger``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.model_merger.base_model_merger import generate_config_from_args, parse_args
from verl.model_merger.fsdp_model_merger import FSDPModelMerger


class Float32Merger(FSDPModelMerger):  # type: ignore[misc]
    """Keeps the precision of the checkpoint."""

    def get_transformers_auto_model_class(self) -> Any:
        """Returns a class whose models are float32, whichever precision the caller asks for."""
        auto_class = super().get_transformers_auto_model_class()

        def from_config(config: Any, *, torch_dtype: torch.dtype, **options: Any) -> Any:
            return auto_class.from_config(config, dtype=torch.float32, **options)

        return SimpleNamespace(from_config=from_config)


def main() -> None:
    """Merges a checkpoint."""
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]  # how the merger rounds each shard
    merger = Float32Merger(generate_config_from_args(parse_args()))
    merger.merge_and_save()
    merger.cleanup()


if __name__ == "__main__":
    main()
