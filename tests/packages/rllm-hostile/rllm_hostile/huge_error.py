"""Raises with ten megabytes of text."""

raise RuntimeError("x" * 10_000_000)
