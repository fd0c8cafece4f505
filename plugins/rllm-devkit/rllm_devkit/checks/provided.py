"""Builds a provider as a run would, and checks it against its contract.

Used by the pytest classes of `rllm_devkit.contracts` and by ``rllm-core plugins check``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rllm_core import providers
from rllm_core.assembly.resolution import Resolved, preset_of, resolve_run
from rllm_core.assembly.variants import variants_of
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.blame import blamed
from rllm_core.run_file import apply_override, merged, toml_key, validated
from rllm_core.text import one_line, printable
from rllm_devkit.checks.check_names import BUILT, RUN_FILE, checks_of
from rllm_devkit.checks.parsers import check_parser
from rllm_devkit.checks.results import CheckResult, Violation

__all__ = ["BUILT", "NeedsSettings", "Request", "check_provided", "checks_of", "run"]

ResultT = TypeVar("ResultT")


# As documented for backend authors: only advantages may move weights.
BACKEND_SETTINGS = (
    "training.rollouts_per_group=8",
    "rollout.max_response_tokens=8",
    "optimizer.learning_rate=1e-3",
    "optimizer.weight_decay=0.0",
    "algorithm.entropy_coefficient=0.0",
    "algorithm.kl.coefficient=0.0",
)
LATEST_ENDING_SECONDS = 2.0


class NeedsSettings(Exception):
    """A provider cannot be built with its defaults. The message lists the options to pass."""


@dataclass(frozen=True)
class Request:
    """Options for checking a provider.

    Attributes:
        overrides: Settings as ``section.key=value``, like ``-o``.
        model: Folder or Hugging Face model ID, for providers that need a model.
        answers: For workflows; see `rllm_devkit.checks.check_workflow`.
        tasks: For reward functions: data of the tasks to reward.
        read: For trackers; see `rllm_devkit.checks.check_tracker`.
        local: For trackers; see `rllm_devkit.checks.check_tracker`.
        logprob_tolerance: For engines and backends; see `rllm_devkit.checks.check_backend`.
    """

    overrides: tuple[str, ...] = ()
    model: str = ""
    answers: tuple[str, ...] = ()
    tasks: tuple[Mapping[str, Any], ...] = ()
    read: Callable[[Path], Mapping[str, Sequence[tuple[int, float]]]] | None = None
    local: bool = False
    logprob_tolerance: float = 1e-4


@dataclass
class _Subject:
    """Provider under test."""

    plugins: PluginManager
    provided: Provided[Any]
    request: Request
    folder: Path
    tables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for override in self.request.overrides:
            apply_override(self.tables, override)

    @property
    def name(self) -> str:
        """Name that selects the provider in a run file."""
        record = self.provided.record
        known = self.plugins.providers(type(record))
        name: str = record.name if record.name in known else self.provided.qualified
        return name

    def overrides(self) -> list[str]:
        """Returns the overrides of the core's sections and the provider's own, without those of other providers."""
        own = {*RunConfig.model_fields, self.provided.record.name}
        given = []
        for override in self.request.overrides:
            table: dict[str, Any] = {}
            apply_override(table, override)
            given += [override] if own & table.keys() else []
        return given + ([f"model.path={json.dumps(self.request.model)}"] if self.request.model else [])

    def section(self, preset: Mapping[str, Any] | None = None) -> Any:
        """Returns the provider's section of the run file; None if it has none.

        Raises:
            NeedsSettings: If keys without a default are missing.
            ConfigError: If a setting is invalid.
        """
        record = self.provided.record
        if record.config is None:
            return None
        model = self.plugins.load(self.provided, record.config)
        table = merged(preset or {}, self.tables.get(record.name, {}))
        required = [key for key, found in model.model_fields.items() if found.is_required()]
        missing = [f"-o {toml_key(record.name)}.{key}=VALUE" for key in required if key not in table]
        if missing:
            raise NeedsSettings(f"it has settings without a default; pass {' '.join(missing)}")
        return validated(model, table, toml_key(record.name), ())

    def loaded(self) -> type[Any]:
        """Returns the provider's class.

        Raises:
            PluginError: If it cannot be imported, or breaks the contract of its kind.
            Broken: If it does not match the provider record.
        """
        found: type[Any] = self.plugins.load(self.provided)
        record = self.provided.record
        name = getattr(found, "name", None)
        if name != record.name:
            raise Violation(f"the class has the name {name!r}, but its record has {record.name!r}; make them equal")
        return found


def check_provided(
    plugins: PluginManager, provided: Provided[Any], request: Request, folder: Path
) -> list[CheckResult]:
    """Builds a provider as a run would, with default settings, and checks it against its contract.

    Do not call it from a running event loop.

    Args:
        plugins: Plugins, including that of the provider and `rllm_devkit.scripted_plugin`.
        provided: Provider to check.
        request: Options for the checks.
        folder: Empty folder the checks may write to.

    Returns:
        The result of `BUILT` and, if it passed, of the checks for its kind (`checks_of`). `BUILT` also fails if the
        provider needs settings; its detail then lists the options to pass, and nothing else was checked.
    """
    subject = _Subject(plugins, provided, request, folder)
    try:
        check = _CHECKED[type(provided.record)](subject)
    except (NeedsSettings, Violation, UserError) as problem:  # with their own place, not that of this package
        return [CheckResult(BUILT, "failed", printable(str(problem)))]
    except (Exception, SystemExit) as error:  # third-party code: its exception is the result of the check
        return [CheckResult(BUILT, "failed", blamed(error, provided.plugin))]
    return [CheckResult(BUILT, "passed", provided.record.load), *check()]


def run(checks: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Does the same as `asyncio.run`, but does not wait for tasks that ignore cancellation."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        try:
            return loop.run_until_complete(checks)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=LATEST_ENDING_SECONDS))


# --------------------------------------------------------------------------------------------------------------------
# By kind: builds the provider and returns a function that checks it

_Checks = Callable[[], list[CheckResult]]


def _workflow(subject: _Subject) -> _Checks:
    from rllm_core.assembly.parts import workflow_of
    from rllm_devkit.checks.workflows import check_workflow

    subject.loaded()
    record = subject.provided.record
    preset = preset_of(subject.provided, subject.plugins, subject.tables).tables
    variants_of(subject.provided, subject.plugins)
    try:
        section = subject.section()
    except NeedsSettings:
        section = subject.section(preset.get(record.name))
    resolved, of_run_file = _run_file(subject)
    if section is not None:  # defaults of the model instead of values from its own run file
        sections = {**resolved.config.plugins, subject.name: section}
        resolved = replace(resolved, config=resolved.config.model_copy(update={"plugins": sections}))
    try:
        workflow_of(resolved).tasks("train")
    except ConfigError as error:
        raise NeedsSettings(f"with these settings it has no tasks; pass -o SECTION.KEY=VALUE: {error}") from error

    def check() -> list[CheckResult]:
        found = run(check_workflow(lambda: workflow_of(resolved), answers=subject.request.answers))
        return [of_run_file, *found]

    return check


def _run_file(subject: _Subject) -> tuple[Resolved, CheckResult]:
    """Resolves a workflow's own run file for the scripted backend, and reports whether it is valid."""
    from rllm_core.assembly.algorithm import Algorithm

    resolved = resolve_run(
        subject.name, subject.plugins, overrides=subject.overrides(), backend="scripted", parser="bytes"
    )
    if not subject.provided.record.run_file:
        return resolved, CheckResult(RUN_FILE, "skipped", "it has no run file of its own")
    Algorithm.of(resolved)
    training, algorithm = resolved.config.training, resolved.config.algorithm
    return resolved, CheckResult(RUN_FILE, "passed", f"{training.steps} steps of {algorithm.name}")


def _rollout_host(subject: _Subject) -> _Checks:
    from rllm_devkit.checks.hosts import check_rollout_host

    host_class, section = subject.loaded(), subject.section()
    given = [*subject.overrides(), f"rollout.host={json.dumps(subject.name)}"]
    resolved = _or_needs(lambda: resolve_run("say_yes", subject.plugins, overrides=given, backend="scripted"))
    rollout = resolved.config.rollout
    return lambda: run(check_rollout_host(lambda hosted, config: host_class(hosted, config, section), rollout))


def _tracker(subject: _Subject) -> _Checks:
    from rllm_devkit.checks.trackers import check_tracker

    tracker_class, section, request = subject.loaded(), subject.section(), subject.request
    _or_needs(lambda: tracker_class(section))
    return lambda: check_tracker(
        lambda: tracker_class(section), subject.folder / "runs", read=request.read, local=request.local
    )


def _parser(subject: _Subject) -> _Checks:

    parser_class, section, model = subject.loaded(), subject.section(), subject.request.model
    if not model:
        try:
            parser = parser_class.from_model(model, section)
        except Exception as error:  # any error of building a parser without a model
            raise NeedsSettings(f"it needs a model: pass --model PATH (without one, {one_line(error)})") from error
    else:
        parser = parser_class.from_model(model, section)
    return lambda: check_parser(parser)


def _engine(subject: _Subject) -> _Checks:
    from rllm_core.assembly.engines import build_parser, standalone_engine
    from rllm_core.engine import RolloutEngine
    from rllm_devkit.checks.engines import check_engine

    subject.loaded()
    subject.section()
    backend = subject.plugins.providers(providers.BackendProvider).get(subject.name)
    parser_name = (backend.record.default_parser if backend is not None else None) or "bytes"
    given = subject.overrides()
    if "parser" not in subject.tables:
        given.append(f"parser={json.dumps(parser_name)}")
    if backend is not None:
        given.append(f"backend={json.dumps(subject.name)}")
    else:
        given.append('backend="scripted"')
    resolved = _or_needs(lambda: resolve_run("say_yes", subject.plugins, overrides=given, engine=subject.name))

    def build() -> RolloutEngine:
        parser = build_parser(resolved, resolved.config.parser, resolved.config.model.path)
        return standalone_engine(resolved, subject.name, parser)

    engine = _or_needs(build)

    async def check() -> list[CheckResult]:
        await engine.wake_up()
        try:
            return await check_engine(engine, logprob_tolerance=subject.request.logprob_tolerance)
        finally:
            await engine.sleep()

    return lambda: run(check())


def _backend(subject: _Subject) -> _Checks:
    from rllm_core.assembly.parts import parts_of
    from rllm_devkit.checks.backends import check_backend

    backend_class = subject.loaded()
    record = subject.provided.record
    if record.export is not None and not callable(subject.plugins.load(subject.provided, record.export)):
        raise Violation(f"{record.export} must be a function, see rllm_core.backend")
    subject.section()
    given = [*BACKEND_SETTINGS, *subject.overrides()]
    plugins = subject.plugins
    resolved = _or_needs(lambda: resolve_run("say_yes", plugins, overrides=given, backend=subject.name))
    parser = _or_needs(lambda: parts_of(resolved).parser())
    return lambda: run(
        check_backend(
            lambda changed: backend_class(changed, plugins),
            resolved.config,
            parser,
            subject.folder,
            resumes_in_another=True,
            logprob_tolerance=subject.request.logprob_tolerance,
        )
    )


def _or_needs(build: Callable[[], ResultT]) -> ResultT:
    """Calls ``build``; an error the user can fix becomes `NeedsSettings`."""
    try:
        return build()
    except UserError as error:
        raise NeedsSettings(
            f"it cannot be built with these settings; pass -o SECTION.KEY=VALUE or --model: {error}"
        ) from error


def _piece(key: str, options: Callable[[dict[str, Any], str], Any], check: str) -> Callable[[_Subject], _Checks]:
    """Returns the builder of an algorithm component, with its options at the same keys as in a run file."""

    def build(subject: _Subject) -> _Checks:
        from rllm_core.assembly.components import configured
        from rllm_devkit import checks as functions

        record = subject.provided.record
        chosen = options(subject.tables.get("algorithm", {}), record.name)
        try:
            piece = configured(subject.plugins, type(record), f"algorithm.{key}", subject.name, chosen or {}, "options")
        except PluginError as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "torch":
                raise NeedsSettings("it needs torch: pip install 'rllm-core[torch]'") from error
            raise
        checks: Callable[[Any], list[CheckResult]] = getattr(functions, check)
        return lambda: checks(piece)

    return build


def _group_scorer(subject: _Subject) -> _Checks:
    from rllm_core.assembly.components import configured
    from rllm_devkit.checks.group_scorers import check_group_scorer

    chosen = subject.tables.get("algorithm", {}).get("group_scorer_options", {})
    kind = type(subject.provided.record)
    scorer = _or_needs(
        lambda: configured(subject.plugins, kind, "algorithm.group_scorer", subject.name, chosen, "options")
    )
    return lambda: run(check_group_scorer(scorer))


def _task_sampler(subject: _Subject) -> _Checks:
    from rllm_core.assembly.components import configured
    from rllm_devkit.checks.task_samplers import check_task_sampler

    chosen = subject.tables.get("training", {}).get("sampler_options", {})
    kind, options = type(subject.provided.record), "training.sampler_options"
    make = partial(configured, subject.plugins, kind, "training.sampler", subject.name, chosen, options)
    _or_needs(make)
    return lambda: check_task_sampler(make)


def _reward_function(subject: _Subject) -> _Checks:
    from rllm_devkit.checks.rewards import check_selected

    found: Any = subject.plugins.load(subject.provided)
    try:
        inspect.signature(found).bind("task", "text")
    except TypeError as error:
        raise Violation(f"it must accept a task and a text: {error}") from error
    if inspect.iscoroutinefunction(found):
        raise Violation("it is async; reward functions must be plain functions")
    return lambda: run(check_selected(subject.plugins, subject.name, subject.request.tasks))


def _sandbox(subject: _Subject) -> _Checks:
    from rllm_devkit.checks.sandboxes import check_sandbox

    sandbox_class = subject.loaded()
    sandbox_class()
    return lambda: run(check_sandbox(sandbox_class))


def _command(subject: _Subject) -> _Checks:
    found: Any = subject.plugins.load(subject.provided)
    if not found.get_short_help_str():
        raise Violation("it has no help; add a docstring")
    return list


_CHECKED: dict[type[providers.Provider], Callable[[_Subject], _Checks]] = {
    providers.WorkflowProvider: _workflow,
    providers.RolloutHostProvider: _rollout_host,
    providers.TrackerProvider: _tracker,
    providers.ParserProvider: _parser,
    providers.EngineProvider: _engine,
    providers.BackendProvider: _backend,
    providers.AdvantageEstimatorProvider: _piece(
        "name", lambda algorithm, name: algorithm.get("estimator_options"), "check_estimator"
    ),
    providers.PolicyLossProvider: _piece(
        "loss", lambda algorithm, name: algorithm.get("loss_options"), "check_policy_loss"
    ),
    providers.CorrectionProvider: _piece(
        "corrections", lambda algorithm, name: algorithm.get("correction_options", {}).get(name), "check_correction"
    ),
    providers.GroupScorerProvider: _group_scorer,
    providers.TaskSamplerProvider: _task_sampler,
    providers.RewardFunctionProvider: _reward_function,
    providers.SandboxProvider: _sandbox,
    providers.CommandProvider: _command,
}
