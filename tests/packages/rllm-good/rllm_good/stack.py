"""What the records point at."""

from rllm_core.testing.scripted import ScriptedBackend


class GoodBackend(ScriptedBackend):
    name = "good"


class PlainParser:
    pass


class Echo:
    pass
