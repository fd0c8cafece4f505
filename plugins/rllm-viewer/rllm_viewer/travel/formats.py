"""All formats, by name."""

from __future__ import annotations

from collections.abc import Mapping

from rllm_viewer.travel import atif, hugging_face, inspect_log, openai_chat, sft, verifiers_traces
from rllm_viewer.travel.contract import Format

FORMATS: Mapping[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (sft, openai_chat, hugging_face, atif, verifiers_traces, inspect_log)
}
