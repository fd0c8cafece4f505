"""Observers that take too long, each in a different way."""
