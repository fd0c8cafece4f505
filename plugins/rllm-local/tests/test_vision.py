"""Images: sampling and training agree, and only a prompt's own images count as images."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rllm_local.attention import NAME as BLOCK_CAUSAL
from rllm_local.decoders import TransformersDecoder
from rllm_local.engine import LocalEngine
from rllm_local.model import use_matching_attention
from rllm_local.training import LocalTrainer
from rllm_local.vision import Vision, image_source
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.losses import ReinforceLoss
from rllm_core.config import ConfigError, OptimizerConfig
from rllm_core.types import MediaChunk, PlacedMedia, SamplingParams, TokenIds, TrainingSample, token_ids, with_media

CPU = torch.device("cpu")
VOCABULARY, PLACEHOLDER, TWIN = 48, 40, 41
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
PLANAR = {
    **TEXT,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
}
TOWER = {"num_heads": 2, "patch_size": 4, "temporal_patch_size": 1, "depth": 2, "initializer_range": 0.3}
IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 42, "vision_start_token_id": 43, "vision_end_token_id": 44}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "initializer_range": 0.3, "initializer_factor": 10.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": CLIP,
        "image_token_id": PLACEHOLDER,
    },
    "llava_next": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": CLIP,
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        "image_token_id": PLACEHOLDER,
    },
    "qwen2_vl": {
        "text_config": PLANAR,
        "vision_config": {**TOWER, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        **IDS,
    },
    "qwen3_vl": {
        "text_config": PLANAR,
        "vision_config": {
            **TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **IDS,
    },
    "gemma3": {
        "text_config": {**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        "mm_tokens_per_image": 4, "image_token_id": PLACEHOLDER, "boi_token_id": 43, "eoi_token_id": 44,
    },
}  # fmt: skip
READ = ["llava", "llava_next", "qwen2_vl", "qwen3_vl"]


def tiny_model(family: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(family, **FAMILIES[family])
        )
    model.train(False)
    with torch.no_grad():
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[TWIN] = embeddings.weight[PLACEHOLDER]
    use_matching_attention(model, "highest")
    return model


class Pictures:
    """Fake parser: an image's hash determines the model's inputs."""

    name = "pictures"
    supports_media = True

    def __init__(self, family: str) -> None:
        self.is_planar = family in ("qwen2_vl", "qwen3_vl")
        self.is_tiled = family == "llava_next"

    def image(self, name: str, *, wide: bool = False) -> MediaChunk:
        length = (24 if wide else 16) if self.is_tiled else 8 if wide and self.is_planar else 4
        content = name.encode()
        sha256 = hashlib.sha256(content).hexdigest()
        return MediaChunk(sha256=sha256, kind="image", length_tokens=length, content=content)

    def media_inputs(self, chunk: MediaChunk) -> dict[str, npt.NDArray[Any]]:
        rng = np.random.default_rng(int(chunk.sha256[:8], 16))
        if self.is_tiled:
            size = (100, 100) if chunk.length_tokens == 24 else (30, 20)
            tiles = rng.normal(size=(1, 5, 3, 16, 16)).astype(np.float32)
            return {"pixel_values": tiles, "image_sizes": np.array([size])}
        if not self.is_planar:
            return {"pixel_values": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)}
        width = chunk.length_tokens
        patches = rng.normal(size=(4 * width, 3 * 4 * 4)).astype(np.float32)
        return {"pixel_values": patches, "image_grid_thw": np.array([[1, 4, width]])}

    def media_probe(self) -> tuple[TokenIds, tuple[PlacedMedia, ...]]:
        return prompt([1, 43], self.image("probe"), [44, 2])


def prompt(*pieces: list[int] | MediaChunk) -> tuple[TokenIds, tuple[PlacedMedia, ...]]:
    ids: list[int] = []
    media = []
    for piece in pieces:
        if isinstance(piece, MediaChunk):
            media.append(PlacedMedia(**dict(piece), start=len(ids)))
            ids += [PLACEHOLDER] * piece.length_tokens
        else:
            ids += piece
    return token_ids(ids), tuple(media)


def sample(
    ids: TokenIds, media: tuple[PlacedMedia, ...], spans: Sequence[tuple[int, int]], *, seed: int = 0
) -> TrainingSample:
    count = sum(stop - start for start, stop in spans)
    rng = np.random.default_rng(seed)
    return TrainingSample(
        group_id=0,
        rollout_id="0",
        token_ids=ids,
        turn_spans=tuple(spans),
        logprobs=rng.uniform(-6, -4, count),
        advantages=rng.normal(size=count),
        weight_versions=(0,) * len(spans),
        media=media,
    )


def trainer_of(model: PreTrainedModel, pictures: Pictures, *, share_prefixes: bool = True) -> LocalTrainer:
    return LocalTrainer(
        model=model,
        loss=ReinforceLoss(),
        aggregation=Aggregation("token_mean"),
        temperature=1.0,
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        share_prefixes=share_prefixes,
        max_batch_tokens=4096,
        vision=Vision(model, pictures),
    )


def transformers_logits(model: Any, pictures: Pictures, taken: TrainingSample) -> torch.Tensor:
    """``(tokens, vocabulary)`` by the model's own forward; an equal-embedding token replaces sampled placeholders."""
    ids = torch.tensor(taken.token_ids, dtype=torch.long)[None]
    kinds = torch.zeros_like(ids)
    for piece in taken.media:
        kinds[0, piece.start : piece.stop] = 1
    ids[(ids == PLACEHOLDER) & (kinds == 0)] = TWIN
    arrays = [pictures.media_inputs(piece) for piece in taken.media]
    inputs = {name: torch.tensor(np.concatenate([array[name] for array in arrays])) for name in arrays[0]}
    if pictures.is_planar:
        inputs["mm_token_type_ids"] = kinds
    logits: torch.Tensor = model(input_ids=ids, **inputs, use_cache=False).logits[0]
    return logits


def transformers_logprobs(model: Any, pictures: Pictures, taken: TrainingSample) -> torch.Tensor:
    distributions = torch.log_softmax(transformers_logits(model, pictures, taken), -1)
    at = torch.cat([torch.arange(start, stop) for start, stop in taken.turn_spans])
    return distributions[at - 1, torch.tensor(taken.token_ids, dtype=torch.long)[at]]


@contextmanager
def engine_of(model: PreTrainedModel, pictures: Pictures, *, shared: bool = True) -> Iterator[LocalEngine]:
    with ThreadPoolExecutor(1) as executor:
        yield LocalEngine(
            TransformersDecoder(model, shared=shared, images=pictures),
            None,
            executor,
            device=CPU,
            vocabulary_size=VOCABULARY,
            max_model_tokens=256,
            max_batch_rows=64,
            takes_media=True,
        )


def mixed_samples(pictures: Pictures) -> list[TrainingSample]:
    """Returns groups with shared images and prompts, equal tokens with other images, two turns, and text only."""
    red, blue, wide = pictures.image("red"), pictures.image("blue"), pictures.image("wide", wide=True)
    built = []
    for image in (red, blue):
        ids, media = prompt([1, 43], image, [44, 2])
        for tail in ([5, 6, PLACEHOLDER, 7], [5, 6, 8], [PLACEHOLDER, PLACEHOLDER]):
            built.append(sample(token_ids([*ids, *tail]), media, [(len(ids), len(ids) + len(tail))], seed=len(built)))
    for second in (red, wide):
        ids, media = prompt([1, 43], wide, [44, 2], [9, PLACEHOLDER, 3], [6, 43], second, [44], [11, 12])
        first = 4 + wide.length_tokens
        built.append(sample(ids, media, [(first, first + 3), (len(ids) - 2, len(ids))], seed=len(built)))
    built.append(sample(token_ids([1, 2, 3, 4, 5]), (), [(2, 5)], seed=len(built)))
    return built


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("family", READ)
def test_logprobs_of_the_training_path_are_those_of_transformers(family: str, share_prefixes: bool) -> None:
    model, pictures = tiny_model(family), Pictures(family)
    samples = mixed_samples(pictures)
    found = trainer_of(model, pictures, share_prefixes=share_prefixes).logprobs(samples)
    with torch.no_grad():
        for taken, logprobs in zip(samples[:-1], found, strict=False):
            expected = transformers_logprobs(model, pictures, taken).numpy()
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert np.abs(found[0] - found[3]).max() > 0.01, "the image makes a difference"


@pytest.mark.parametrize("family", READ)
def test_gradients_reach_every_part_of_the_model_and_do_not_depend_on_the_layout(family: str) -> None:
    gradients = []
    for share_prefixes in (True, False):
        model, pictures = tiny_model(family), Pictures(family)
        trainer = trainer_of(model, pictures, share_prefixes=share_prefixes)
        trainer.forward_backward(trainer.batch(mixed_samples(pictures), skip_zero_advantages=True), 0.01)
        gradients.append({name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-4, rtol=2e-3, msg=name)
    reached = [name for name, gradient in gradients[0].items() if bool(gradient.any())]
    for part in (
        "patch_embed",
        "lm_head",
        "embed_tokens",
        "merger" if family.startswith("qwen") else "multi_modal_projector",
    ):
        assert any(part in name for name in reached), part


@pytest.mark.parametrize("family", READ)
def test_sampled_logprobs_are_those_of_the_training_path(family: str) -> None:
    model, pictures = tiny_model(family), Pictures(family)
    params = SamplingParams(max_response_tokens=30, temperature=1.0)
    prompts = [
        prompt([1, 43], pictures.image("red"), [44, 2]),
        prompt([1, 2, 3, 43], pictures.image("wide", wide=True), [44, PLACEHOLDER, 43], pictures.image("red"), [44]),
        prompt([4, 5, 6, 7, 8, 9]),
    ]
    samples = []

    async def run(engine: LocalEngine) -> None:
        answers = await asyncio.gather(
            *(
                engine.get_token_outputs_from_token_input(
                    with_media(ids, media), sampling_params=params, seeds=range(6)
                )
                for ids, media in prompts
            )
        )
        for (ids, media), outputs in zip(prompts, answers, strict=True):
            for output in outputs:
                whole = token_ids([*ids, *output.token_ids])
                taken = sample(whole, media, [(len(ids), len(whole))])
                samples.append(taken.model_copy(update={"logprobs": output.logprobs}))

    with engine_of(model, pictures) as engine:
        asyncio.run(run(engine))
    assert any(PLACEHOLDER in taken.token_ids[taken.prompt_tokens :] for taken in samples)
    found = trainer_of(model, pictures).logprobs(samples)
    for taken, logprobs in zip(samples, found, strict=True):
        np.testing.assert_allclose(taken.logprobs, logprobs, atol=1e-4)


def test_a_sampler_with_its_own_weights_keeps_those_of_the_vision_tower_too() -> None:
    model, pictures = tiny_model("llava"), Pictures("llava")
    ids, media = prompt([1], pictures.image("red"), [2])
    params = SamplingParams(max_response_tokens=5)

    def sampled(engine: LocalEngine) -> npt.NDArray[np.float32]:
        output = asyncio.run(
            engine.get_token_output_from_token_input(with_media(ids, media), sampling_params=params, seed=1)
        )
        assert output.logprobs is not None
        return output.logprobs

    with engine_of(model, pictures, shared=False) as engine:
        before = sampled(engine)
        with torch.no_grad():
            for parameter in model.get_submodule("model.vision_tower").parameters():
                parameter.mul_(0.5)
        np.testing.assert_array_equal(sampled(engine), before)
        engine.load_weights(model, 1)
        assert not np.array_equal(sampled(engine), before)


def test_vision_towers_keep_their_own_attention() -> None:
    config = tiny_model("llava").config
    assert config.text_config._attn_implementation == BLOCK_CAUSAL
    assert config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", READ)
def test_models_whose_images_are_read_exactly_are_taken(family: str) -> None:
    pictures: Any = Pictures(family)
    assert image_source(tiny_model(family), pictures) is pictures


def test_models_that_do_more_with_an_image_are_refused_by_name() -> None:
    pictures: Any = Pictures("gemma3")
    with pytest.raises(ConfigError, match="gemma3"):
        image_source(tiny_model("gemma3"), pictures)


def test_a_parser_that_places_images_but_does_not_hand_them_out_is_refused() -> None:
    class Silent:
        name = "silent"
        supports_media = True

    silent: Any = Silent()
    with pytest.raises(ConfigError, match="parser 'silent'"):
        image_source(tiny_model("llava"), silent)


def test_a_step_trains_the_projector_and_the_tower() -> None:
    model, pictures = tiny_model("llava"), Pictures("llava")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_of(model, pictures)
    samples = mixed_samples(pictures)
    trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=True), 0.0)
    tokens = sum(taken.sampled_tokens for taken in samples)
    trainer.step(OptimizerStep(step=1, total_steps=1, samples=len(samples), sampled_tokens=tokens, trajectories=9))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    for part in (
        "multi_modal_projector.linear_1.weight",
        "vision_tower.embeddings.patch_embedding.weight",
        "lm_head.weight",
    ):
        assert any(name.endswith(part) for name in changed), part
