"""Parsers: messages to token ids and completions back to messages, and the sessions that keep conversations exact."""

from rllm_core.parser.contract import BaseParser, ParsedCompletion, ParsedToolCall, Termination, ToolSpec
from rllm_core.parser.session import BreakReason, ParserSession, SegmentBreak, SessionStats, TokenSegment, Turn

__all__ = [
    "BaseParser",
    "BreakReason",
    "ParsedCompletion",
    "ParsedToolCall",
    "ParserSession",
    "SegmentBreak",
    "SessionStats",
    "Termination",
    "TokenSegment",
    "ToolSpec",
    "Turn",
]
