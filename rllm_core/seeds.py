"""Seeds: every random choice of a run is derived from the run's seed."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in ``[0, 2**63)`` that depends on the values, types and order of all parts (run, task, ...)."""
    named = repr([part if isinstance(part, str) else int(part) for part in parts])
    digest = blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
