"""Raises an exception that cannot be formatted."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


raise Mute
