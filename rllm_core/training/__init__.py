"""The one training loop and what it keeps: coordinator, buffer, books, journal, checkpoints, metrics."""
