"""The proofs after a weight sync that the servers have the trainer's weights."""

from __future__ import annotations

from rllm_verl.canary import Canary
from rllm_verl.identity import Identity


class Proofs:
    """Runs both proofs at the first weight sync of a process, and then at every n-th.

    Args:
        identity: Compares tensors; None where they cannot be compared.
        canary: Compares log-probabilities.
        every: Weight syncs from one check to the next.
    """

    def __init__(self, identity: Identity | None, canary: Canary, every: int) -> None:
        self._identity = identity
        self._canary = canary
        self._every = every
        self._syncs = 0

    async def check(self, version: int) -> dict[str, float]:
        """Checks all servers, if it is this sync's turn.

        Returns:
            Metrics.

        Raises:
            RunError: If a server does not have the trainer's weights.
        """
        is_due = self._syncs % self._every == 0
        self._syncs += 1
        if not is_due:
            return {}
        metrics = {} if self._identity is None else await self._identity.check(version)
        return metrics | await self._canary.check(version)
