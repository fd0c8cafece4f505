"""Stands in for torch, so that the test needs none."""
