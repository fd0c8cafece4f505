"""Results of a parser's session: turns, segments and counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from rllm_core.types import PlacedMedia, TokenIds


class BreakReason(StrEnum):
    """Why a conversation could not continue in the same token sequence."""

    HISTORY_EDITED = "history_edited"
    TOOLS_CHANGED = "tools_changed"
    BRIDGE_NONE = "bridge_none"
    PREFIX_MISMATCH = "prefix_mismatch"
    ASSISTANT_INSERTED = "assistant_inserted"
    TOKENS_AFTER_STOP = "tokens_after_stop"
    SHRUNK = "shrunk"


class SegmentBreak(RuntimeError):
    """A conversation left its token sequence in a session that does not allow it (``on_break="raise"``)."""

    def __init__(self, reason: BreakReason) -> None:
        super().__init__(f"the conversation cannot continue token for token: {reason.value}")
        self.reason = reason


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """The prompt of one turn.

    Attributes:
        prompt_ids: ``(prompt_tokens,)`` as a read-only view.
        segment: Number of the unbroken sequence that the turn belongs to.
        break_reason: Why this turn started a new segment, if it did.
        media: Media in the prompt, such as images, in order.
        control_tokens: How often new text in this turn spells a control token.
    """

    prompt_ids: TokenIds
    segment: int
    break_reason: BreakReason | None
    media: tuple[PlacedMedia, ...] = ()
    control_tokens: int = 0


@dataclass(frozen=True, eq=False)
class TokenSegment:
    """One unbroken token sequence of a conversation, up to its last recorded completion.

    Attributes:
        token_ids: ``(tokens,)`` as a read-only view.
        completion_spans: ``(turns, 2)`` start and stop of each sampled completion.
    """

    token_ids: TokenIds
    completion_spans: tuple[tuple[int, int], ...]

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """``(tokens,)`` True exactly on sampled tokens."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, stop in self.completion_spans:
            mask[start:stop] = True
        return mask


_NO_BREAKS: Counter[BreakReason] = Counter()  # shared: `SessionStats.count_break` replaces it


@dataclass(slots=True)
class SessionStats:
    """Counters of a session.

    Attributes:
        turns: Recorded completions.
        bridge_attempts: Calls of the parser's bridge.
        bridged: Successful bridges, whose prefix was unchanged.
        rendered: Prompts rendered from scratch.
        breaks: New segments after the first, by reason.
        control_tokens: How often text from users and tools spelled a control token.
        prompt_seconds: Time spent on rendering and bridging.
    """

    turns: int = 0
    bridge_attempts: int = 0
    bridged: int = 0
    rendered: int = 0
    breaks: Counter[BreakReason] = field(default_factory=lambda: _NO_BREAKS)
    control_tokens: int = 0
    prompt_seconds: float = 0.0

    def count_break(self, reason: BreakReason) -> None:
        """Counts a break, without changing copies."""
        self.breaks = self.breaks + Counter((reason,))

    def copy(self) -> SessionStats:
        """Returns the counters as they are now; `dataclasses.replace` takes several times as long."""
        return SessionStats(
            self.turns,
            self.bridge_attempts,
            self.bridged,
            self.rendered,
            self.breaks,
            self.control_tokens,
            self.prompt_seconds,
        )
