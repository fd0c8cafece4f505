"""Parts of a run: selects the providers that a run file names, and checks that they fit, before allocating anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rllm_core import providers
from rllm_core.assembly.algorithm import Algorithm, passes
from rllm_core.assembly.components import kl_notes
from rllm_core.assembly.imitation import check_imitation
from rllm_core.assembly.support import backend_class, check_support
from rllm_core.assembly.tasks import Tasks
from rllm_core.backend import BackendProtocol
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.limits.guard import patience
from rllm_core.limits.timeouts import within
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import located
from rllm_core.plugins.requirements import pip_install, unmet
from rllm_core.services import Services
from rllm_core.tracker import Tracker
from rllm_core.workflow import Workflow


@dataclass(frozen=True)
class Parts:
    """Parts of a run, selected and checked, before anything is allocated.

    Attributes:
        not_checked: Settings that the backend could not check, for ``--dry-run``.
        notes: Remarks about settings whose effect differs from their plain meaning.
        trackers: Trackers by their names in the run file.
        left_running: Backend and trackers that did not stop in time; `rllm_core.training.launch.train` adds them. Their
            threads may keep the process from exiting.
    """

    config: RunConfig
    plugins: PluginManager
    workflow: Workflow
    tasks: Tasks
    backend: BackendProtocol[Any]
    algorithm: Algorithm
    not_checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trackers: dict[str, Tracker] = field(default_factory=dict)
    left_running: list[str] = field(default_factory=list)

    def derived(self) -> dict[str, int]:
        """Returns numbers computed from the run file and the capabilities of its backend."""
        per_pass, _ = passes(self.config, type(self.backend).capabilities(self.config), self.algorithm)
        groups = self.config.training.groups_per_step
        return self.config.derived() | {"forward_backward_passes_per_step": groups // per_pass}

    def parser(self) -> BaseParser:
        """Builds the parser for the backend's model (reads the tokenizer)."""
        provided = self.plugins.select(providers.ParserProvider, self.config.parser)
        parser_class: type[BaseParser] = self.plugins.load(provided)
        model = self.backend.model_path()
        with provided.at_work("from_model", parser_class):
            return parser_class.from_model(model, self.config.plugins.get(self.config.parser))

    async def engine(self) -> RolloutEngine:
        """Allocates the backend and returns its engine."""
        seconds = self.config.training.backend_timeout_seconds
        what = f"init_rollout_engine of backend {self.config.backend!r}"
        with patience(seconds):  # a parser may have to download or create its model first
            parser = self.parser()
        return await within(seconds, what, self.backend.init_rollout_engine(parser))


def assemble(config: RunConfig, plugins: PluginManager) -> Parts:
    """Selects and checks the parts of a run without allocating anything.

    Raises:
        ConfigError: If a setting is invalid or the backend does not support it.
        PluginError: If a part is missing or broken.
    """
    _check_requirements(config)
    workflow = workflow_of(config, plugins)
    provided_backend = plugins.select(providers.BackendProvider, config.backend)
    chosen_backend = backend_class(provided_backend, plugins)
    algorithm = Algorithm.of(config, plugins)
    capabilities = chosen_backend.capabilities(config)
    check_imitation(config, capabilities, algorithm, workflow, plugins)
    check_support(config, capabilities, algorithm, plugins)
    tasks = Tasks(workflow, config.workflow)
    if config.training.validation_rollouts:
        tasks.check_apart()
    if not len(tasks.of("train")):
        raise ConfigError(
            f"workflow {config.workflow!r} has no training tasks: tasks('train') returned an empty sequence; check its "
            "settings and its data file"
        )
    with provided_backend.at_work("its construction", chosen_backend):
        backend = chosen_backend(config, plugins)
    with provided_backend.at_work("validate_config", chosen_backend):
        not_checked = backend.validate_config()
    notes = kl_notes(config.algorithm.kl)
    if not workflow.samples:
        rows, trained = len(tasks.of("train")), config.training.steps * config.training.groups_per_step
        notes.append(f"{config.training.steps} steps train {trained:,} rows, {trained / rows:.3g} epochs of {rows:,}")
    per_pass, per_take = passes(config, capabilities, algorithm)
    if per_pass != config.groups_per_pass:
        notes.append(
            f"one forward-backward pass per step: backend {config.backend!r} cannot normalize the loss afterwards"
        )
    elif per_take > config.groups_per_pass:
        because = (
            "engine and trainer share devices" if capabilities.colocated else "the estimator needs the whole batch"
        )
        notes.append(f"gradients are not accumulated while groups arrive: {because}")
    trackers = construct(config, plugins)
    return Parts(config, plugins, workflow, tasks, backend, algorithm, not_checked, notes, trackers)


def workflow_of(config: RunConfig, plugins: PluginManager) -> Workflow:
    """Constructs the workflow of a run file, with its own section."""
    provided = plugins.select(providers.WorkflowProvider, config.workflow)
    workflow_class: type[Workflow] = plugins.load(provided)
    if not isinstance(workflow_class, type) or not issubclass(workflow_class, Workflow):
        raise PluginError(
            f"workflow {provided.record.name!r} ({provided.plugin.label}): {provided.record.load} must be a subclass "
            "of rllm_core.workflow.Workflow"
        )
    plugins.select(providers.SandboxProvider, config.rollout.sandbox)
    with provided.at_work("its construction", workflow_class):
        workflow = workflow_class(config.plugins.get(config.workflow))
    workflow.services = Services(plugins, config.rollout.sandbox)
    return workflow


def construct(config: RunConfig, plugins: PluginManager) -> dict[str, Tracker]:
    """Constructs the trackers of a run file, by name.

    Raises:
        ConfigError: If a tracker is named twice, or rejects its settings.
        PluginError: If a tracker cannot be imported or constructed.
    """
    chosen: dict[str, Tracker] = {}
    for name in config.training.trackers:
        if name in chosen:
            raise ConfigError(f"training.trackers names {name!r} twice; leave one out")
        provided = plugins.select(providers.TrackerProvider, name)
        tracker_class: type[Tracker] = plugins.load(provided)
        try:
            chosen[name] = tracker_class(config.plugins.get(name))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a SystemExit raised by a library is a failure of the tracker
            what = located(error, provided.plugin.package)
            raise PluginError(
                f"tracker {name!r} ({provided.plugin.label}) cannot be set up: {what}; "
                "fix it, or remove it from training.trackers"
            ) from error
    return chosen


def _check_requirements(config: RunConfig) -> None:
    missing = unmet("the run file", config.requires)
    if missing:
        raise ConfigError(f"requires: {missing[0]}; {pip_install(*(lack.requirement for lack in missing))}")
