"""Loads the environment that the run file selects, or explains in one line why it cannot be loaded."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rllm_core.errors import ConfigError, UserError
from rllm_core.text import printable
from rllm_verifiers.config import VerifiersConfig

HARNESS = "rllm_verifiers"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
# Chat loops of verifiers that start a program per rollout. Without a shell, our harness is the same loop.
REPLACED = ("bash", "null")
MAX_DETAIL = 300


def load_environment(config: VerifiersConfig) -> Any:
    """Returns the environment of the run file, as `verifiers.v1.Env`.

    Every agent gets our harness and verifiers' runtime ``subprocess``. verifiers' own defaults are a cloud, and a shell
    on this machine for the model.

    Raises:
        ConfigError: If the environment cannot be played here: it is not installed, needs a container, or a key or data
            that is missing, or an agent needs a program.
    """
    with explained(config.environment):
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import default_harness_id

        pairing = config.env_arguments.get("id", "")
        taskset = _importable(config.environment)
        kind = vf.env_config_type(taskset, pairing)
        default = default_harness_id(taskset)
        roles = {
            name: _seat(name, field.default, default, config.env_arguments.get(name, {}))
            for name, field in kind.model_fields.items()
            if isinstance(field.default, vf.AgentConfig)
        }
        environment = vf.load_environment(
            kind.model_validate(
                {
                    **config.env_arguments,
                    **roles,
                    "taskset": {**config.arguments, "id": taskset},
                    "interception": {"type": "server"},
                }
            )
        )
    _check_models(environment.config, roles)
    task = type(environment.taskset).task_type()
    if task.NEEDS_CONTAINER and any(seat["runtime"]["type"] == "subprocess" for seat in roles.values()):
        raise ConfigError(
            f"environment {config.environment!r} needs a container for every rollout: choose another, or set "
            f'[verifiers.env_arguments.{next(iter(roles))}.runtime] type = "docker"'
        )
    return environment


@contextmanager
def explained(environment: str) -> Iterator[None]:
    """Reduces an error in an environment's own code during loading to one line.

    Raises:
        ConfigError: In place of any other error.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # third-party code
        # verifiers reports a taskset as missing if anything it imports is missing.
        if isinstance(error.__cause__, ImportError):
            error = error.__cause__
        missing = isinstance(error, ImportError)
        what = (
            "install it, and what it needs, in the environment of the rollouts (rollout.python)"
            if missing
            else "its arguments may be wrong, or it needs data, a network, a key or a library that is not here"
        )
        said = printable(" ".join(str(error).split()))[:MAX_DETAIL]
        raise ConfigError(
            f"environment {environment!r} cannot be loaded: {type(error).__name__}: {said}; {what}"
        ) from error


def _importable(name: str) -> str:
    """Returns the id by which verifiers imports a taskset; makes the path of a user's taskset importable.

    Raises:
        ConfigError: If the file does not exist, or Python would import another module under its name.
    """
    if not name.endswith(".py") and not name.startswith(("./", "../", "/", "~")):
        return name
    path = Path(name).expanduser().resolve()
    # verifiers' own environments are folders with a module or a package of the same name.
    inner = [path / f"{path.name}.py", path / path.name / "__init__.py"]
    file = next((one for one in [path / "__init__.py", *inner] if one.is_file()), path)
    if not file.is_file():
        raise ConfigError(
            f"there is no taskset at {path}: name a Python file, or a folder with __init__.py or {path.name}.py"
        )
    module = file.parent if file.name == "__init__.py" else file.with_suffix("")
    if module.name != module.name.lower().replace("-", "_") or not module.name.isidentifier():
        raise ConfigError(
            f"verifiers cannot import a taskset named {module.name!r}: name it in lower-case letters, digits and _"
        )
    folder = str(module.parent)
    if folder not in sys.path:
        sys.path.append(folder)
        # Tool servers are separate programs, which import the taskset, too.
        paths = [one for one in (os.environ.get("PYTHONPATH"), folder) if one]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for imported in (f"verifiers.v1.tasksets.{module.name}", module.name):
        spec = importlib.util.find_spec(imported)
        if spec is not None and Path(spec.origin or "").resolve() != file:
            raise ConfigError(
                f"{file} cannot be loaded, because Python imports {spec.origin} by the name {module.name!r}: rename it"
            )
    return module.name


def _seat(role: str, declared: Any, default: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one agent's settings: the user's, our harness, and this machine's runtime.

    Raises:
        ConfigError: If the agent needs a program.
    """
    from verifiers.v1.utils.loaders import harness_class

    seat = dict(given)
    if "harness" not in seat:
        own = default if declared.harness is None else declared.harness.id
        is_pinned = declared.harness is not None
        if own == "null" or (own in REPLACED and not is_pinned):
            seat["harness"] = {"id": HARNESS}
        else:
            harness = harness_class(own)
            if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
                raise ConfigError(
                    f"agent {role!r} is played by the program {own!r}, which executes what the model writes: set "
                    f'[verifiers.env_arguments.{role}.harness] id = "{HARNESS}" for a plain conversation with tools, '
                    "or choose another environment"
                )
    seat.setdefault("runtime", {"type": "subprocess"})
    return seat


def _check_models(config: Any, roles: Mapping[str, Any]) -> None:
    """Rejects models other than the policy that cannot be reached.

    Raises:
        ConfigError: If an agent or a judge needs a key that is not set, or an agent asks for a model by name only.
    """
    for role in roles:
        spec = getattr(config, role)
        if spec.model is not None and spec.client is None:
            raise ConfigError(
                f"agent {role!r} needs model {spec.model!r}, but a run has only its own model: set the address in "
                f"[verifiers.env_arguments.{role}.client], or choose another environment"
            )
    for place, client in _clients(config, "env"):
        from verifiers.v1.configs.client import resolve_api_key

        if resolve_api_key(client) == "EMPTY" and urlparse(client.base_url).hostname not in LOCAL_HOSTS:
            raise ConfigError(
                f"{place} calls a model at {printable(client.base_url)}, which needs a key: set {client.api_key_var}, "
                "or choose an environment without it"
            )


def _clients(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yields the client configs within a config, with their places."""
    from pydantic import BaseModel
    from verifiers.v1.configs.client import BaseClientConfig

    if isinstance(value, BaseClientConfig):
        yield place, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _clients(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _clients(one, f"{place}[{number}]")
