"""Records that provider hooks return: a name, the path of the code, and a summary. They import nothing else.

A record names its class by a dotted path (``"rllm_local.backend:LocalBackend"``). The class is imported when it is
selected, never when it is listed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from rllm_core.moved import moved_names

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
PATH_PATTERN = re.compile(r"([A-Za-z_][\w.]*|/.*\.py):[A-Za-z_][\w.]*")
FILE_MODULES = "rllm_file_"
COMMAND_GROUPS = ("parser", "plugins")


def resolve(path: str) -> Any:
    """Imports and returns the object at a path, or the module itself.

    Args:
        path: ``"package.module:Name"``, or ``"/folder/file.py:Name"`` for a file of the user.
    """
    file, separator, attributes = path.rpartition(".py")
    with _garbage_kept():
        if separator and attributes[:1] in ("", ":"):
            found: Any = _module_of(f"{file}.py")
            attributes = attributes[1:]
        else:
            module_name, _, attributes = path.partition(":")
            found = importlib.import_module(module_name)
        for attribute in filter(None, attributes.split(".")):  # which some modules import only now
            found = getattr(found, attribute)
    return found


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pauses garbage collection: it finds nothing in an import of torch, and takes a sixth of its time."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def module_name_of(file: str) -> str:
    """Returns the module name for a file: an unusual one, so that no import finds it by accident."""
    import hashlib  # imported here: only files need it, and listing providers should stay fast

    return f"{FILE_MODULES}{hashlib.sha256(file.encode()).hexdigest()[:16]}"


def forget_files() -> None:
    """Lets the user's files be loaded again: they may be edited while a notebook keeps running."""
    for name in [name for name in sys.modules if name.startswith(FILE_MODULES)]:
        del sys.modules[name]


def _module_of(file: str) -> ModuleType:
    """Loads a file as a module, once."""
    name = module_name_of(file)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be loaded as Python")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Base class of provider records.

    The class attribute ``kind`` names the kind of provider in errors; ``hook`` is the hook that returns such records.
    ``contract`` is the dotted path of the class that the provider's class must extend; "" allows any function.

    Attributes:
        name: Name by which users select it: lower-case letters, digits, ``_``, ``-`` and ``.``.
        load: Dotted path of the class or function, ``"package.module:Name"``.
        summary: One line for listings.
        config: Dotted path of the pydantic model for the section ``[name]`` of the run file. Backends, engines,
            parsers, workflows, rollout hosts and trackers can have one. A class that declares ``config_model`` must
            declare the same model.
    """

    kind: ClassVar[str] = "provider"
    hook: ClassVar[str] = ""
    contract: ClassVar[str] = ""
    name_pattern: ClassVar[re.Pattern[str]] = NAME_PATTERN

    name: str
    load: str
    summary: str
    config: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name_pattern.fullmatch(self.name):
            raise ValueError(f"{self.kind} name {self.name!r} must match {self.name_pattern.pattern}")
        for path in (self.load, self.config):
            if path is not None and (not isinstance(path, str) or not PATH_PATTERN.fullmatch(path)):
                raise ValueError(f"{self.kind} {self.name!r}: {path!r} is not of the form 'package.module:Name'")
        if not isinstance(self.summary, str) or not self.summary.isprintable():
            raise ValueError(f"{self.kind} {self.name!r}: its summary must be one line of printable text")


@dataclass(frozen=True, kw_only=True)
class BackendProvider(Provider):
    """A training backend (`rllm_core.backend.BackendProtocol`).

    Attributes:
        parsers: Names of the parsers that the backend works with. Empty means any.
        default_parser: Parser to use if the run file names none.
        export: Dotted path of a function ``export(checkpoint: Path, config: RunConfig, target: Path) -> None`` for
            ``rllm-core export-model``, see `rllm_core.backend`. None if the checkpoints cannot be exported.
    """

    kind: ClassVar[str] = "backend"
    hook: ClassVar[str] = "backends"
    contract: ClassVar[str] = "rllm_core.backend:BackendProtocol"

    parsers: tuple[str, ...] = ()
    default_parser: str | None = None
    export: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineProvider(Provider):
    """A rollout engine (`rllm_core.engine.RolloutEngine`) that ``eval`` can use without a backend."""

    kind: ClassVar[str] = "engine"
    hook: ClassVar[str] = "rollout_engines"
    contract: ClassVar[str] = "rllm_core.engine:RolloutEngine"


@dataclass(frozen=True, kw_only=True)
class ParserProvider(Provider):
    """A parser (`rllm_core.parser.BaseParser`)."""

    kind: ClassVar[str] = "parser"
    hook: ClassVar[str] = "parsers"
    contract: ClassVar[str] = "rllm_core.parser:BaseParser"


@dataclass(frozen=True, kw_only=True)
class WorkflowProvider(Provider):
    """A workflow (`rllm_core.workflow.Workflow`).

    Attributes:
        run_file: Dotted path of a function that returns the tables of a run file known to work for this workflow
            (``{"training": {"steps": 400}, ...}``), or a `rllm_core.run_file.Preset` with them. The user's own run
            file and ``-o`` override them. If the function has a parameter, it gets the tables that the user gave, such
            as ``{"model": {"path": "..."}}``.
        variants: Dotted path of a function that returns the names of its environments, ``() -> Sequence[str]``.
            ``NAME/VARIANT`` then selects this workflow, and sets ``environment = "VARIANT"`` in its section. The
            function is called for such a name and for completion, never to list workflows.
        blocks: Whether ``run`` may block for long, for example with computations or calls that are not async. Rollouts
            then run in workers, unless ``rollout.host`` names another host.
        global_state: Whether ``run`` changes the state of its process, such as the seed of Python's ``random``. Each
            rollout then has its own worker while it runs.
        waits_for_others: Whether ``run`` waits for anything that is not fast, such as an agent with a connection of
            its own. Then a deterministic engine does not wait for all rollouts before it samples, and metrics are not
            byte-identical between runs.
    """

    kind: ClassVar[str] = "workflow"
    hook: ClassVar[str] = "workflows"
    contract: ClassVar[str] = "rllm_core.workflow:Workflow"

    run_file: str | None = None
    variants: str | None = None
    blocks: bool = False
    global_state: bool = False
    waits_for_others: bool = False


@dataclass(frozen=True, kw_only=True)
class RolloutHostProvider(Provider):
    """A rollout host (`rllm_core.hosts.contract.RolloutHost`)."""

    kind: ClassVar[str] = "rollout host"
    hook: ClassVar[str] = "rollout_hosts"
    contract: ClassVar[str] = "rllm_core.hosts.contract:RolloutHost"


@dataclass(frozen=True, kw_only=True)
class TrackerProvider(Provider):
    """A metrics tracker (`rllm_core.tracker.Tracker`)."""

    kind: ClassVar[str] = "tracker"
    hook: ClassVar[str] = "trackers"
    contract: ClassVar[str] = "rllm_core.tracker:Tracker"


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimatorProvider(Provider):
    """An advantage estimator (`rllm_core.algorithms.advantages.AdvantageEstimator`)."""

    kind: ClassVar[str] = "advantage estimator"
    hook: ClassVar[str] = "advantage_estimators"
    contract: ClassVar[str] = "rllm_core.algorithms.advantages:AdvantageEstimator"


@dataclass(frozen=True, kw_only=True)
class PolicyLossProvider(Provider):
    """A policy loss in torch (`rllm_core.algorithms.torch_losses.PolicyLoss`), for backends that run torch losses.

    Attributes:
        learns_written: Whether the loss is for target tokens (SFT), which have no sampling log-probabilities.
    """

    kind: ClassVar[str] = "policy loss"
    hook: ClassVar[str] = "policy_losses"
    contract: ClassVar[str] = "rllm_core.algorithms.torch_losses:PolicyLoss"

    learns_written: bool = False


@dataclass(frozen=True, kw_only=True)
class CorrectionProvider(Provider):
    """An off-policy correction (`rllm_core.algorithms.corrections.Correction`)."""

    kind: ClassVar[str] = "correction"
    hook: ClassVar[str] = "corrections"
    contract: ClassVar[str] = "rllm_core.algorithms.corrections:Correction"


@dataclass(frozen=True, kw_only=True)
class GroupScorerProvider(Provider):
    """A group scorer (`rllm_core.algorithms.group_scorer.GroupScorer`)."""

    kind: ClassVar[str] = "group scorer"
    hook: ClassVar[str] = "group_scorers"
    contract: ClassVar[str] = "rllm_core.algorithms.group_scorer:GroupScorer"


@dataclass(frozen=True, kw_only=True)
class TaskSamplerProvider(Provider):
    """A task sampler (`rllm_core.algorithms.task_sampler.TaskSampler`)."""

    kind: ClassVar[str] = "task sampler"
    hook: ClassVar[str] = "task_samplers"
    contract: ClassVar[str] = "rllm_core.algorithms.task_sampler:TaskSampler"


@dataclass(frozen=True, kw_only=True)
class RewardFunctionProvider(Provider):
    """A reward function ``(task, text) -> float`` that workflows look up by name. It runs in a child process.

    Attributes:
        variables: Names of environment variables that the function's process gets in addition to the few that every
            child gets, such as the key of a service that the function calls.
        processes: Maximum number of processes for the function, each with one call at a time; other calls wait. A
            function that waits for a service needs more than one that computes.
    """

    kind: ClassVar[str] = "reward function"
    hook: ClassVar[str] = "reward_functions"

    variables: tuple[str, ...] = ()
    processes: int = 4


@dataclass(frozen=True, kw_only=True)
class SandboxProvider(Provider):
    """A sandbox for model-written programs (`rllm_core.sandbox.Sandbox`)."""

    kind: ClassVar[str] = "sandbox"
    hook: ClassVar[str] = "sandboxes"
    contract: ClassVar[str] = "rllm_core.sandbox:Sandbox"


@dataclass(frozen=True, kw_only=True)
class CommandProvider(Provider):
    """A command of the ``rllm-core`` command line: a `click.Command`.

    A name of two words adds it to one of the core's groups, `COMMAND_GROUPS`: ``"plugins check"`` is called as
    ``rllm-core plugins check``.
    """

    kind: ClassVar[str] = "command"
    hook: ClassVar[str] = "cli_commands"
    contract: ClassVar[str] = "click:Command"
    name_pattern: ClassVar[re.Pattern[str]] = re.compile(f"(({'|'.join(COMMAND_GROUPS)}) )?{NAME_PATTERN.pattern}")


KINDS: tuple[type[Provider], ...] = (
    BackendProvider,
    EngineProvider,
    ParserProvider,
    WorkflowProvider,
    RolloutHostProvider,
    TrackerProvider,
    AdvantageEstimatorProvider,
    PolicyLossProvider,
    CorrectionProvider,
    GroupScorerProvider,
    TaskSamplerProvider,
    RewardFunctionProvider,
    SandboxProvider,
    CommandProvider,
)


__getattr__ = moved_names(__name__)
