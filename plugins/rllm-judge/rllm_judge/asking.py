"""Asks a judge until a reply can be read, and caches the reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rllm_core.seeds import derive_seed
from rllm_core.types import MessageLike
from rllm_judge.cache import Replies
from rllm_judge.judges import Judge
from rllm_judge.options import JudgeOptions
from rllm_judge.reading import Unreadable

ReadT = TypeVar("ReadT")

logger = logging.getLogger(__name__)


class NoReadableReply(Exception):
    """None of the judge's replies to a question could be read."""


class Questions:
    """Asks a judge questions.

    Args:
        judge: The judge.
        options: The judge's options.

    Attributes:
        asked: Number of the judge's replies so far, without those from the cache.
        unreadable: Number of these replies that could not be read.
    """

    def __init__(self, judge: Judge, options: JudgeOptions) -> None:
        self.judge = judge
        self.asked = 0
        self.unreadable = 0
        self._options = options
        self._replies = Replies(options.cache_file)

    async def ask(self, messages: Sequence[MessageLike], read: Callable[[str], ReadT], *, seed: int) -> ReadT:
        """Repeats a question until a reply can be read.

        Args:
            messages: The question.
            read: Parses a reply, or raises `Unreadable`.
            seed: Seed of the first reply; seeds of later replies derive from it.

        Returns:
            The parsed reply.

        Raises:
            NoReadableReply: If no reply could be read.
            rllm_judge.judges.RejectedQuestion: If the question is too long.
        """
        last = ""
        for number in range(self._options.replies):
            drawn = derive_seed(seed, "reply", number)
            key = Replies.key(self.judge.name, self._options.temperature, drawn, [dict(one) for one in messages])
            kept = self._replies.get(key) if self.judge.name else None
            if kept is None:
                self.asked += 1
            reply = await self.judge.ask(messages, seed=drawn) if kept is None else kept
            try:
                said = read(reply)
            except Unreadable as problem:
                last = str(problem)
                self.unreadable += 1
                logger.debug("a reply of the judge cannot be read: %s: %r", problem, reply[:500])
                continue
            if kept is None and self.judge.name:
                self._replies.put(key, reply)
            return said
        raise NoReadableReply(
            f"none of {self._options.replies} replies of the judge can be read; in the last one, {last}"
        )

    async def close(self) -> None:
        """Closes the judge and the cache."""
        self._replies.close()
        await self.judge.close()
