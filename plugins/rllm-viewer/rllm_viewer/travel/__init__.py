"""Recorded rollouts in the formats of others, and theirs as run folders.

`formats` lists the formats, each with a module of its own; `selection` chooses rollouts, `fields` counts what is lost.
"""
