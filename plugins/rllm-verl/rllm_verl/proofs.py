"""Proves after a weight sync that the servers have the trainer's weights."""

from __future__ import annotations

from rllm_verl.canary import TOKENS, TOKENS_AFTER_PROOF, Canary
from rllm_verl.identity import Identity

# First checks that compare log-probabilities: with the initial weights, and with the first trained ones. New adapters
# have no effect until they are trained, so the first check alone would prove nothing about them.
FIRST_CHECKS = 2
# Default of verl.sync_numbers_every where equal tensors already prove that a server received everything. Sampling costs
# ten times as much, and then only shows whether the server computes with these tensors as it did before.
WHERE_ALL_IS_COMPARED = 8


class Proofs:
    """Runs the proofs at the first weight sync of a process, and then at every n-th sync.

    Args:
        identity: Compares tensors; None where they cannot be compared.
        canary: Compares log-probabilities.
        every: Number of weight syncs from one check to the next.
        numbers_every: Number of checks from one comparison of log-probabilities to the next; None for the default.
    """

    def __init__(self, identity: Identity | None, canary: Canary, every: int, numbers_every: int | None) -> None:
        self._identity = identity
        self._canary = canary
        self._every = every
        self._numbers_every = numbers_every
        self._syncs = 0

    async def check(self, version: int) -> dict[str, float]:
        """Checks all servers, if a check is due at this sync.

        Returns:
            Metrics.

        Raises:
            RunError: If a server does not have the trainer's weights.
        """
        checks, since = divmod(self._syncs, self._every)
        self._syncs += 1
        if since:
            return {}
        metrics = {} if self._identity is None else await self._identity.check(version)
        is_proved = self._identity is not None and self._identity.compared_all
        interval = self._numbers_every or (WHERE_ALL_IS_COMPARED if is_proved else 1)
        if checks < FIRST_CHECKS:
            metrics |= await self._canary.check(version, TOKENS)
        elif checks % interval == 0:
            metrics |= await self._canary.check(version, TOKENS_AFTER_PROOF if is_proved else TOKENS)
        return metrics
