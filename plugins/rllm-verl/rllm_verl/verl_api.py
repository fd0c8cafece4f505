"""Which verl this works with, and where everything that is used of it stands: the one file a new version changes.

Nothing is imported before it is asked for: importing verl's workers takes many seconds.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from rllm_core.errors import ConfigError

SUPPORTED = SpecifierSet(">=0.9.1,<0.10")

# What is used of verl, by version. An earlier one lacks the platform plugins and the engine registry's override
# (before 0.9.0), or has a client that resumes aborted requests elsewhere (0.8.0) or not at all (0.7.1).
IMPORTS: dict[str, dict[str, str]] = {
    "0.9.1": {
        "ActorRolloutRefWorker": "verl.workers.engine_workers",
        "CheckpointEngineManager": "verl.checkpoint_engine",
        "DataProto": "verl",
        "Dispatch": "verl.single_controller.base.decorator",
        "FullyAsyncLLMServerClient": "verl.workers.rollout.llm_server",
        "LLMServerClient": "verl.workers.rollout.llm_server",
        "LLMServerManager": "verl.workers.rollout.llm_server",
        "RayClassWithInitArgs": "verl.single_controller.ray",
        "RayResourcePool": "verl.single_controller.ray",
        "RayWorkerGroup": "verl.single_controller.ray",
        "agg_loss": "verl.trainer.ppo.core_algos",
        "assign_non_tensor": "verl.utils.tensordict_utils",
        "get_non_tensor": "verl.utils.tensordict_utils:get",
        "get_seqlen_balanced_partitions": "verl.utils.seqlen_balancing",
        "left_right_2_no_padding": "verl.workers.utils.padding",
        "make_nd_compute_dataproto_dispatch_fn": "verl.single_controller.base.decorator",
        "no_padding_2_padding": "verl.workers.utils.padding",
        "omega_conf_to_dataclass": "verl.utils.config",
        "pop_non_tensor": "verl.utils.tensordict_utils:pop",
        "ppo_loss": "verl.workers.utils.losses",
        "register": "verl.single_controller.base.decorator",
        "register_policy_loss": "verl.trainer.ppo.core_algos",
    },
}
# Modules of Hydra configurations, and the configuration that a trainer begins with.
CONFIG_MODULE, CONFIG_NAME = "verl.trainer.config", "ppo_trainer"


# Ray reads these when it is imported, so they are set before: nothing is reported to its makers, and a cluster that is
# started here listens on the loopback interface only, and so do the servers on it.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
OWN_RAY_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# A cluster asks for a token unless it was told not to, and whoever joins shows it only if asked to.
JOINING_VARIABLES = {"RAY_AUTH_MODE": "token"}
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = ".ray/auth_token"


def prepare_ray(*, is_own: bool) -> None:
    """Set what Ray reads from the environment, where the user has not; to be called before anything imports it.

    Args:
        is_own: Whether the cluster is started for this run.
    """
    variables = dict(RAY_VARIABLES)
    if is_own:
        variables |= OWN_RAY_VARIABLES
    elif any(os.environ.get(name) for name in TOKEN_VARIABLES) or (Path.home() / TOKEN_FILE).is_file():
        variables |= JOINING_VARIABLES
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def installed_version() -> str:
    """The version of verl here, if it is one that this works with.

    Raises:
        ConfigError: If there is none, or another one; names both versions.
    """
    try:
        found = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "backend 'verl' needs verl, which is not installed here: pip install 'rllm-verl[gpu]' on a GPU machine, "
            "which brings vLLM and torch along"
        ) from None
    if not SUPPORTED.contains(found, prereleases=True):
        raise ConfigError(
            f"backend 'verl' works with verl {SUPPORTED}, and {found} is installed: pip install rllm-verl"
        )
    return found


def use(name: str) -> Any:
    """A class or function of verl by the name it goes by here; see ``IMPORTS``.

    Raises:
        ConfigError: If verl is missing, of another version, or lacks it.
    """
    version = installed_version()
    module, _, attribute = _places(version)[name].partition(":")
    try:
        return getattr(import_module(module), attribute or name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"verl {version} has no {module}.{attribute or name}, or it cannot be imported: {error}"
        ) from error


def _places(version: str) -> dict[str, str]:
    """Where things stand in ``version``: those of the newest known one that is not newer."""
    from packaging.version import Version

    known = sorted((Version(name), name) for name in IMPORTS if Version(name) <= Version(version))
    return IMPORTS[known[-1][1]]
