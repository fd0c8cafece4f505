"""Stands in for torch, so that the test does not need it."""
