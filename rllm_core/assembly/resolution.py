"""Reads a run file, and selects the providers that it names.

Precedence, lowest first: the defaults of `rllm_core.config`, the workflow's own run file
(`rllm_core.providers.WorkflowProvider.run_file`), the user's file, ``--backend``/``--parser``, and
``-o section.key=value``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllm_core.assembly.components import select_component, select_corrections
from rllm_core.assembly.elsewhere import ElsewhereProvider
from rllm_core.assembly.lost_plugins import naming_lost_plugins
from rllm_core.assembly.merging import merged_by_choice
from rllm_core.assembly.placement import host_notes, with_host
from rllm_core.assembly.variants import check_named, select_workflow
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.file_references import is_file_reference, section_name, with_absolute_files
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.sections import WITH_SECTION
from rllm_core.providers import (
    AdvantageEstimatorProvider,
    BackendProvider,
    CorrectionProvider,
    EngineProvider,
    GroupScorerProvider,
    ParserProvider,
    RolloutHostProvider,
    SandboxProvider,
    TaskSamplerProvider,
    TrackerProvider,
    WorkflowProvider,
)
from rllm_core.run_file import (
    Preset,
    apply_override,
    leaf_keys,
    merged,
    model_in,
    read_toml,
    shown,
    tables_of_settings,
    toml_key,
    unknown_key,
    validated,
)


@dataclass(frozen=True)
class Resolved:
    """A run file and the providers that it names, each selected once.

    Providers of a kind that a run may need several of are mapped by their names in the run file.

    Attributes:
        parsers: Parser of the policy, and of the teacher.
        engines: Engine of the teacher, and the one used instead of the backend's.
        estimators: Advantage estimators of all roles.
        corrections: Off-policy corrections.
        notes: Notes on the settings, for ``--dry-run``.
        sources: Origin of each value, by dotted key: ``workflow``, ``file``, ``option`` (or settings from Python), or
            ``backend`` for the backend's default parser. A key that is missing here has its default.
    """

    config: RunConfig
    plugins: PluginManager
    workflow: Provided[WorkflowProvider]
    backend: Provided[BackendProvider]
    sandbox: Provided[SandboxProvider]
    host: Provided[RolloutHostProvider]
    sampler: Provided[TaskSamplerProvider]
    parsers: Mapping[str, Provided[ParserProvider]]
    engines: Mapping[str, Provided[EngineProvider]]
    trackers: Mapping[str, Provided[TrackerProvider]]
    estimators: Mapping[str, Provided[AdvantageEstimatorProvider]]
    corrections: Mapping[str, Provided[CorrectionProvider]]
    scorer: Provided[GroupScorerProvider] | None = None
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_sections(self) -> Iterator[tuple[str, Provided[Any]]]:
        """Yields the name in the run file, and the provider, for each section of a provider that the run reads."""
        config = self.config
        yield section_name(config.workflow), self.workflow
        yield config.backend, self.backend
        yield config.parser, self.parsers[config.parser]
        yield config.rollout.host, self.host
        yield from self.engines.items()
        yield from self.trackers.items()


def load_run_config(
    target: str,
    plugins: PluginManager,
    *,
    overrides: Sequence[str] = (),
    backend: str | None = None,
    parser: str | None = None,
    engine: str | None = None,
) -> RunConfig:
    """Like `resolve_run`, but returns only the configuration."""
    return resolve_run(target, plugins, overrides=overrides, backend=backend, parser=parser, engine=engine).config


def resolve_run(
    target: str,
    plugins: PluginManager,
    *,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    backend: str | None = None,
    parser: str | None = None,
    engine: str | None = None,
) -> Resolved:
    """Resolves ``rllm-core train TARGET`` into one validated configuration, and its providers.

    Args:
        target: Path of a run file (ending in ``.toml``), name of a workflow (``NAME`` or ``NAME/VARIANT``), or file
            with a workflow (``env.py`` or ``env.py:MyEnv``). References to files are relative to the run file, or to
            the working directory.
        plugins: Plugin manager that provides workflows, backends and their sections.
        overrides: ``section.key=value`` strings with TOML values; a bare word is a string.
        settings: Overrides as Python values: ``{"section.key": value}``, or tables.
        backend: Replacement for the file's ``backend``.
        parser: Replacement for the file's ``parser``.
        engine: Engine to use instead of the backend's (``rllm-core eval --engine``); its section is read, too.

    Raises:
        ConfigError: If the configuration is invalid; one line with the problem, the allowed values and the fix.
        PluginError: If a selected plugin is missing or broken.
    """
    given: dict[str, Any] = {key: name for key, name in (("backend", backend), ("parser", parser)) if name is not None}
    for override in overrides:
        apply_override(given, override)
    given = merged(given, tables_of_settings(settings or {}))
    given = _with_absolute_paths(given, Path.cwd())
    tables = _tables_of(target)
    asked = merged(tables, given)
    with naming_lost_plugins(target, plugins):
        workflow, named = select_workflow(plugins, _workflow_name(target, asked), asked)
    tables, given = (tables, merged(given, named)) if "workflow" in given else (merged(tables, named), given)
    asked = merged(tables, given)
    preset = preset_of(workflow, plugins, asked)
    whole = merged_by_choice(merged_by_choice(preset.tables, tables), given)
    from_target = "file" if target.endswith(".toml") else "option"
    sources = _sources(whole, [("option", given), (from_target, tables), ("workflow", preset.tables)])
    check_named(workflow, plugins, named["workflow"], whole)
    core = {key: whole.pop(key) for key in RunConfig.model_fields if key in whole and key != "plugins"}
    config = validated(RunConfig, core, "", _core_keys())
    if not config.parser:
        sources["parser"] = "backend"
    with naming_lost_plugins(target, plugins):
        selected = providers_of(config, plugins, engine, workflow=workflow)
    resolved = _with_sections(selected, whole, asked_for=tables.keys() | given.keys())
    notes = [f"workflow {config.workflow!r}: {preset.reason}"] if preset.reason else []
    notes += host_notes(resolved.config, workflow.record)
    unused = sorted((tables.keys() | given.keys()) & resolved.config.plugins.keys() - dict(resolved.with_sections()))
    notes += [f"[{key}] has no effect, because this run uses no {key}" for key in unused]
    return replace(resolved, notes=tuple(notes), sources=sources)


def _sources(whole: Mapping[str, Any], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Returns, for each key of the merged run file, the first of ``layers`` that has the key."""
    keys = [(name, set(leaf_keys(tables))) for name, tables in layers]
    found = {key: [name for name, of_layer in keys if key in of_layer] for key in leaf_keys(whole)}
    return {key: names[0] for key, names in found.items() if names}


def preset_of(workflow: Provided[WorkflowProvider], plugins: PluginManager, given: Mapping[str, Any]) -> Preset:
    """Returns the workflow's own run file; empty if it has none."""
    if isinstance(workflow.record, ElsewhereProvider):
        return workflow.record.preset
    if not workflow.record.run_file:
        return Preset({}, "")
    run_file = plugins.load(workflow, workflow.record.run_file)
    found = run_file(given) if inspect.signature(run_file).parameters else run_file()
    preset = found if isinstance(found, Preset) else Preset(found, "")
    try:
        return Preset(tables_of_settings(preset.tables), preset.reason)
    except ConfigError as error:
        raise ConfigError(f"{workflow.record.run_file} of workflow {workflow.record.name!r}: {error}") from error


def checked_section(
    workflow: Provided[WorkflowProvider], plugins: PluginManager, preset: Preset, given: Mapping[str, Any], key: str
) -> None:
    """Validates the section of a workflow, before the rest of the run file is known.

    Raises:
        ConfigError: If a setting is invalid.
    """
    table = merged_by_choice(preset.tables, given).get(key, {})
    if workflow.record.config is not None:
        validated(plugins.load(workflow, workflow.record.config), table, toml_key(key), _core_keys())
    elif table:
        raise ConfigError(f"unknown key {key!r}; workflow {key!r} has no settings")


def providers_of(
    config: RunConfig,
    plugins: PluginManager,
    engine: str | None = None,
    *,
    workflow: Provided[WorkflowProvider] | None = None,
) -> Resolved:
    """Selects the providers that a run file names.

    A run file without a parser gets the default of its backend; ``engine`` replaces the backend's.

    Raises:
        ConfigError: If the backend does not work with the parser.
        PluginError: If a provider is missing or broken.
    """
    workflow = workflow or select_workflow(plugins, config.workflow, config.to_tables())[0]
    backend = plugins.select(BackendProvider, config.backend)
    config = with_host(_with_parser(config, backend.record), workflow.record)
    teacher, scorer = config.teacher, config.algorithm.group_scorer
    parsers = [config.parser, *([teacher.parser] if teacher.engine and teacher.parser else [])]
    return Resolved(
        config,
        plugins,
        workflow,
        backend,
        parsers={name: plugins.select(ParserProvider, name) for name in parsers},
        engines={name: plugins.select(EngineProvider, name) for name in (teacher.engine, engine) if name},
        trackers={name: plugins.select(TrackerProvider, name) for name in config.training.trackers},
        sandbox=plugins.select(SandboxProvider, config.rollout.sandbox),
        host=plugins.select(RolloutHostProvider, config.rollout.host),
        sampler=select_component(plugins, TaskSamplerProvider, "training.sampler", config.training.sampler),
        estimators={
            name: select_component(plugins, AdvantageEstimatorProvider, key, name)
            for key, name in config.algorithm.estimator_names().items()
        },
        corrections=select_corrections(config, plugins),
        scorer=select_component(plugins, GroupScorerProvider, "algorithm.group_scorer", scorer) if scorer else None,
    )


def _tables_of(target: str) -> dict[str, Any]:
    if target.endswith(".toml"):
        return _with_absolute_paths(read_toml(Path(target)), Path(target).parent)
    reference = target if is_file_reference(target) else f"./{target}"  # a target that is a file needs no ./
    if is_file_reference(reference):
        return {"workflow": with_absolute_files(reference, Path.cwd())}
    return {"workflow": target}


def _with_absolute_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns tables in which references to files, and all paths in the core's keys, are absolute.

    Models are an exception, because they may be Hugging Face model IDs: of these paths, only ``~`` is replaced.
    """
    absolute: dict[str, Any] = with_absolute_files(tables, folder)
    for section, key in (("model", "path"), ("teacher", "model")):
        table = absolute.get(section)
        if isinstance(table, dict) and isinstance(path := table.get(key), str) and path.startswith("~"):
            table[key] = str(Path(path).expanduser())
    training = absolute.get("training")
    if isinstance(training, dict) and isinstance(reference := training.get("init_from"), str) and reference:
        training["init_from"] = str((folder / Path(reference).expanduser()).resolve())
    rollout = absolute.get("rollout")
    if isinstance(rollout, dict) and isinstance(python := rollout.get("python"), str) and "/" in python:
        # Do not resolve links: a virtual environment's interpreter is a link, and its target is another interpreter.
        rollout["python"] = os.path.abspath(folder / Path(python).expanduser())  # noqa: PTH100
    return absolute


def _workflow_name(target: str, tables: Mapping[str, Any]) -> str:
    name = tables.get("workflow")
    if name is None or name == "":
        raise ConfigError(f'{target}: workflow is not set; add workflow = "NAME" at the top of the run file')
    if not isinstance(name, str):
        raise ConfigError(f'workflow = {shown(name)}: must be the name of a workflow, such as workflow = "sort"')
    return name


def _with_sections(resolved: Resolved, sections: Mapping[str, Any], asked_for: Collection[str]) -> Resolved:
    """Adds the validated sections of providers to the configuration.

    Args:
        resolved: Selected providers.
        sections: Tables of the run file that are not the core's.
        asked_for: Keys that the user wrote. The workflow's own run file may also mention providers that are not
            installed.
    """
    plugins = resolved.plugins
    owners = _section_owners(resolved.with_sections())
    for kind in WITH_SECTION:
        for key, provided in plugins.providers(kind).items():
            if key in sections and provided.record.config is not None:
                owners.setdefault(key, provided)
    for key in sections:
        if key not in owners and key in asked_for:
            raise _unknown_section(key, sections[key], resolved, owners)
    tables = {key: table for key, table in sections.items() if key in owners}
    tables |= {key: {} for key in owners if key not in tables}
    checked = {
        key: validated(plugins.load(owners[key], owners[key].record.config), table, toml_key(key), _core_keys())
        for key, table in tables.items()
    }
    return replace(resolved, config=resolved.config.model_copy(update={"plugins": checked}))


def _unknown_section(key: str, value: Any, resolved: Resolved, owners: Mapping[str, Provided[Any]]) -> ConfigError:
    for name, provided in resolved.with_sections():
        if key == name:
            resolved.plugins.load(provided)  # raises a better error if the class has settings that the record omits
            return ConfigError(f"unknown key {key!r}; {provided.record.kind} {key!r} has no settings")
    core = [name for name in RunConfig.model_fields if name != "plugins"]
    return ConfigError(unknown_key(key, [*core, *owners], _core_keys(), value))


def _with_parser(config: RunConfig, backend: BackendProvider) -> RunConfig:
    """Fills in the backend's default parser, or checks that the chosen parser works with the backend."""
    if not config.parser:
        if not backend.default_parser:
            raise ConfigError(f'backend {backend.name!r} has no default parser; set parser = "NAME"')
        return config.model_copy(update={"parser": backend.default_parser})
    if backend.parsers and config.parser.rpartition("/")[2] not in backend.parsers:
        raise ConfigError(
            f"parser = {config.parser!r} does not work with backend {backend.name!r}; choose one of "
            + ", ".join(backend.parsers)
        )
    return config


def _section_owners(chosen: Iterable[tuple[str, Provided[Any]]]) -> dict[str, Provided[Any]]:
    """Maps each section to the provider that validates it.

    Providers with the same name share one section, so they must agree on its model.
    """
    owners: dict[str, Provided[Any]] = {}
    for key, provided in chosen:
        record = provided.record
        if record.config is None:
            continue
        if key in RunConfig.model_fields:
            raise ConfigError(
                f"{record.kind} {key!r} cannot have settings: [{key}] is a section of the core; rename it"
            )
        other = owners.setdefault(key, provided).record
        if other.config != record.config:
            raise ConfigError(
                f"{other.kind} {key!r} and {record.kind} {key!r} both have a section [{key}], with different keys; "
                "they cannot be used together"
            )
    return owners


def _core_keys() -> list[str]:
    """Lists the core's keys as ``section.key``."""
    keys = []
    for section, declared in RunConfig.model_fields.items():
        nested = model_in(declared.annotation)
        if nested is not None:
            keys += [f"{section}.{name}" for name in nested.model_fields]
        elif not declared.exclude:
            keys.append(section)
    return keys
