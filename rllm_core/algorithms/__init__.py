"""Algorithms as pure functions on numpy arrays: advantages, grouping, filtering, training samples."""
