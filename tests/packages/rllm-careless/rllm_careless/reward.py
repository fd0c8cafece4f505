"""The reward function."""


def score(task, text):
    return float(bool(text))
