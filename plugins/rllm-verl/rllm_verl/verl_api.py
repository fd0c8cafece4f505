"""Supported versions of verl, and the import path of everything used from it: the only file to change for a new verl.

Names are imported on first use, because importing verl's workers takes many seconds.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from rllm_core.errors import ConfigError
from rllm_core.providers import resolve

SUPPORTED = SpecifierSet(">=0.9.1,<0.10")
# Where TRL is installed, verl's FSDP trainers import its AutoModelForCausalLMWithValueHead, which TRL 1.13 removed.
TRL_WITH_VALUE_HEAD = SpecifierSet("<1.13")

# Names used from verl, by version. Versions before 0.9.0 lack the platform plugins and the engine registry's override.
# The client that resumes aborted requests is in another module in 0.8.0, and missing in 0.7.1.
IMPORTS: dict[str, dict[str, str]] = {
    "0.9.1": {
        "ActorRolloutRefWorker": "verl.workers.engine_workers",
        "CheckpointEngineManager": "verl.checkpoint_engine",
        "DataProto": "verl",
        "Dispatch": "verl.single_controller.base.decorator",
        "FullyAsyncLLMServerClient": "verl.workers.rollout.llm_server",
        "GlobalRequestLoadBalancer": "verl.workers.rollout.router",
        "LLMServerClient": "verl.workers.rollout.llm_server",
        "LLMServerManager": "verl.workers.rollout.llm_server",
        "RayClassWithInitArgs": "verl.single_controller.ray",
        "RayResourcePool": "verl.single_controller.ray",
        "RayWorkerGroup": "verl.single_controller.ray",
        "VLLM_LORA_INT_ID": "verl.workers.rollout.vllm_rollout.utils",
        "agg_loss": "verl.trainer.ppo.core_algos",
        "assign_non_tensor": "verl.utils.tensordict_utils",
        "collect_lora_params": "verl.utils.fsdp_utils",
        "entropy_from_logits_with_chunking": "verl.utils.torch_functional",
        "get_hf_auto_model_class": "verl.utils.model",
        "get_non_tensor": "verl.utils.tensordict_utils:get",
        "get_seqlen_balanced_partitions": "verl.utils.seqlen_balancing",
        "kl_penalty": "verl.workers.utils.losses",
        "left_right_2_no_padding": "verl.workers.utils.padding",
        "make_nd_compute_dataproto_dispatch_fn": "verl.single_controller.base.decorator",
        "no_padding_2_padding": "verl.workers.utils.padding",
        "omega_conf_to_dataclass": "verl.utils.config",
        "pop_non_tensor": "verl.utils.tensordict_utils:pop",
        "ppo_loss": "verl.workers.utils.losses",
        "register": "verl.single_controller.base.decorator",
        "register_policy_loss": "verl.trainer.ppo.core_algos",
        "vLLMColocateWorkerExtension": "verl.workers.rollout.vllm_rollout.utils",
        "vLLMHttpServer": "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "vLLMReplica": "verl.workers.rollout.vllm_rollout.vllm_async_server",
    },
}
# Module of verl's Hydra configurations, and the base configuration of its trainer.
CONFIG_MODULE, CONFIG_NAME = "verl.trainer.config", "ppo_trainer"


# Ray reads these at import time. They disable usage reports to Ray's developers, and make a cluster started here, with
# its servers, listen on the loopback interface only. Without the last one, Ray also starts a worker per CPU in advance,
# which lacks the variables of `rllm_verl.cluster.worker_environment`, so that no actor of a run can use it.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
OWN_RAY_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_prestart_worker_first_driver": "0"}
# By default, a cluster requires a token, but a driver that joins sends it only with this setting.
JOINING_VARIABLES = {"RAY_AUTH_MODE": "token"}
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = ".ray/auth_token"


def prepare_ray(*, is_own: bool) -> None:
    """Sets Ray's environment variables that the user has not set; call it before anything imports Ray.

    Args:
        is_own: Whether this run starts its own cluster.
    """
    variables = dict(RAY_VARIABLES)
    if is_own:
        variables |= OWN_RAY_VARIABLES
    elif any(os.environ.get(name) for name in TOKEN_VARIABLES) or (Path.home() / TOKEN_FILE).is_file():
        variables |= JOINING_VARIABLES
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def installed_version() -> str:
    """Returns the installed version of verl, if it is supported.

    Raises:
        ConfigError: If verl is missing or has an unsupported version; the message names both versions.
    """
    try:
        found = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "backend 'verl' needs verl, which is not installed here: pip install 'rllm-verl[gpu]' on a GPU machine, "
            "which also installs vLLM and torch"
        ) from None
    if not SUPPORTED.contains(found, prereleases=True):
        raise ConfigError(
            f"backend 'verl' works with verl {SUPPORTED}, and {found} is installed: pip install rllm-verl"
        )
    return found


def check_trl() -> None:
    """Checks that verl's trainers can start beside the installed TRL, which they import if there is one.

    Raises:
        ConfigError: If TRL is installed in a version without the class that verl imports.
    """
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return
    if not TRL_WITH_VALUE_HEAD.contains(found, prereleases=True):
        raise ConfigError(
            f"trl {found} is installed, and the trainers of verl {installed_version()} import a class from it that "
            f"exists in trl{TRL_WITH_VALUE_HEAD} only: pip uninstall trl, or use an environment without it"
        )


@cache  # reading the version of a package takes milliseconds, and some names are used several times per step
def use(name: str) -> Any:
    """Imports a class or function of verl by its name in ``IMPORTS``.

    Raises:
        ConfigError: If verl is missing, has an unsupported version, or lacks the name.
    """
    version = installed_version()
    module, _, attribute = _places(version)[name].partition(":")
    try:
        return resolve(f"{module}:{attribute or name}")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"verl {version} has no {module}.{attribute or name}, or it cannot be imported: {error}"
        ) from error


def replace(name: str, function: Any) -> None:
    """Replaces a function of verl in the module that ``IMPORTS`` names, where verl looks it up with every call.

    Raises:
        ConfigError: If verl lacks the name there.
    """
    use(name)
    module = _places(installed_version())[name].partition(":")[0]
    setattr(sys.modules[module], name, function)


def _places(version: str) -> dict[str, str]:
    """Returns the import paths for ``version``: those of the latest known version that is not newer."""
    from packaging.version import Version

    known = sorted((Version(name), name) for name in IMPORTS if Version(name) <= Version(version))
    return IMPORTS[known[-1][1]]
