"""Observers that take too long, each in its own way."""
