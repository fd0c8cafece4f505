"""Classes of the provider records."""

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.backend import Capabilities
from rllm_core.config import Section
from rllm_devkit.scripted import ScriptedBackend


class AbleConfig(Section):
    images: bool = True


class NeedyConfig(Section):
    url: str


class Able(ScriptedBackend):
    @classmethod
    def capabilities(cls, config):
        return Capabilities(
            torch_losses=True,
            aggregations=AGGREGATIONS,
            policies=frozenset({"current", "proximal", "reference"}),
            kl_loss=True,
            vision=config.plugins["able"].images,
        )


class Fails(ScriptedBackend):
    @classmethod
    def capabilities(cls, config):
        return Capabilities(vision=1 / 0)
