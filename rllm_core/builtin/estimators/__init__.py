"""Advantage estimators that the core ships."""
