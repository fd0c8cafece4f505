"""Supervised training in both directions: verl's trainer on our rows, and our workflow on verl's workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import conversations, written
from omegaconf import OmegaConf
from rllm_local.training import LocalTrainer
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_verl.supervised import SupervisedDataset, create_sft_dataset
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset as create_by_verl
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl_runs import RUN_SECONDS, Run, command_line, verify

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.losses import CrossEntropy
from rllm_core.config import OptimizerConfig
from rllm_core.errors import UserError
from rllm_core.types import TrainingSample

ROWS, BATCH = 200, 20
PLACE = {"path": "pkg://rllm_verl.supervised", "name": "SupervisedDataset"}
# The first steps of AdamW move every weight by the learning rate, whatever the gradient's size. If two attention
# kernels round a gradient near zero to different signs, weights differ by twice the learning rate.
STEP_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def marked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the starter model, with a chat template that marks assistant text."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(model, folder)
    template = folder / "chat_template.jinja"
    text, found = re.subn(
        r"\{\{- content -\}\}", "{%- generation -%}{{- content -}}{%- endgeneration -%}", template.read_text()
    )
    assert found == 1
    template.write_text(text)
    return folder


Make = Callable[..., SupervisedDataset]


@pytest.fixture
def make(model: Path) -> Make:
    """``make(path, **data)``: creates the dataset as verl's trainer does."""

    def made(path: Path | Sequence[Path], *, folder: Path = model, most: int = -1, **data: Any) -> SupervisedDataset:
        files = [str(one) for one in path] if isinstance(path, list) else str(path)
        config = OmegaConf.create({"custom_cls": PLACE, "messages_key": "messages", **data})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        dataset = create_by_verl(files, config, tokenizer, None, max_samples=most)
        assert type(dataset) is SupervisedDataset
        return dataset

    return made


def rows_of(dataset: SupervisedDataset) -> list[tuple[list[int], list[int]]]:
    return [
        (row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in map(dataset.__getitem__, range(len(dataset)))
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("method", ["cumulative", "stepwise", "hf_template"])
def test_rows_are_those_of_the_parser_token_for_token(
    make: Make, marked: Path, tmp_path: Path, method: Any, suffix: str
) -> None:
    rows = conversations(30)
    path = written(tmp_path / f"rows{suffix}", rows)
    parser = ChatTemplateParser.from_model(marked)
    expected = [
        (sequence.token_ids.tolist(), sequence.loss_mask.astype(int).tolist())
        for row in rows
        for sequence in parser.tokenize_and_mask(row["messages"], method=method)
    ]
    dataset = make(path, folder=marked, rllm={"method": method})
    assert rows_of(dataset) == expected
    assert all(sum(mask) > 0 for _, mask in expected)
    assert len(dataset) == (60 if method == "stepwise" else 30)
    by_function = create_sft_dataset(
        str(path), {"rllm": {"method": method}}, AutoTokenizer.from_pretrained(marked), None
    )
    assert rows_of(by_function) == expected


def test_tools_calls_and_unlearned_answers_reach_the_rows(make: Make, model: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    dataset = make(written(tmp_path / "rows.jsonl", [{"messages": messages, "tools": [tool]}]))
    decode = AutoTokenizer.from_pretrained(model).decode
    [(ids, mask)] = rows_of(dataset)
    assert '"name": "add", "description": "Adds."' in decode(ids)
    learned = decode([token for token, is_learned in zip(ids, mask, strict=True) if is_learned])
    assert learned == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>2<|im_end|>'


def test_padded_rows_samples_and_several_files(make: Make, tmp_path: Path) -> None:
    rows = conversations(12)
    first, second = written(tmp_path / "a.jsonl", rows[:5]), written(tmp_path / "b.parquet", rows[5:])
    whole = make([first, second])
    assert rows_of(make(written(tmp_path / "c.jsonl", rows))) == rows_of(whole)
    assert rows_of(make([first, second], most=7)) == rows_of(whole)[:7]
    some = rows_of(make([first, second], most=7, shuffle=True, seed=3))
    assert some == rows_of(make([first, second], most=7, shuffle=True, seed=3)) != rows_of(whole)[:7]
    assert all(row in rows_of(whole) for row in some)

    padded = make(first, pad_mode="right", max_length=100)
    names = ("input_ids", "position_ids", "loss_mask", "attention_mask")
    for index, (ids, mask) in enumerate(rows_of(whole)[:5]):
        row = padded[index]
        assert {name: tensor.shape for name, tensor in row.items()} == dict.fromkeys(names, (100,))
        assert row["attention_mask"].sum() == len(ids)
        assert row["input_ids"][: len(ids)].tolist() == ids
        assert row["loss_mask"].tolist() == mask + [0] * (100 - len(ids))


@pytest.mark.parametrize(("truncation", "kept"), [("left", slice(-9, None)), ("right", slice(None, 9))])
def test_truncated_rows(make: Make, tmp_path: Path, truncation: str, kept: slice) -> None:
    path = written(tmp_path / "rows.jsonl", conversations(3))
    whole = rows_of(make(path))
    cut = rows_of(make(path, truncation=truncation, max_length=9))
    assert cut == [(ids[kept], mask[kept]) for ids, mask in whole]


def test_a_row_never_begins_with_a_learned_token(make: Make, tmp_path: Path) -> None:
    """verl shifts the masks of a batch by one token, which would move a row's first one to the row before."""
    path = written(tmp_path / "rows.jsonl", conversations(3))
    assert all(mask[-2:] == [1, 1] for _, mask in rows_of(make(path)))
    assert [mask for _, mask in rows_of(make(path, truncation="left", max_length=2))] == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("row", "data", "complaint"),
    [
        ({"messages": []}, {}, "rows.jsonl line 1: the row has no messages"),
        ({}, {"max_length": 5}, r"line 1 has \d+ tokens, but data.max_length = 5: raise it, shorten the row, or set"),
        ({"weight": 0.5}, {}, "line 1: weight = 0.5, but verl's trainer does not support weights"),
        ({}, {"rllm": {"method": "some"}}, 'data.rllm.method = "some": must be'),
        ({}, {"rllm": {"methd": "stepwise"}}, "unknown key 'data.rllm.methd'"),
        ({}, {"rllm": {"parser": "nope"}}, "no parser named 'nope'"),
        ({}, {"rllm": {"parser_options": {"bridg": True}}}, "unknown key 'data.rllm.parser_options.bridg'"),
        ({}, {"rllm": {"method": "hf_template"}}, r"line 1: hf_template: the chat template has no \{% generation %\}"),
        ({}, {"pad_mode": "left_right"}, 'data.pad_mode = "left_right": must be'),
    ],
)
def test_what_cannot_be_used_is_one_line(
    make: Make, tmp_path: Path, row: dict[str, Any], data: dict[str, Any], complaint: str
) -> None:
    path = written(tmp_path / "rows.jsonl", [conversations(1)[0] | row])
    with pytest.raises(UserError, match=complaint) as caught:
        make(path, **data)
    assert "\n" not in str(caught.value)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def samples_of(dataset: SupervisedDataset, indices: Sequence[int]) -> list[TrainingSample]:
    """Rows in the format that backend ``local`` trains."""
    samples = []
    for index in indices:
        row = dataset[index]
        padded = torch.cat([torch.zeros(1), row["loss_mask"], torch.zeros(1)]).diff()
        starts, stops = (padded > 0).nonzero().flatten().tolist(), (padded < 0).nonzero().flatten().tolist()
        samples.append(
            TrainingSample(
                group_id=index,
                rollout_id=str(index),
                token_ids=row["input_ids"].to(torch.int32).numpy(),
                turn_spans=tuple(zip(starts, stops, strict=True)),
                logprobs=None,
                advantages=np.ones(int(row["loss_mask"].sum()), np.float32),
                weight_versions=(0,) * len(starts),
            )
        )
    return samples


def loss_on_local(model: Path, samples: Sequence[TrainingSample]) -> float:
    """Loss per target token before any step."""
    trainer = LocalTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train(False),
        loss=CrossEntropy(),
        aggregation=Aggregation("token_mean"),
        temperature=1.0,
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        share_prefixes=True,
        max_batch_tokens=4096,
    )
    trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=False), 0.0)
    tokens = sum(sample.sampled_tokens for sample in samples)
    step = OptimizerStep(step=1, total_steps=1, samples=len(samples), sampled_tokens=tokens, trajectories=len(samples))
    return trainer.step(step).metrics["loss"]


def test_verls_own_trainer_learns_our_rows(make: Make, model: Path, tmp_path: Path) -> None:
    path, log = written(tmp_path / "rows.jsonl", conversations(ROWS)), tmp_path / "metrics.jsonl"
    settings = (
        f"data.train_files={path}", f"data.train_batch_size={BATCH}", "data.max_token_len_per_gpu=4096",
        "data.num_workers=0", f"data.custom_cls.path={PLACE['path']}", f"data.custom_cls.name={PLACE['name']}",
        f"model.path={model}", "model.enable_gradient_checkpointing=false",
        "+model.override_config.attn_implementation=sdpa",
        "engine.strategy=fsdp2", "engine.model_dtype=fp32", "engine.use_torch_compile=false",
        "+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        "optim.lr=1e-3", "trainer.device=cpu", "trainer.total_epochs=1", "trainer.logger=[file]",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    )  # fmt: skip
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment = os.environ | place | {"VERL_FILE_LOGGER_PATH": str(log)}
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", *settings]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["data"]["train/loss"] for line in log.read_text().splitlines()]
    assert len(losses) == ROWS // BATCH
    assert losses[-1] < 0.6 * losses[0]

    dataset = make(path)
    order = list(DistributedSampler(dataset, shuffle=True, num_replicas=1, rank=0, drop_last=True))
    expected = loss_on_local(model, samples_of(dataset, order[:BATCH]))
    assert losses[0] == pytest.approx(expected, abs=1e-5)


def test_verls_collator_takes_the_rows_unpadded(make: Make, tmp_path: Path) -> None:
    dataset = make(written(tmp_path / "rows.jsonl", conversations(6)))
    batch = SFTTensorCollator("no_padding")([dataset[index] for index in range(6)])
    assert batch["input_ids"].is_nested
    assert [row.tolist() for row in batch["input_ids"].unbind()] == [ids for ids, _ in rows_of(dataset)]


def test_workflow_sft_on_verl_is_workflow_sft_on_local(model: Path, tmp_path: Path) -> None:
    rows = conversations(ROWS + 20)
    path, held_out = written(tmp_path / "rows.jsonl", rows[:ROWS]), written(tmp_path / "held_out.jsonl", rows[ROWS:])
    common = (
        f"sft.train={path}", f"sft.validation={held_out}", "training.validation_rollouts=8",
        "training.groups_per_step=20", "training.rollouts_per_group=1", "training.steps=10",
        "optimizer.learning_rate=1e-3",
    )  # fmt: skip
    on_verl = Run.start(tmp_path / "verl", model, *common, workflow="sft")
    command = [sys.executable, "-m", "rllm_core", "train", "sft", "--backend", "local", "--parser", "chat_template"]
    options = [word for override in (f"model.path={model}", *common) for word in ("-o", override)]
    on_local = tmp_path / "local"
    subprocess.run([*command, "--run-dir", str(on_local), *options], check=True, timeout=RUN_SECONDS)
    workers = set()
    while on_verl.process.poll() is None:
        workers |= {command_line(each).partition("(")[0] for each in on_verl.processes("::")}
        time.sleep(0.5)
    assert on_verl.wait() == 0, on_verl.printed()
    # A workflow that samples nothing needs no servers and no weight syncs, for its validation neither.
    assert any("PolicyWorker" in name for name in workers), workers
    assert not any("vllm" in name.lower() for name in workers), workers
    assert verify(on_verl.path).returncode == 0, verify(on_verl.path).stdout

    expected = [json.loads(line) for line in (on_local / "metrics.jsonl").read_text().splitlines()]
    found = on_verl.lines("metrics")
    assert len(found) == len(expected) == 10
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=STEP_TOLERANCE)
        assert ours["sampled_tokens"] == theirs["sampled_tokens"]
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert "sync_logprob_difference" not in ours
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    likelihoods = [
        [each["nll_per_token"] for each in json.loads((run / "summary.json").read_text())["validation"]]
        for run in (on_verl.path, on_local)
    ]
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-3)
