"""Classes of the provider records."""

from rllm_devkit.scripted import ScriptedBackend


class GoodBackend(ScriptedBackend):
    name = "good"


class PlainParser:
    pass


class Echo:
    pass
