"""Images in messages: their placeholder tokens, and the inputs of the model's vision part.

The model's Hugging Face processor determines both. An image is a content part
``{"type": "image_url", "image_url": {"url": ...}}`` as in OpenAI's API, or ``{"type": "image", "image": ...}`` (also
``path``, ``url`` or, for bare base64, ``base64``), with a data URL or a local file. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import io
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rllm_core.errors import ConfigError
from rllm_core.types import MediaChunk, MessageLike, PlacedMedia, TokenIds
from rllm_renderers.cache import BoundedCache
from rllm_renderers.loading import is_offline, read_model_config

logger = logging.getLogger(__name__)

CONTENT_CACHE_BYTES = 256 * 2**20
INPUTS_CACHE_BYTES = 256 * 2**20

_IMAGE_TYPES = ("image", "image_url")
_OTHER_TYPES = ("video", "video_url", "audio", "audio_url", "input_audio")
_SOURCE_KEYS = ("image_url", "image", "path", "url", "base64")
# Processor outputs for the text around the images.
_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_PROBE_SIZES = ((48, 64), (160, 96))

ImageInputs = Mapping[str, npt.NDArray[Any]]


class ImagePart(dict[str, Any]):
    """An image as a part of a message; templates and cache keys see only its hash."""

    def __init__(self, chunk: MediaChunk) -> None:
        super().__init__(type="image", sha256=chunk.sha256)
        self.chunk = chunk


class MediaProcessor:
    """Processes images for one model. Thread-safe.

    Args:
        processor: Processor of the model, for exclusive use.

    Raises:
        ConfigError: If an image is not written as one unbroken run of placeholder tokens.

    Attributes:
        placeholder: Text the chat template writes for an image.
        placeholder_id: Token of the placeholder; an image takes a run of them.
        chat_template: Chat template of the processor, for models whose tokenizer has none.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._lock = Lock()
        self._chunks: BoundedCache[MediaChunk] = BoundedCache(CONTENT_CACHE_BYTES)
        self._inputs: BoundedCache[ImageInputs] = BoundedCache(INPUTS_CACHE_BYTES)
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder:
            raise ConfigError(f"{type(processor).__name__} has no image token, so prompts cannot contain images")
        self._pattern = re.compile(re.escape(self.placeholder))
        self.chat_template: Any = getattr(processor, "chat_template", None)
        self.placeholder_id = -1
        for size in _PROBE_SIZES:
            ids, _ = self._processed(_probe_image(size))
            if self.placeholder_id < 0:
                self.placeholder_id = ids[0]
            if set(ids) != {self.placeholder_id}:
                raise ConfigError(
                    f"{type(processor).__name__} writes an image as a sequence of different tokens; images are "
                    f"supported only for models that write one unbroken run of {self.placeholder!r} per image"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def check_placeholder(self, control_tokens: Mapping[str, int]) -> None:
        """Checks that no text can become the placeholder.

        Raises:
            ConfigError: If the placeholder is not a control token of the tokenizer.
        """
        if control_tokens.get(self.placeholder) != self.placeholder_id:
            raise ConfigError(f"the image placeholder {self.placeholder!r} is not a special token of the tokenizer")

    def resolve(self, messages: Sequence[MessageLike]) -> list[MessageLike]:
        """Reads the images in messages and identifies them by hash; images already resolved are kept.

        Raises:
            ValueError: If an image cannot be read.
        """
        return [
            {**message, "content": [self._resolved(part) if _is_image(part) else part for part in _parts(message)]}
            if any(_is_image(part) for part in _parts(message))
            else message
            for message in messages
        ]

    def _resolved(self, part: Mapping[str, Any]) -> ImagePart:
        return part if isinstance(part, ImagePart) else ImagePart(self._chunk(_content(part)))

    def expanded(self, text: str, images: Sequence[MediaChunk]) -> str:
        """Repeats the placeholder of each image in rendered text once per token of the image.

        Raises:
            ValueError: If the text does not contain exactly one placeholder per image.
        """
        found = len(self._pattern.findall(text))
        if found != len(images):
            raise ValueError(
                f"the rendered conversation contains {self.placeholder!r} {found} times for {len(images)} images: the "
                "chat template omits images, or some text contains the placeholder"
            )
        rest = iter(images)
        return self._pattern.sub(lambda _: self.placeholder * next(rest).length_tokens, text)

    def place(self, prompt_ids: TokenIds, images: Sequence[MediaChunk], start: int) -> tuple[PlacedMedia, ...]:
        """Returns ``images`` with their positions in ``prompt_ids[start:]``.

        Raises:
            ValueError: If the placeholders do not match the images.
        """
        at = start + np.flatnonzero(prompt_ids[start:] == self.placeholder_id)
        if len(at) != sum(image.length_tokens for image in images):
            raise ValueError(f"{len(at)} placeholder tokens do not match {len(images)} images")
        placed, taken = [], 0
        for image in images:
            run = at[taken : taken + image.length_tokens]
            if run[-1] - run[0] != image.length_tokens - 1:
                raise ValueError("the placeholder tokens of an image are not consecutive")
            placed.append(PlacedMedia(**_fields(image), start=int(run[0])))
            taken += image.length_tokens
        return tuple(placed)

    def inputs(self, chunk: MediaChunk) -> ImageInputs:
        """Returns the inputs of the model's vision part for an image, by argument name, with a leading batch axis.

        Raises:
            ValueError: If the image has no content, for example after loading from JSON.
        """
        inputs = self._inputs.get(chunk.sha256)
        if inputs is None:
            if chunk.content is None:
                raise ValueError(
                    f"the content of image {chunk.sha256[:12]} is not available: JSON contains only its hash"
                )
            _, inputs = self._processed(_opened(chunk.content))
            self._keep(chunk.sha256, inputs)
        return inputs

    def probe_part(self) -> ImagePart:
        """Returns a small image as a part of a message."""
        file = io.BytesIO()
        _probe_image(_PROBE_SIZES[0]).save(file, "PNG")
        return ImagePart(self._chunk(file.getvalue()))

    def with_probe(self, message: MessageLike) -> MessageLike:
        """Returns a text message with a small image added."""
        return {**message, "content": [{"type": "text", "text": message["content"]}, self.probe_part()]}

    def _chunk(self, content: bytes) -> MediaChunk:
        sha256 = hashlib.sha256(content).hexdigest()
        chunk = self._chunks.get(sha256)
        if chunk is None:
            ids, inputs = self._processed(_opened(content))
            if set(ids) != {self.placeholder_id}:
                raise ValueError(f"image {sha256[:12]} is not written as one unbroken run of {self.placeholder!r}")
            chunk = MediaChunk(sha256=sha256, kind="image", length_tokens=len(ids), content=content)
            self._chunks.put(sha256, chunk, len(content))
            self._keep(sha256, inputs)
        return chunk

    def _keep(self, sha256: str, inputs: ImageInputs) -> None:
        self._inputs.put(sha256, inputs, sum(array.nbytes for array in inputs.values()))

    def _processed(self, image: Any) -> tuple[list[int], ImageInputs]:
        """Returns the tokens of an image, and the processor's other outputs for it."""
        with self._lock:
            output = self._processor(
                text=[self.placeholder], images=[image], add_special_tokens=False, return_tensors="np"
            )
        inputs = {name: np.asarray(value) for name, value in output.items() if name not in _TEXT_INPUTS}
        return output["input_ids"][0].tolist(), inputs


def load_media(path: str, *, trust_remote_code: bool) -> MediaProcessor | str:
    """Returns the image processor of a model, or the reason why messages cannot contain images.

    A vision model with unsupported images can still be trained on text, so this only warns. A message with an image
    then raises an error.
    """
    if read_model_config(path).get("vision_config") is None:
        return f"model {path!r} takes text only"
    try:
        return MediaProcessor(_load_processor(path, trust_remote_code))
    except ConfigError as error:
        logger.warning("images cannot be used with model %r: %s", path, error)
        return f"they cannot be used with model {path!r}: {error}"


def _load_processor(path: str, trust_remote_code: bool) -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("images need pillow: pip install 'rllm-renderers[vision]'")
    from transformers import AutoProcessor

    auto_processor: Any = AutoProcessor
    try:
        return auto_processor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=is_offline(path)
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"its processor cannot be loaded: {reason}") from error


def has_media(messages: Sequence[MessageLike]) -> bool:
    """Returns whether ``messages`` contain anything but text."""
    return any(
        isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES + _OTHER_TYPES
        for message in messages
        for part in _parts(message)
    )


def images_of(messages: Sequence[MessageLike]) -> list[MediaChunk]:
    """Returns the images of resolved messages, in order."""
    return [part.chunk for message in messages for part in _parts(message) if isinstance(part, ImagePart)]


def _parts(message: MessageLike) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _OTHER_TYPES:
        raise ConfigError(f"a message contains a part of type {kind!r}; only text and images are supported")
    return kind in _IMAGE_TYPES


def _content(part: Mapping[str, Any]) -> bytes:
    """Returns the encoded image of a message part."""
    key = next((key for key in _SOURCE_KEYS if part.get(key) is not None), None)
    source = part.get(key) if key is not None else None
    if isinstance(source, Mapping):
        source = source.get("url")
    if key is None or not isinstance(source, str):
        raise ValueError(f"an image needs one of {', '.join(_SOURCE_KEYS)} as text; got keys {sorted(part)}")
    if key == "base64":
        return _decoded(source)
    if source.startswith("data:"):
        header, comma, data = source.partition(",")
        if not comma or not header.endswith(";base64"):
            raise ValueError("an image's data URL must be data:image/...;base64,...")
        return _decoded(data)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
        raise ValueError(f"images are not downloaded ({source[:80]!r}): use a data URL or a local file")
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"image file {source[:200]!r} cannot be read: {error.strerror}") from error


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image is not valid base64: {error}") from error


def _opened(content: bytes) -> Any:
    """Opens an image the way processors load it from a file."""
    import PIL.Image
    import PIL.ImageOps

    try:
        return PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(content))).convert("RGB")
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"not a readable image: {error}") from error


def _probe_image(size: tuple[int, int]) -> Any:
    import PIL.Image

    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    return PIL.Image.fromarray(noise)


def _fields(chunk: MediaChunk) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in MediaChunk.model_fields}
