"""``renderer``: uses the package ``renderers``, with one hand-written renderer per model family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_renderers.encoding import Encoder
from rllm_renderers.families import reject_vision, resolve_family
from rllm_renderers.formats import NoCalls, tool_format
from rllm_renderers.loading import load_tokenizer
from rllm_renderers.package import load_package
from rllm_renderers.package_format import PackageFormat
from rllm_renderers.template import FamilyTemplate
from rllm_renderers.text_parser import TextParser

FAMILY_KEY = "renderer_family"
"""Key of ``tokenizer_config.json`` that names a model's family."""


class RendererConfig(Section):
    """``[renderer]``: choice and settings of the renderer."""

    family: Annotated[
        str,
        Field(
            description="Model family, as named by the package. auto uses renderer_family of the model's "
            "tokenizer_config.json, or else the family whose output matches the model's chat template."
        ),
    ] = "auto"
    family_options: Annotated[
        dict[str, Any],
        Field(description="Options of the family, for example {enable_thinking = false}. Unknown options are errors."),
    ] = Field(default_factory=dict)
    thinking_retention: Annotated[
        Literal["all", "tool_cycle", "template"],
        Field(
            description="Reasoning to keep in the next prompt: all of it (all), that since the last user message "
            "(tool_cycle), or as the family's template decides (template). A turn that loses reasoning cannot be "
            "continued token for token."
        ),
    ] = "all"
    bridge: Annotated[
        bool,
        Field(
            description="Carry a conversation's sampled tokens into its next prompt where this is proven exact; an "
            "error if thinking_retention rules it out for the model. If false, every turn is rendered again."
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, Field(description="Run tokenizer code shipped with the model. Enable only for models you trust.")
    ] = False

    @field_validator("family_options")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for taken, instead in (("name", "renderer.family"), ("thinking_retention", "renderer.thinking_retention")):
            if taken in value:
                raise ValueError(f"{taken!r} must be set with {instead}")
        return value


class RendererParser(TextParser):
    """Renders with the package's renderer for the model's family; see `TextParser`.

    Calls in a format of `rllm_renderers.formats` are parsed with that format, others with the package's own parser.

    Args:
        tokenizer: A tokenizer, owned by the parser from now on.
        config: Settings from the run file.
        path: Model folder or Hugging Face model ID, for messages.

    Attributes:
        family: Name of the family in the package.
        family_options: Options that differ from the package's defaults.
        mismatch: First difference of the family from the model's own chat template; None if there is none.
        bridged_tails: Kinds of tail that are bridged.
    """

    name: ClassVar[str] = "renderer"
    template: FamilyTemplate

    def __init__(self, tokenizer: Any, config: RendererConfig | None = None, *, path: str = "") -> None:
        load_package()
        self.config = config or RendererConfig()
        options = dict(self.config.family_options)
        if self.config.thinking_retention != "template":
            options["thinking_retention"] = self.config.thinking_retention
        wanted = self.config.family
        if wanted == "auto":  # A changed template of the same family can be declared.
            wanted = str(getattr(tokenizer, "init_kwargs", {}).get(FAMILY_KEY) or wanted)
        resolved = resolve_family(wanted, path, tokenizer, Encoder(tokenizer), options)
        self.family = resolved.name
        self.family_options = dict(resolved.options)
        self.mismatch = resolved.mismatch
        found = tool_format(resolved.template)
        if isinstance(found, NoCalls):
            found = PackageFormat(resolved.template)
        retention = resolved.template.family.effective_thinking_retention
        super().__init__(resolved.template, found, bridge=self.config.bridge and retention != "template")
        if retention == "tool_cycle":
            self.bridged_tails = frozenset(tail for tail in self.bridged_tails if not tail.user)
            self.supports_bridge = bool(self.bridged_tails)
        if self.config.bridge and retention != "all" and not self.supports_bridge:
            raise ConfigError(
                f"family {self.family!r} of parser 'renderer' cannot continue conversations token for token with "
                f'renderer.thinking_retention = "{self.config.thinking_retention}"; choose another value, or set '
                "renderer.bridge = false to render every turn again"
            )

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> RendererParser:
        """Detects a model's family, and loads its tokenizer for this parser alone.

        Args:
            path: Model folder or Hugging Face model ID.
            config: Settings from the run file.

        Raises:
            ConfigError: If the package is missing or has another version, the model takes images, or its family is
                unknown or does not support the settings.
        """
        section = RendererConfig.model_validate({} if config is None else config)
        load_package()
        is_folder = bool(str(path)) and Path(path).expanduser().is_dir()
        if is_folder:
            reject_vision(str(path))
        tokenizer = load_tokenizer(str(path), trust_remote_code=section.trust_remote_code, parser=cls.name)
        if not is_folder:  # Loading the tokenizer first gives better errors for a wrong name.
            reject_vision(str(path))
        return cls(tokenizer, section, path=str(path))

    def describe(self) -> Mapping[str, Any]:
        """See `BaseParser.describe`; reports the family, and its difference from the model's own chat template."""
        compared = "renders the same" if self.mismatch is None else str(self.mismatch)
        if self.template.with_answers is not None:
            compared += "; so it renders conversations with answers, and the family only first prompts"
        return {
            "family": self.family,
            "family_options": self.family_options,
            "chat_template": compared if self.tokenizer.chat_template else "none in the model folder",
        }
