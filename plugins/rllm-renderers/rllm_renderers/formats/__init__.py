"""Formats of tool calls by family."""

from __future__ import annotations

from rllm_renderers.formats.deepseek import DeepSeek
from rllm_renderers.formats.glm import Glm
from rllm_renderers.formats.harmony import Harmony
from rllm_renderers.formats.hermes import Hermes
from rllm_renderers.formats.llama import Llama
from rllm_renderers.formats.mistral import Mistral
from rllm_renderers.formats.qwen_xml import QwenXml
from rllm_renderers.formats.tool_format import NoCalls, Schemas, ToolFormat, schemas_of

__all__ = ["FORMATS", "NoCalls", "Schemas", "ToolFormat", "schemas_of"]

# Those with unmistakable marks first.
FORMATS: dict[str, ToolFormat] = {
    known.name: known for known in (QwenXml(), Glm(), Hermes(), DeepSeek(), Mistral(), Harmony(), Llama())
}
