"""Parsers, which convert messages to token ids and completions back, and sessions, which keep conversations exact."""

from rllm_core.parser.appended import Appended
from rllm_core.parser.base import BaseParser
from rllm_core.parser.completion import ParsedCompletion, ParsedToolCall, Termination
from rllm_core.parser.contract import MaskMethod, ToolSpec
from rllm_core.parser.segments import BreakReason, SegmentBreak, SessionStats, TokenSegment, Turn
from rllm_core.parser.session import ParserSession
from rllm_core.parser.supervised import MaskedTokens
from rllm_core.parser.vocabulary import Vocabulary

__all__ = [
    "Appended",
    "BaseParser",
    "BreakReason",
    "MaskMethod",
    "MaskedTokens",
    "ParsedCompletion",
    "ParsedToolCall",
    "ParserSession",
    "SegmentBreak",
    "SessionStats",
    "Termination",
    "TokenSegment",
    "ToolSpec",
    "Turn",
    "Vocabulary",
]
