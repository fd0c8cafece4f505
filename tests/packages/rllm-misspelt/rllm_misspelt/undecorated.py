"""A hook without a decorator."""


def backends():
    return []
