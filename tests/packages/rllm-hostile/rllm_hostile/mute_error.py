"""Raises something that cannot say what it is."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


raise Mute
