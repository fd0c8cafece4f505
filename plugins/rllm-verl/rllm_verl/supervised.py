"""Dataset for verl's own SFT trainer, with the same tokens and loss masks as workflow ``sft``.

Select it in verl with ``data.custom_cls.path=pkg://rllm_verl.supervised`` and
``data.custom_cls.name=SupervisedDataset``. Configure it with ``+data.rllm.method=stepwise`` and the other keys of
`SupervisedConfig`.

verl's own class renders each message separately and joins the tokens. For many models, the result differs from the
chat template's text. This class uses a parser, as a rollout does.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch.utils.data import Dataset

from rllm_core import providers
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, MaskedTokens, MaskMethod
from rllm_core.plugins import PluginManager
from rllm_core.run_file import validated

try:
    from rllm_workflows.sft_rows import ConversationRows, open_rows
except ImportError as missing:
    raise ImportError("the rows of supervised training need rllm-workflows: pip install rllm-workflows") from missing

SECTION = "data.rllm"
PADDING_ID = 0  # never attended to, and never trained

Tensors = dict[str, torch.Tensor]


class SupervisedConfig(Section):
    """``data.rllm`` in verl's configuration: how to convert conversations to tokens."""

    parser: Annotated[str, Field(min_length=1, description="Parser that renders the conversations.")] = "chat_template"
    parser_options: Annotated[
        dict[str, Any], Field(description="Options of the parser, as in its section of a run file.")
    ] = Field(default_factory=dict)
    method: Annotated[
        MaskMethod,
        Field(description="Masking method, as sft.method in a run file."),
    ] = "cumulative"
    model: Annotated[str, Field(description="Model folder for the parser. Defaults to that of verl's tokenizer.")] = ""


class _DataConfig(Section):
    """Keys of verl's ``data`` that this dataset uses; verl uses the others."""

    model_config = ConfigDict(extra="ignore")

    pad_mode: Literal["no_padding", "right"] = "no_padding"
    max_length: Annotated[int, Field(ge=1)] = 1024
    truncation: Literal["error", "left", "right"] = "error"
    shuffle: bool = False
    seed: int | None = None
    rllm: SupervisedConfig = Field(default_factory=SupervisedConfig)


class SupervisedDataset(Dataset[Tensors]):
    """Rows for verl's SFT trainer: one per sequence that the masking method makes from a conversation.

    Reads, checks and tokenizes all conversations at construction. An item has ``input_ids``, ``position_ids`` and
    ``loss_mask`` (1 on target tokens), each of shape ``(tokens,)``, int64. With ``data.pad_mode = "right"``, it also
    has ``attention_mask``, and all have shape ``(data.max_length,)``.

    Args:
        parquet_files: File or files of conversations, ``.jsonl`` or ``.parquet``, in the format of workflow ``sft``.
        tokenizer: verl's tokenizer, which names the model folder.
        config: verl's ``data`` section.
        processor: Ignored; conversations with images are rejected.
        max_samples: Maximum number of conversations: the first ones, or with ``data.shuffle`` a random choice seeded
            with ``data.seed``. 0 or less uses all.

    Raises:
        ConfigError: If a setting or a row cannot be used; for a row, the message names the line of the file.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.config = _checked(config)
        self.parser = _parser(self.config.rllm, tokenizer)
        paths = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        files = [open_rows(Path(path).expanduser()) for path in paths]
        self._tokens, self._learned, self._ends = array("i"), bytearray(), array("Q", [0])
        for rows, index in _chosen(files, max_samples, self.config):
            self._add(rows, index)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, item: int) -> Tensors:
        if not 0 <= item < len(self):
            raise IndexError(f"sequence {item} of {len(self)}")
        span = slice(self._ends[item], self._ends[item + 1])
        ids = np.array(self._tokens[span], np.int64)
        found = {
            "input_ids": ids,
            "position_ids": np.arange(len(ids)),
            "loss_mask": np.frombuffer(self._learned[span], np.uint8).astype(np.int64),
        }
        if self.config.pad_mode == "right":
            found["attention_mask"] = np.ones_like(ids)
            missing = (0, self.config.max_length - len(ids))
            found = {name: np.pad(row, missing, constant_values=PADDING_ID) for name, row in found.items()}
        return {name: torch.from_numpy(row) for name, row in found.items()}

    def _add(self, rows: ConversationRows, index: int) -> None:
        conversation = rows[index]
        if conversation.weight != 1:
            raise ConfigError(
                f"{rows.where(index)}: weight = {conversation.weight:g}, but verl's trainer does not support weights: "
                "remove it, or train with rllm-core train sft --backend verl"
            )
        try:
            sequences = self.parser.tokenize_and_mask(
                conversation.messages, tools=conversation.tools or None, method=self.config.rllm.method
            )
        except ConfigError as error:
            raise ConfigError(f"{rows.where(index)}: {error}") from error
        for sequence in sequences:
            self._append(sequence, rows.where(index))

    def _append(self, sequence: MaskedTokens, where: str) -> None:
        if sequence.media:
            raise ConfigError(f"{where}: the conversation contains an image, but this dataset supports text only")
        ids, learned, most = sequence.token_ids, sequence.loss_mask.copy(), self.config.max_length
        if len(ids) > most:
            if self.config.truncation == "error":
                raise ConfigError(
                    f"{where} has {len(ids)} tokens, but data.max_length = {most}: raise it, shorten the row, or set "
                    "data.truncation to left or right"
                )
            kept = slice(None, most) if self.config.truncation == "right" else slice(-most, None)
            ids, learned = ids[kept], learned[kept]
        learned[0] = False  # no earlier token can predict the first one
        self._tokens.frombytes(ids.astype(np.int32).tobytes())
        self._learned += learned.astype(np.uint8).tobytes()
        self._ends.append(len(self._tokens))


def create_sft_dataset(
    data_paths: str | Sequence[str],
    data_config: Mapping[str, Any],
    tokenizer: Any,
    processor: Any,
    max_samples: int = -1,
) -> SupervisedDataset:
    """Creates the dataset; same signature as ``verl.trainer.sft_trainer.create_sft_dataset``.

    Raises:
        ConfigError: See `SupervisedDataset`.
    """
    return SupervisedDataset(data_paths, tokenizer, data_config, processor, max_samples)


def _checked(config: Mapping[str, Any] | None) -> _DataConfig:
    """Returns the validated keys of verl's ``data`` that this dataset uses."""
    from omegaconf import DictConfig, OmegaConf

    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config or {})
    return validated(_DataConfig, plain, "data", [])


def _parser(config: SupervisedConfig, tokenizer: Any) -> BaseParser:
    model = config.model or str(getattr(tokenizer, "name_or_path", "") or "")
    if not model:
        raise ConfigError(
            f"{SECTION}.model is not set, and verl's tokenizer does not name its folder: set it to the model folder"
        )
    plugins = PluginManager.from_environment()
    provided = plugins.select(providers.ParserProvider, config.parser)
    section = None
    if provided.record.config is not None:
        section = validated(
            plugins.load(provided, provided.record.config), config.parser_options, f"{SECTION}.parser_options", []
        )
    parser_class: type[BaseParser] = plugins.load(provided)
    return parser_class.from_model(model, section)


def _chosen(
    files: Sequence[ConversationRows], max_samples: int, config: _DataConfig
) -> list[tuple[ConversationRows, int]]:
    every = [(rows, index) for rows in files for index in range(len(rows))]
    if not 0 < max_samples < len(every):
        return every
    if not config.shuffle:
        return every[:max_samples]
    picked = np.random.default_rng(config.seed).choice(len(every), size=max_samples, replace=False)
    return [every[index] for index in picked]
