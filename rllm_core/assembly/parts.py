"""Loads the providers of a run file, and checks that they fit together, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer
from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.assembly.algorithm import Algorithm, passes
from rllm_core.assembly.components import kl_notes
from rllm_core.assembly.elsewhere import ElsewhereProvider
from rllm_core.assembly.engines import build_parser
from rllm_core.assembly.imitation import check_imitation
from rllm_core.assembly.resolution import Resolved, providers_of
from rllm_core.assembly.sampler import sampler_of
from rllm_core.assembly.scorer import scorer_of
from rllm_core.assembly.support import check_support
from rllm_core.assembly.tasks import Tasks
from rllm_core.assembly.warm_start import warm_start_of
from rllm_core.backend import BackendProtocol, Capabilities
from rllm_core.config import RunConfig
from rllm_core.costs import price_notes
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.file_references import CLASS_PREFIX, is_class_reference, referenced_files, section_name
from rllm_core.hosts.contract import HostedWorkflow, RolloutHost
from rllm_core.hosts.elsewhere import WorkflowElsewhere
from rllm_core.limits.guard import patience
from rllm_core.limits.timeouts import within
from rllm_core.memory import MemoryEstimate
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import located
from rllm_core.plugins.requirements import pip_install, unmet
from rllm_core.services import Services, working_sandbox
from rllm_core.tracker import Tracker
from rllm_core.workflow import ENDLESS, Workflow


@dataclass(frozen=True)
class Parts:
    """Parts of a run, selected and checked before anything is allocated.

    Attributes:
        trackers: Trackers by their names in the run file.
        not_checked: Settings that the backend could not check, for ``--dry-run``.
        notes: Notes on settings whose effect differs from their plain meaning.
        left_running: Backend and trackers that did not stop in time, added by `rllm_core.runs.launch.train`. Their
            threads may keep the process from exiting.
    """

    resolved: Resolved
    workflow: Workflow
    host: RolloutHost
    tasks: Tasks
    backend: BackendProtocol[Any]
    algorithm: Algorithm
    scorer: GroupScorer | None
    sampler: TaskSampler
    trackers: dict[str, Tracker]
    not_checked: list[str]
    notes: list[str]
    left_running: list[str] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        """Run file."""
        return self.resolved.config

    @property
    def plugins(self) -> PluginManager:
        """Plugin manager that loaded the parts."""
        return self.resolved.plugins

    @property
    def sources(self) -> list[str]:
        """Files and classes of the user with code of the run: loaded in place of plugins, or named in the run file."""
        return list(dict.fromkeys([*self.plugins.sources, *referenced_files(self.config.to_tables())]))

    def derived(self) -> dict[str, int]:
        """Returns the numbers that follow from the run file and the capabilities of its backend."""
        per_pass, _ = passes(self.config, type(self.backend).capabilities(self.config), self.algorithm)
        groups = self.config.training.groups_per_step
        return self.config.derived() | {"forward_backward_passes_per_step": groups // per_pass}

    def memory(self, device_bytes: int | None) -> MemoryEstimate | str:
        """Returns an estimate of the memory that the backend needs, or the reason why there is none.

        Raises:
            ConfigError: If the run does not fit on the devices.
        """
        with self.resolved.backend.at_work("memory", type(self.backend)):
            found = self.backend.memory(device_bytes)
        if not isinstance(found, str) and (problem := found.problem()) is not None:
            raise ConfigError(problem)
        return found

    def parser(self) -> BaseParser:
        """Builds the parser for the backend's model (reads the tokenizer)."""
        return build_parser(self.resolved, self.config.parser, self.backend.model_path())

    async def engine(self) -> RolloutEngine:
        """Allocates the backend and returns its engine."""
        seconds = self.config.training.backend_timeout_seconds
        what = f"init_rollout_engine of backend {self.config.backend!r}"
        with patience(seconds):  # a parser may have to download or create its model first
            parser = self.parser()
        engine = await within(seconds, what, self.backend.init_rollout_engine(parser))
        return self.resolved.backend.checked("init_rollout_engine()", engine, RolloutEngine)


def assemble(config: RunConfig, plugins: PluginManager) -> Parts:
    """Selects the providers of a run file, and returns the parts from `parts_of`.

    Args:
        config: Run file, for example from `rllm_core.assembly.resolution.load_run_config`.
        plugins: Plugin manager that has the providers.
    """
    return parts_of(providers_of(config, plugins))


def parts_of(resolved: Resolved) -> Parts:
    """Loads and checks the parts of a run without allocating anything.

    Raises:
        ConfigError: If a setting is invalid or the backend does not support it.
        PluginError: If a part is missing or broken.
    """
    config, plugins, provided = resolved.config, resolved.plugins, resolved.backend
    missing = unmet("the run file", config.requires)
    if missing:
        raise ConfigError(f"requires: {missing[0]}; {pip_install(*(lack.requirement for lack in missing))}")
    working_sandbox(plugins, config.rollout.sandbox)
    workflow = workflow_of(resolved)
    host = host_of(resolved, workflow)
    chosen_backend: type[BackendProtocol[Any]] = plugins.load(provided)
    if config.training.init_from is not None and chosen_backend.load_weights is BackendProtocol.load_weights:
        raise ConfigError(
            f"training.init_from: backend {config.backend!r} cannot start from another run's weights; export them "
            "(rllm-core export-model), and set model.path to the exported model"
        )
    algorithm, scorer = Algorithm.of(resolved), scorer_of(resolved)
    with provided.at_work("capabilities", chosen_backend):
        capabilities = provided.checked("capabilities()", chosen_backend.capabilities(config), Capabilities)
    check_imitation(resolved, capabilities, algorithm, workflow)
    check_support(config, capabilities, algorithm, plugins)
    tasks = Tasks(workflow, config.workflow)
    if config.training.validation_rollouts:
        tasks.check_apart()
    if not len(tasks.of("train")):
        raise ConfigError(
            f"workflow {config.workflow!r} has no training tasks: tasks('train') returned an empty sequence; check its "
            "settings and its data file"
        )
    sampler = sampler_of(resolved, tasks.of("train"))
    with provided.at_work("its construction", chosen_backend):
        backend = chosen_backend(config, plugins)
    backend.warm_start = warm_start_of(workflow, config.workflow)
    with provided.at_work("validate_config", chosen_backend):
        not_checked = provided.checked("validate_config()", backend.validate_config(), list)
    notes = [*resolved.notes, *kl_notes(config.algorithm.kl), *price_notes(config.costs)]
    if not workflow.samples and len(tasks.of("train")) < ENDLESS:
        rows, trained = len(tasks.of("train")), config.training.steps * config.training.groups_per_step
        notes.append(f"{config.training.steps} steps train {trained:,} rows, {trained / rows:.3g} epochs of {rows:,}")
    notes += _notes_on_passes(config, capabilities, algorithm)
    trackers = _trackers_of(resolved)
    return Parts(resolved, workflow, host, tasks, backend, algorithm, scorer, sampler, trackers, not_checked, notes)


def workflow_of(resolved: Resolved) -> Workflow:
    """Constructs the workflow of a run file, with the workflow's section."""
    config, provided = resolved.config, resolved.workflow
    workflow_class: type[Workflow] = resolved.plugins.load(provided)
    with provided.at_work("its construction", workflow_class):
        workflow = workflow_class(config.plugins.get(section_name(config.workflow)))
    workflow.services = Services(resolved.plugins, config.rollout.sandbox)
    record = provided.record
    if isinstance(record, ElsewhereProvider) and isinstance(workflow, WorkflowElsewhere):
        workflow.place(
            record.python,
            record.path,
            name=record.name,
            sandbox=config.rollout.sandbox,
            samples=record.samples,
            warm_starts=record.warm_starts,
        )
    return workflow


def host_of(resolved: Resolved, workflow: Workflow) -> RolloutHost:
    """Constructs the rollout host of a run file for the run's workflow.

    Raises:
        ConfigError: If the host runs rollouts elsewhere, where the workflow's class cannot be imported.
        PluginError: If the host is broken.
    """
    config, record, provided = resolved.config, resolved.workflow.record, resolved.host
    host_class: type[RolloutHost] = resolved.plugins.load(provided)
    if host_class.runs_elsewhere and is_class_reference(config.workflow):
        raise ConfigError(
            f"rollout.host = {config.rollout.host!r} cannot import class {config.workflow.removeprefix(CLASS_PREFIX)}, "
            "which is in no file; write it to a file, or leave rollout.host out"
        )
    section = config.plugins.get(section_name(config.workflow))
    hosted = HostedWorkflow(
        workflow=workflow,
        load=record.path if isinstance(record, ElsewhereProvider) else record.load,
        section={} if section is None else section.model_dump(mode="json"),
        sandbox=config.rollout.sandbox,
    )
    with provided.at_work("its construction", host_class):
        return host_class(hosted, config.rollout, config.plugins.get(config.rollout.host))


def _trackers_of(resolved: Resolved) -> dict[str, Tracker]:
    """Constructs the trackers of a run file, by name.

    Raises:
        ConfigError: If a tracker rejects its settings.
        PluginError: If a tracker cannot be imported or constructed.
    """
    trackers: dict[str, Tracker] = {}
    for name, provided in resolved.trackers.items():
        tracker_class: type[Tracker] = resolved.plugins.load(provided)
        try:
            trackers[name] = tracker_class(resolved.config.plugins.get(name))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a SystemExit raised by a library is a failure of the tracker
            what = located(error, provided.plugin.package)
            raise PluginError(
                f"tracker {name!r} ({provided.plugin.label}) cannot be set up: {what}; "
                "fix it, or remove it from training.trackers"
            ) from error
    return trackers


def _notes_on_passes(config: RunConfig, capabilities: Capabilities, algorithm: Algorithm) -> list[str]:
    """Explains why a step is not split into forward-backward passes as the run file asks."""
    per_pass, per_take = passes(config, capabilities, algorithm)
    if per_pass != config.groups_per_pass:
        return [f"one forward-backward pass per step: backend {config.backend!r} cannot normalize the loss afterwards"]
    if per_take > config.groups_per_pass:
        shared = capabilities.colocated
        because = "engine and trainer share devices" if shared else "the estimator needs the whole batch"
        return [f"gradients are not accumulated while groups arrive: {because}"]
    return []
