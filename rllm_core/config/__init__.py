"""Keys of the run file: their types, defaults and descriptions, and checks of values that must fit each other.

`rllm_core.assembly.resolution` reads run files.
"""

from rllm_core.config.algorithm import AlgorithmConfig, KLConfig, OverlongConfig, RoleConfig
from rllm_core.config.costs import BudgetConfig, CostsConfig, PricesConfig
from rllm_core.config.model import ModelConfig, TeacherConfig
from rllm_core.config.optimizer import OptimizerConfig
from rllm_core.config.run import RunConfig
from rllm_core.config.training import RolloutConfig, TrainingConfig
from rllm_core.errors import ConfigError
from rllm_core.moved import moved_names
from rllm_core.run_file import Section, to_toml

__all__ = [
    "AlgorithmConfig",
    "BudgetConfig",
    "ConfigError",
    "CostsConfig",
    "KLConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PricesConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TeacherConfig",
    "TrainingConfig",
    "to_toml",
]

__getattr__ = moved_names(__name__)
