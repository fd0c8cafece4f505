"""Result of a bridge that stores only the tokens that it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_core.types import TokenIds, starts_with, token_ids


class Appended(Sequence[int]):
    """The tokens of two turns: ``prompt_ids + completion_ids``, then ``new_ids``. Joined only when read.

    A parser that returns this from `bridge_to_next_turn` cannot change the sampled tokens, so they need not be copied
    and compared, and turn 200 of a conversation costs as much as turn 5.

    Args:
        prompt_ids: ``(prompt_tokens,)`` as passed to the parser.
        completion_ids: ``(completion_tokens,)`` as passed to the parser.
        new_ids: ``(new_tokens,)`` tokens that follow, up to the next completion.
    """

    __slots__ = ("completion_ids", "new_ids", "prompt_ids")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_ids: Sequence[int] | TokenIds,
    ) -> None:
        self.prompt_ids, self.completion_ids, self.new_ids = prompt_ids, completion_ids, new_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids) + len(self.new_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.__array__()[index]

    def __eq__(self, other: object) -> bool:
        return np.array_equal(self.__array__(), np.asarray(other))

    def __array__(self, *_: object, **__: object) -> TokenIds:
        ids = np.concatenate([token_ids(part) for part in (self.prompt_ids, self.completion_ids, self.new_ids)])
        ids.setflags(write=False)
        return ids

    def tolist(self) -> list[int]:
        """Returns all ids as a list."""
        ids: list[int] = self.__array__().tolist()
        return ids


def ids_after(prompt_ids: TokenIds, completion_ids: TokenIds, ids: Appended | TokenIds) -> TokenIds | None:
    """Returns the part of ``ids`` after a prompt and its completion; None if ``ids`` do not start with these.

    Raises:
        ValueError: If a new id is not an integer between 0 and 2**31 - 1.
    """
    if isinstance(ids, Appended):
        if ids.prompt_ids is prompt_ids and ids.completion_ids is completion_ids:
            return token_ids(ids.new_ids)
        ids = ids.__array__()
    cut = len(prompt_ids)
    if starts_with(ids, prompt_ids) and starts_with(ids[cut:], completion_ids):
        return token_ids(ids[cut + len(completion_ids) :])
    return None
