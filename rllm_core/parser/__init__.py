"""Parsers, which convert messages to token ids and completions back, and sessions, which keep conversations exact."""

from rllm_core.parser.contract import BaseParser, MaskMethod, ParsedCompletion, ParsedToolCall, Termination, ToolSpec
from rllm_core.parser.session import BreakReason, ParserSession, SegmentBreak, SessionStats, TokenSegment, Turn
from rllm_core.parser.supervised import MaskedTokens
from rllm_core.parser.vocabulary import Vocabulary

__all__ = [
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
