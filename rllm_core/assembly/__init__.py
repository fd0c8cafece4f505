"""Turns a run file into the parts of a run."""
