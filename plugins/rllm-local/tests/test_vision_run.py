"""A run with images through the real trainer: a tiny vision-language model learns to name the colors it sees."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import PIL.Image
import pytest
import rllm_local
import rllm_renderers
import torch
from colours import picture
from rllm_local.backend import LocalBackend
from rllm_renderers.chat_template import ChatTemplateParser
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rllm_core import Run
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import OptimizerStep
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import TrainingSample, token_ids
from rllm_viewer.verify import verify

WORKFLOW = str(Path(__file__).with_name("support") / "colours.py")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
TEMPLATE = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else -%}
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor -%}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def processor() -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["red blue user\n assistant\n what now"] * 4, trainer)
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a two-layer LLaVA that answers every image with a random color."""
    folder = tmp_path_factory.mktemp("vision")
    written = processor()
    written.save_pretrained(folder)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                vision_config=CLIPVisionConfig(
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    image_size=16,
                    patch_size=8,
                ),
                text_config=Qwen2Config(
                    vocab_size=len(written.tokenizer),
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    max_position_embeddings=128,
                ),
                image_token_id=written.image_token_id,
            )
        )
        answer_at_random(model, written)
    model.save_pretrained(folder)
    return folder


def answer_at_random(model: Any, written: Any) -> None:
    """Trains on dialogues in which each color gets a random answer."""
    rng = random.Random(0)
    images = {colour: PIL.Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        texts, shown = [], []
        for _ in range(16):
            turns = []
            for question in ("what", "now"):
                turns.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]})
                turns.append({"role": "assistant", "content": rng.choice(["red", "blue"])})
                shown.append(images[rng.choice(["red", "blue"])])
            texts.append(written.apply_chat_template(turns, tokenize=False))
        inputs = written(text=texts, images=shown, padding=True, return_tensors="pt")
        not_read = (inputs["input_ids"] == written.image_token_id) | (inputs["attention_mask"] == 0)
        labels = inputs["input_ids"].masked_fill(not_read, -100)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    for name, plugin in (("local", rllm_local), ("renderers", rllm_renderers)):
        manager.register(plugin, name)
    return manager


def train(plugins: PluginManager, folder: Path, run_dir: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    settings = (
        f"model.path={folder}",
        "local.device=cpu",
        "training.groups_per_step=4",
        "training.rollouts_per_group=8",
        "training.validation_rollouts=32",
        "rollout.max_response_tokens=3",
        "optimizer.learning_rate=2e-3",
        "optimizer.warmup_steps=5",
    )
    config = load_run_config(WORKFLOW, plugins, overrides=(*settings, *overrides))
    return asyncio.run(launch.train(assemble(config, plugins), run_dir, resume=resume, progress=Progress()))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    [file] = [file for file in folder.glob("*.safetensors") if file.name != "optimizer.safetensors"]
    return load_file(file)


def newest_model(run_dir: Path) -> Path:
    return checkpoint.complete(run_dir / "checkpoints")[-1] / "backend"


def check_exactness(run_dir: Path) -> None:
    for row in rows_of(run_dir):
        assert row["segment_breaks"] == 0
        assert row["samples"] == row["trajectories"], "both turns are one training sample"
        assert row.get("rollout_logprob_difference_max", 0.0) < 1e-4


@pytest.mark.slow
def test_one_step_trains_every_part_of_a_vision_language_model(
    plugins: PluginManager, vision_folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    summary = train(plugins, vision_folder, run_dir, "training.steps=1")
    assert summary["books"]["trained"] == summary["books"]["dispatched"] == 32
    check_exactness(run_dir)
    [row] = rows_of(run_dir)
    assert row["rollout_logprob_difference_max"] > 0, "something was compared"
    before, after = weights_of(vision_folder), weights_of(newest_model(run_dir))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    for part in (
        "multi_modal_projector.linear_1.weight",
        "patch_embedding.weight",
        "embed_tokens.weight",
        "lm_head.weight",
    ):
        assert any(name.endswith(part) for name in changed), part
    for episode in Run(run_dir).episodes():
        for trajectory in episode.trajectories:
            assert [len(step.prompt_media) for step in trajectory.steps] == [1, 2]
            assert all(piece.content is None for step in trajectory.steps for piece in step.prompt_media)


@pytest.mark.slow
def test_a_worker_sends_its_images_and_changes_no_number(
    plugins: PluginManager, vision_folder: Path, tmp_path: Path
) -> None:
    elsewhere = ("rollout.host=processes", "rollout.workers=2")
    for name, more in (("inline", ()), ("worker", elsewhere)):
        train(plugins, vision_folder, tmp_path / name, "training.steps=2", *more)
        check_exactness(tmp_path / name)
    inline, worker = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("inline", "worker"))
    assert worker == inline
    assert verify(tmp_path / "worker").problems == []


@pytest.mark.slow
def test_a_checkpoint_is_a_vision_model_folder(plugins: PluginManager, vision_folder: Path, tmp_path: Path) -> None:
    train(plugins, vision_folder, tmp_path / "run", "training.steps=1")
    folder = newest_model(tmp_path / "run")
    messages = [{"role": "user", "content": [{"type": "image", "image": picture("red")}]}]
    prompts = [ChatTemplateParser.from_model(path).render(messages) for path in (vision_folder, folder)]
    assert prompts[0] == prompts[1]
    train(plugins, folder, tmp_path / "again", "training.steps=1")
    check_exactness(tmp_path / "again")


@pytest.mark.slow
def test_adapters_are_trained_in_the_tower_too(plugins: PluginManager, vision_folder: Path, tmp_path: Path) -> None:
    train(plugins, vision_folder, tmp_path / "run", "training.steps=1", "local.lora.rank=2")
    check_exactness(tmp_path / "run")
    adapters = load_file(newest_model(tmp_path / "run") / "adapter_model.safetensors")
    trained = [name for name, weight in adapters.items() if "lora_B" in name and bool(weight.any())]
    for part in ("vision_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in trained), part


def test_the_reference_policy_sees_the_images_too(plugins: PluginManager, vision_folder: Path) -> None:
    config = load_run_config(
        WORKFLOW, plugins, overrides=(f"model.path={vision_folder}", "local.device=cpu", "algorithm.loss=reinforce")
    )
    backend, parser = LocalBackend(config, plugins), ChatTemplateParser.from_model(vision_folder)
    samples = []
    for colour, advantage in (("red", 1.0), ("blue", -1.0)):
        messages = [{"role": "user", "content": [{"type": "image", "image": picture(colour)}]}]
        ids = parser.render(messages)
        samples.append(
            TrainingSample(
                group_id=0,
                rollout_id=colour,
                token_ids=token_ids([*ids, 70, 71]),
                turn_spans=((len(ids), len(ids) + 2),),
                logprobs=None,
                advantages=np.full(2, advantage, np.float32),
                weight_versions=(0,),
                media=parser.place_media(ids, messages),
            )
        )

    async def run() -> None:
        await backend.init_rollout_engine(parser)
        before = await backend.compute_logprobs(samples, "reference")
        assert np.abs(before[0] - before[1]).max() > 1e-4, "the image makes a difference"
        await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
        await backend.update_policy(OptimizerStep(step=1, total_steps=1, samples=2, sampled_tokens=4, trajectories=2))
        after = await backend.compute_logprobs(samples, "reference")
        current = await backend.compute_logprobs(samples, "current")
        for old, reference, new in zip(before, after, current, strict=True):
            np.testing.assert_array_equal(reference, old)
            assert not np.array_equal(new, old)
        await backend.shutdown()

    asyncio.run(run())


@pytest.mark.slow
def test_images_are_sampled_while_others_are_trained(
    plugins: PluginManager, vision_folder: Path, tmp_path: Path
) -> None:
    train(
        plugins,
        vision_folder,
        tmp_path / "run",
        "local.generation=separated",
        "training.steps=4",
        "training.staleness_threshold=1",
        "training.partial_rollout=true",
    )
    check_exactness(tmp_path / "run")
    assert verify(tmp_path / "run").problems == []
    rows = rows_of(tmp_path / "run")
    assert rows[1]["staleness_max"] == 1
    assert rows[0]["rollout_logprob_difference_max"] > 0, "something was compared"


@pytest.mark.slow
def test_colors_are_learned_from_chance_to_mastery(plugins: PluginManager, vision_folder: Path, tmp_path: Path) -> None:
    summary = train(
        plugins,
        vision_folder,
        tmp_path / "run",
        "training.steps=60",
        "training.rollouts_per_group=16",
        "training.validation_rollouts=64",
    )
    first, last = summary["validation"][0], summary["validation"][-1]
    assert first["solved"] <= 0.4
    assert last["solved"] >= 0.85
    check_exactness(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("local.lora.rank=2",)], ids=["full", "lora"])
def test_resumed_equals_uninterrupted(
    plugins: PluginManager, vision_folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    settings = ("training.steps=4", "training.checkpoint_every_steps=2", *more)
    train(plugins, vision_folder, run_dir, *settings)
    rows, weights = (run_dir / "metrics.jsonl").read_bytes(), weights_of(newest_model(run_dir))
    shutil.rmtree(checkpoint.complete(run_dir / "checkpoints")[-1])
    assert train(plugins, vision_folder, run_dir, *settings, resume=True)["resumed_from_step"] == 2
    assert (run_dir / "metrics.jsonl").read_bytes() == rows
    again = weights_of(newest_model(run_dir))
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
