"""Images in conversations: the tokens of the model's own processor, in one segment, and only genuine placeholders."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rllm_renderers import media as media_module
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_renderers.media import MediaProcessor, load_media
from rllm_renderers.probes import Tail
from rllm_renderers.renderer import RendererParser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoProcessor,
    Idefics3Processor,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from rllm_core.errors import ConfigError
from rllm_core.parser import ParserSession
from rllm_core.types import PlacedMedia, Step, Trajectory, token_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
PLACEHOLDER = SPECIAL.index("<image>")
TOKENS = 4  # an image of 16 x 16 in patches of 8 x 8

TEMPLATE = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else -%}
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As in LLaVA 1.5: text that is not in parts is omitted.
PARTS_ONLY = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor -%}
{%- for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Qwen-VL templates can number images.
NUMBERED = """\
{%- set seen = namespace(images=0) -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else -%}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}
{%- set seen.images = seen.images + 1 %}{{ 'Picture ' ~ seen.images ~ ': <image>' }}
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def tokenizer(template: str | None) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant what colour is it? it is red, and that is blue"] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = template
    return wrapped


def save_model(folder: Path, template: str = TEMPLATE, *, in_tiles: bool = False) -> Path:
    """A folder like LLaVA's without weights, or like LLaVA-NeXT's, where larger images take more tokens."""
    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    grid = [[16, 32], [32, 16], [32, 32]]
    processor_class = LlavaNextProcessor if in_tiles else LlavaProcessor
    processor_class(
        image_processor=LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=grid)
        if in_tiles
        else CLIPImageProcessorPil(**sizes),
        tokenizer=tokenizer(template),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=template,
    ).save_pretrained(folder)
    (LlavaNextConfig if in_tiles else LlavaConfig)(image_token_id=PLACEHOLDER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def vision(vision_folder: Path) -> ChatTemplateParser:
    return ChatTemplateParser.from_model(vision_folder)


def png(colour: Any, size: tuple[int, int] = (20, 30)) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def data_url(colour: Any, size: tuple[int, int] = (20, 30)) -> str:
    return "data:image/png;base64," + base64.b64encode(png(colour, size)).decode()


def image(colour: Any = "red", size: tuple[int, int] = (20, 30)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(colour, size)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def written_by_transformers(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    """Returns the prompt from the model's processor alone."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    images, plain = [], []
    for message in messages:
        parts = []
        for part in message["content"] if isinstance(message["content"], list) else [text(message["content"])]:
            if part["type"] == "image_url":
                data = part["image_url"]["url"].partition(",")[2]
                images.append(PIL.Image.open(io.BytesIO(base64.b64decode(data))))
                part = {"type": "image"}
            parts.append(part)
        plain.append({**message, "content": parts})
    written = processor.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    output = processor(text=[written], images=images or None, add_special_tokens=False)
    ids: list[int] = output["input_ids"][0]
    return ids


CONVERSATIONS = [
    [user(image(), text("what colour is it?"))],
    [user(text("is it like"), image("blue", (64, 16)), image("green", (3, 90)), text("that?"))],
    [{"role": "system", "content": "see"}, user(image()), {"role": "assistant", "content": "red"}, user(image("blue"))],
    [{"role": "user", "content": "no image"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_prompt_is_what_the_processor_writes(
    vision: ChatTemplateParser, vision_folder: Path, messages: list[dict[str, Any]]
) -> None:
    ids = vision.render(messages)
    assert ids == written_by_transformers(vision_folder, messages)
    placed = vision.place_media(ids, messages)
    taken = [position for piece in placed for position in range(piece.start, piece.stop)]
    assert taken == [position for position, token in enumerate(ids) if token == PLACEHOLDER]
    assert [piece.length_tokens for piece in placed] == [TOKENS] * len(placed)


WORDS = st.text(max_size=12).filter(lambda value: value.encode(errors="ignore").decode() == value)
PARTS = st.lists(
    st.builds(image, st.sampled_from(["red", "blue"])) | st.builds(text, WORDS | st.just("<image>")), max_size=4
)
TURNS = st.lists(st.builds(lambda parts: user(*parts), PARTS), min_size=1, max_size=3)
COMPLETIONS = st.lists(
    st.lists(st.integers(0, 300) | st.just(PLACEHOLDER), max_size=8).map(lambda ids: [*ids, 2]), min_size=3, max_size=3
)


@settings(max_examples=60, deadline=None)
@given(TURNS, COMPLETIONS)
def test_whatever_is_said_and_sampled_the_images_stand_where_they_were_shown(
    vision: ChatTemplateParser, turns: list[dict[str, Any]], completions: list[list[int]]
) -> None:
    session, messages, sampled = vision.session(), [], 0
    for said, completion in zip(turns, completions, strict=False):
        messages.append(said)
        turn = session.next_prompt(messages)
        shown = [
            part["image_url"]["url"]
            for m in messages
            if m["role"] == "user"
            for part in m["content"]
            if part["type"] == "image_url"
        ]
        contents = [base64.b64decode(url.partition(",")[2]) for url in shown]
        assert [piece.content for piece in turn.media] == contents
        for piece in turn.media:
            assert set(turn.prompt_ids[piece.start : piece.stop].tolist()) == {PLACEHOLDER}
        session.record(completion)
        sampled += len(completion)
        messages.append(session.answer)
    assert sum(int(segment.loss_mask.sum()) for segment in session.segments) == sampled


def play(parser: ChatTemplateParser, turns: list[tuple[dict[str, Any], list[int]]]) -> tuple[ParserSession, list[Step]]:
    session, messages, steps = parser.session(), [], []
    for said, completion in turns:
        messages.append(said)
        turn = session.next_prompt(messages)
        session.record(completion)
        messages.append(session.answer)
        steps.append(
            Step(
                messages=session.consumed,
                response=session.answer,
                prompt_ids=turn.prompt_ids,
                prompt_media=turn.media,
                completion_ids=session.last_completion_ids,
                segment=turn.segment,
                break_reason=turn.break_reason,
            )
        )
    return session, steps


def test_a_second_image_later_on_stays_in_the_segment(vision: ChatTemplateParser) -> None:
    answer = vision.template.encoder.encode("it is red<|im_end|>")
    turns = [(user(image(), text("what is it?")), answer), (user(text("and that?"), image("blue")), answer)]
    session, steps = play(vision, turns)
    assert (session.stats.bridged, session.stats.rendered) == (1, 1)
    [segment] = session.segments
    assert int(segment.loss_mask.sum()) == 2 * len(answer)
    first, second = steps[1].prompt_media
    assert (first,) == steps[0].prompt_media
    assert first.content == png("red")
    assert second.content == png("blue")
    assert second.start > len(steps[0].prompt_ids) + len(answer)
    assert steps[1].prompt_ids.tolist() == vision.render(steps[1].messages)


def test_a_sampled_placeholder_is_no_image(vision: ChatTemplateParser) -> None:
    sampled = [PLACEHOLDER] * TOKENS + [2]
    session, steps = play(vision, [(user(image()), sampled), (user(image("blue")), sampled)])
    assert len(session.segments) == 1
    assert [piece.content for piece in steps[1].prompt_media] == [png("red"), png("blue")]
    # Rendered again, as after an edit of the conversation, sampled placeholders are text.
    edited = [user(image()), steps[0].response, user(text("?"))]
    ids = vision.render(edited)
    assert ids.count(PLACEHOLDER) == TOKENS
    assert len(vision.place_media(ids, edited)) == 1


@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
def test_text_that_spells_the_placeholder_is_no_image(vision: ChatTemplateParser, role: str) -> None:
    messages = [user(image(), text("?")), {"role": role, "content": "look: <image>, there"}]
    ids = vision.render(messages)
    assert ids.count(PLACEHOLDER) == TOKENS
    assert "look: <image>, there" in vision.template.encoder.decode(ids)
    assert [piece.start for piece in vision.place_media(ids, messages)] == [ids.index(PLACEHOLDER)]
    assert vision.count_control_tokens(messages) == (role in ("user", "tool"))


SOURCES: list[Callable[[Path], dict[str, Any]]] = [
    lambda path: {"type": "image_url", "image_url": {"url": data_url("red")}},
    lambda path: {"type": "image_url", "image_url": data_url("red")},
    lambda path: {"type": "image", "image": data_url("red")},
    lambda path: {"type": "image", "url": data_url("red")},
    lambda path: {"type": "image", "base64": base64.b64encode(png("red")).decode()},
    lambda path: {"type": "image", "path": str(path)},
    lambda path: {"type": "image", "image": str(path)},
]


def test_an_image_is_one_object_however_it_is_given(vision: ChatTemplateParser, tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(png("red"))
    placed = []
    for source in SOURCES:
        messages = [user(source(path))]
        placed += vision.place_media(vision.render(messages), messages)
    assert len(set(placed)) == 1
    assert len({id(piece.content) for piece in placed}) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "not downloaded"),
    ({"type": "image", "image": "http://example.org/cat.png"}, "not downloaded"),
    ({"type": "image", "path": "file:///cat.png"}, "not downloaded"),
    ({"type": "image", "path": "no/such/cat.png"}, "No such file"),
    ({"type": "image", "image": "data:image/png,raw"}, "base64"),
    ({"type": "image", "image": "data:image/png;base64,%%%"}, "not valid base64"),
    ({"type": "image", "base64": base64.b64encode(b"no image").decode()}, "not a readable image"),
    ({"type": "image", "base64": base64.b64encode(png("red")[:40]).decode()}, "not a readable image"),
    ({"type": "image"}, "needs one of"),
    ({"type": "image_url", "image_url": {"uri": "x"}}, "needs one of"),
]


@pytest.mark.parametrize(("part", "complaint"), BAD)
def test_what_is_no_image_is_refused(vision: ChatTemplateParser, part: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        vision.render([user(part)])


def test_supervised_rows_with_images_are_refused(vision: ChatTemplateParser) -> None:
    conversation = [user(image(), text("?")), {"role": "assistant", "content": "red"}]
    with pytest.raises(ConfigError, match="contains an image"):
        vision.tokenize_and_mask(conversation)


def test_other_media_are_refused_by_kind(vision: ChatTemplateParser) -> None:
    with pytest.raises(ConfigError, match="'video'"):
        vision.render([user({"type": "video", "video": "film.mp4"})])


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplateParser:
    return ChatTemplateParser.from_model(save_model(tmp_path_factory.mktemp("tiled"), in_tiles=True))


def test_larger_images_take_the_tokens_that_the_processor_writes(tiled: ChatTemplateParser, tmp_path: Path) -> None:
    folder = save_model(tmp_path, in_tiles=True)
    sizes = [(20, 30), (60, 10), (100, 100)]
    messages = [user(*(image("red", size) for size in sizes), text("which?"))]
    ids = tiled.render(messages)
    assert ids == written_by_transformers(folder, messages)
    lengths = [piece.length_tokens for piece in tiled.place_media(ids, messages)]
    assert len(set(lengths)) == 3
    assert sum(lengths) == ids.count(PLACEHOLDER)


def test_a_file_that_changed_is_another_image(tiled: ChatTemplateParser, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    messages = [user({"type": "image", "path": str(path)})]
    placed = []
    for size in ((20, 30), (100, 100)):
        path.write_bytes(png("red", size))
        placed += tiled.place_media(tiled.render(messages), messages)
    assert [piece.content for piece in placed] == [png("red", (20, 30)), png("red", (100, 100))]


def test_inputs_are_those_of_the_processor_and_come_back_after_they_were_dropped(
    vision_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor: Any = AutoProcessor.from_pretrained(vision_folder)
    expected = processor(text=["<image>"], images=[PIL.Image.open(io.BytesIO(png("blue")))], return_tensors="np")
    monkeypatch.setattr(media_module, "INPUTS_CACHE_BYTES", 1)
    parser = ChatTemplateParser.from_model(vision_folder)
    messages = [user(image("blue"))]
    [chunk] = parser.place_media(parser.render(messages), messages)
    inputs = parser.media_inputs(chunk)
    assert inputs.keys() == {"pixel_values"}
    np.testing.assert_array_equal(inputs["pixel_values"], expected["pixel_values"])
    with pytest.raises(ValueError, match="is not available"):
        parser.media_inputs(PlacedMedia.from_json(chunk.to_json()))


def test_photographs_stand_upright(vision: ChatTemplateParser) -> None:
    """Cameras store unrotated pixels and the rotation in the metadata."""
    upright = PIL.Image.new("RGB", (16, 16), "red")
    upright.paste("blue", (0, 0, 16, 8))
    lying, file, plain = upright.transpose(PIL.Image.Transpose.ROTATE_90), io.BytesIO(), io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # Rotate by 90 degrees clockwise.
    lying.save(file, "PNG", exif=exif)
    upright.save(plain, "PNG")
    arrays = []
    for content in (file.getvalue(), plain.getvalue()):
        messages = [user({"type": "image", "base64": base64.b64encode(content).decode()})]
        [chunk] = vision.place_media(vision.render(messages), messages)
        arrays.append(vision.media_inputs(chunk)["pixel_values"])
    np.testing.assert_array_equal(arrays[0], arrays[1])


def test_steps_with_images_survive_json_and_pickling(vision: ChatTemplateParser) -> None:
    turns = [(user(image(), text("?")), [70, 2]), (user(image("blue"), text("?")), [71, 2])]
    _, steps = play(vision, turns)
    trajectory = Trajectory(steps=steps, reward=1.0)
    again = Trajectory.from_json(trajectory.to_json())
    assert again == trajectory
    assert [piece.content for piece in again.steps[1].prompt_media] == [None, None]
    pickled = pickle.loads(pickle.dumps(trajectory))  # noqa: S301
    assert pickled == trajectory
    assert [piece.content for piece in pickled.steps[1].prompt_media] == [png("red"), png("blue")]


def test_a_session_with_images_can_be_pickled_between_turns(vision: ChatTemplateParser) -> None:
    session, steps = play(vision, [(user(image()), [70, 2])])
    again = pickle.loads(pickle.dumps(session))  # noqa: S301
    messages = [*steps[0].messages, session.answer, user(image("blue"))]
    one, other = session.next_prompt(messages), again.next_prompt(messages)
    assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert one.media == other.media


def test_templates_that_leave_plain_text_out_get_it_in_parts(tmp_path: Path) -> None:
    parser = ChatTemplateParser.from_model(save_model(tmp_path, PARTS_ONLY))
    ids = parser.render([{"role": "user", "content": "what is it?"}])
    assert parser.template.encoder.decode(ids) == "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert Tail(0, True, False, frozenset({"user"})) in parser.bridged_tails


def test_templates_that_number_images_bridge_only_text(tmp_path: Path) -> None:
    parser = ChatTemplateParser.from_model(save_model(tmp_path, NUMBERED))
    assert Tail(0, True, False) in parser.bridged_tails
    assert Tail(0, True, False, frozenset({"user"})) not in parser.bridged_tails
    answer = parser.template.encoder.encode("red<|im_end|>")
    session, steps = play(parser, [(user(image()), answer), (user(image("blue")), answer)])
    assert len(session.segments) == 1, "rendered as a whole, it still begins with what was said"
    assert "Picture 2: " in parser.template.encoder.decode(steps[1].prompt_ids.tolist())
    assert len(steps[1].prompt_media) == 2


def test_a_template_that_leaves_images_out_is_an_error(tmp_path: Path) -> None:
    parser = ChatTemplateParser.from_model(save_model(tmp_path, TEMPLATE.replace("'<image>'", "''")))
    with pytest.raises(ValueError, match="0 times for 1 images"):
        parser.render([user(image())])


def test_placeholders_that_are_not_those_of_the_images_are_an_error(vision: ChatTemplateParser) -> None:
    messages = [user(image())]
    ids = vision.render(messages)
    at = ids.index(PLACEHOLDER)
    for broken in ([*ids, PLACEHOLDER], [*ids[:at], *ids[at + 1 :]], [*ids[: at + 1], 70, *ids[at + 1 :]]):
        with pytest.raises(ValueError, match="placeholder tokens"):
            vision.place_media(token_ids(broken), messages)


def test_a_text_model_refuses_images_by_name(tmp_path: Path) -> None:
    tokenizer(TEMPLATE).save_pretrained(tmp_path)
    parser = ChatTemplateParser.from_model(tmp_path)
    assert not parser.supports_media
    with pytest.raises(ConfigError, match=f"{tmp_path.name}.* takes text only"):
        parser.render([user(image())])


def test_without_pillow_text_works_and_images_name_what_to_install(
    vision_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = media_module.importlib.util.find_spec
    monkeypatch.setattr(
        media_module.importlib.util, "find_spec", lambda name: None if name == "PIL" else find_spec(name)
    )
    parser = ChatTemplateParser.from_model(vision_folder)
    assert not parser.supports_media
    assert parser.render([user(text("hello"))])
    with pytest.raises(ConfigError, match=r"rllm-renderers\[vision\]"):
        parser.render([user(image())])


def test_images_in_rows_of_tokens_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        tokenizer=tokenizer(TEMPLATE),
        image_seq_len=4,
        chat_template=TEMPLATE,
    )
    with pytest.raises(ConfigError, match="Idefics3Processor writes an image as a sequence of different tokens"):
        MediaProcessor(processor)
    processor.save_pretrained(tmp_path)
    LlavaConfig().save_pretrained(tmp_path)
    assert "one unbroken run" in str(load_media(str(tmp_path), trust_remote_code=False))
    assert "images cannot be used with model" in caplog.text


def test_the_placeholder_must_be_a_special_token(vision_folder: Path) -> None:
    processor: Any = AutoProcessor.from_pretrained(vision_folder)
    media = MediaProcessor(processor)
    with pytest.raises(ConfigError, match="not a special token"):
        media.check_placeholder({"<|im_end|>": 2})


def test_parser_renderer_refuses_a_vision_model_naming_the_other(vision_folder: Path) -> None:
    assert json.loads((vision_folder / "config.json").read_text())["vision_config"]
    with pytest.raises(ConfigError, match="chat_template"):
        RendererParser.from_model(vision_folder)
