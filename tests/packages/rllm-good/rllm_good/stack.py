"""Classes of the provider records."""

from rllm_core.testing.scripted import ScriptedBackend


class GoodBackend(ScriptedBackend):
    name = "good"


class PlainParser:
    pass


class Echo:
    pass
