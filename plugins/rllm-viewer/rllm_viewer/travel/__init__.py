"""Exports recorded rollouts in other tools' formats, and imports such files as run folders.

`formats` lists the formats, each in its own module; `selection` chooses rollouts, `fields` counts losses.
"""
