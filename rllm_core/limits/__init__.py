"""Ends a run reliably, whatever plugins do: timeouts, the guard, and an event loop that stops everything left."""
