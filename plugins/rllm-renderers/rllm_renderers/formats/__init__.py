"""Tool-call formats by model family."""

from __future__ import annotations

from rllm_renderers.formats.detection import FORMATS, tool_format
from rllm_renderers.formats.tool_format import NoCalls, Schemas, ToolFormat, schemas_of

__all__ = ["FORMATS", "NoCalls", "Schemas", "ToolFormat", "schemas_of", "tool_format"]
