"""The proofs after a weight sync that the servers have the trainer's weights."""

from __future__ import annotations

from rllm_verl.canary import Canary
from rllm_verl.identity import Identity

# First checks that compare log-probabilities: of the weights that a run starts from, and of the first trained ones. New
# adapters have no effect until they are trained, so the first check alone would say nothing about them.
FIRST_CHECKS = 2
# Default of verl.sync_numbers_every where equal tensors already show that a server got all that was sent. Sampling
# costs ten times as much, and then only tells whether the server computes with these tensors as it did before.
WHERE_ALL_IS_COMPARED = 8


class Proofs:
    """Runs the proofs at the first weight sync of a process, and then at every n-th.

    Args:
        identity: Compares tensors; None where they cannot be compared.
        canary: Compares log-probabilities.
        every: Weight syncs from one check to the next.
        numbers_every: Checks from one comparison of log-probabilities to the next; None for the default.
    """

    def __init__(self, identity: Identity | None, canary: Canary, every: int, numbers_every: int | None) -> None:
        self._identity = identity
        self._canary = canary
        self._every = every
        self._numbers_every = numbers_every
        self._syncs = 0
        self._checks = 0

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
        if self._checks < FIRST_CHECKS or self._checks % self._interval == 0:
            metrics |= await self._canary.check(version)
        self._checks += 1
        return metrics

    @property
    def _interval(self) -> int:
        if self._numbers_every is not None:
            return self._numbers_every
        return WHERE_ALL_IS_COMPARED if self._identity is not None and self._identity.compared_all else 1
