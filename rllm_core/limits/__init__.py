"""What ends a run reliably, whatever plugins do: timeouts, the guard, and the event loop that stops the rest."""
