"""The class of the provider record."""

from rllm_devkit.scripted import ScriptedBackend


class Stack(ScriptedBackend):
    name = "good"
