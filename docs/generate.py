"""Generates parts of the pages from the code: ``make docs-reference``."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import architecture
import curves
import diagrams
import hook_pages
import judged_curves
import protocol
from hook_pages import attributes
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rllm_core import providers
from rllm_core.assembly.components import piece_class
from rllm_core.assembly.support import Support
from rllm_core.backend import Capabilities
from rllm_core.cli.backends import default_capabilities, matrix
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.plugins.discovery import installed_plugins
from rllm_core.plugins.sections import WITH_OPTIONS
from rllm_core.plugins.settings import Settings

PAGE = Path(__file__).parent / "run-file.md"
SECTIONS = Path(__file__).parent / "run-file"
CAPABILITIES = Path(__file__).parent / "capabilities.md"
MARKER = "<!-- Generated from the configuration models by `make docs-reference`; edit those. -->\n"
DECLARED_MARKER = "<!-- Generated from the backends' declared capabilities by `make docs-reference`. -->\n"
# An explicit list, because other installed plugins must not appear on the page.
FIRST_PARTY = {
    "bwrap": "rllm_bwrap",
    "gateway": "rllm_gateway",
    "judge": "rllm_judge",
    "local": "rllm_local",
    "ray": "rllm_ray",
    "renderers": "rllm_renderers",
    "samplers": "rllm_samplers",
    "tinker": "rllm_tinker",
    "trackers": "rllm_trackers",
    "verifiers": "rllm_verifiers",
    "verl": "rllm_verl",
    "workflows": "rllm_workflows",
}
OPTIONS_OF: dict[type[providers.Provider], str] = {
    providers.AdvantageEstimatorProvider: "algorithm.estimator_options",
    providers.PolicyLossProvider: "algorithm.loss_options",
    providers.CorrectionProvider: "algorithm.correction_options.{name}",
    providers.GroupScorerProvider: "algorithm.group_scorer_options",
    providers.TaskSamplerProvider: "training.sampler_options",
}
BOUNDS = (
    (annotated_types.Ge, "ge", "≥"),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "≤"),
    (annotated_types.Lt, "lt", "<"),
)


def first_party_plugins() -> PluginManager:
    """Plugins of this repository, and no others."""
    plugins = PluginManager(installed_plugins(), Settings(only=frozenset({"devkit", "environments", "viewer"})))
    for name, module in FIRST_PARTY.items():
        plugins.register(importlib.import_module(module), name)
    return plugins


def sections(plugins: PluginManager) -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Yields name, heading and model of every section: top level (named "") first, nested ones after their parents."""
    yield from _nested("", "Top level", RunConfig)
    for kind in (
        providers.BackendProvider,
        providers.EngineProvider,
        providers.ParserProvider,
        providers.WorkflowProvider,
        providers.RolloutHostProvider,
        providers.TrackerProvider,
    ):
        for provided in plugins.providers(kind).values():
            record = provided.record
            if record.config is not None:
                yield from _nested(
                    record.name, f"`[{record.name}]`, {kind.kind}", plugins.load(provided, record.config)
                )


def options(plugins: PluginManager) -> Iterator[tuple[str, str, str, type[BaseModel]]]:
    """Yields section, name, summary and model of the options of every estimator, loss and correction."""
    for kind in WITH_OPTIONS:
        for name, provided in plugins.providers(kind).items():
            section = OPTIONS_OF[kind].format(name=name)
            yield section, name, provided.record.summary, piece_class(plugins, provided).options_model


def keys(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, str]]:
    """Yields name, field and description of every key of a section, except nested sections."""
    documented = attributes(inspect.getdoc(model) or "")
    for name, field in model.model_fields.items():
        if not field.exclude and _section_model(field) is None:
            yield name, field, " ".join((field.description or documented.get(name, "")).split())


def reference(plugins: PluginManager) -> dict[str, str]:
    """The generated part of every page about the run file, by the page's name.

    A section of the core and a backend have a page of their own, with their nested sections. Other plugins share a page
    for each kind. The page named "" is ``run-file.md``: what fits on no other page, and a list of all sections.
    """
    parts: dict[str, list[str]] = {"": []}
    index = []

    def add(page: str, heading: str, summary: str, model: type[BaseModel]) -> None:
        parts.setdefault(page, []).append(_part(heading, summary, model))
        index.append(f"| [{heading}]({f'run-file/{page}.md' if page else ''}#{_anchor(heading)}) | {_cell(summary)} |")

    page = ""
    for path, heading, model in sections(plugins):
        _, _, provider_kind = heading.partition(", ")
        if "." not in path:
            shared = "" if path == "model" else path
            page = shared if provider_kind in ("", "backend") else f"{provider_kind}s".replace(" ", "-")
        summary = (inspect.getdoc(model) or "").partition("\n\n")[0].replace("``", "`").replace("\n", " ")
        summary = re.sub(r"^`\[[\w.]+\]`: (\w)", lambda match: match[1].upper(), summary)
        add(page, heading, "Above the first section." if model is RunConfig else summary, model)
    without = []
    for section, name, summary, model in options(plugins):
        if model.model_fields:
            add("algorithm-options", f"`[{section}]` of `{name}`", summary, model)
        else:
            without.append(f"`{name}`")
    parts["algorithm-options"].append("## Without options\n\n" + ", ".join(without) + ".")
    parts[""].append("\n".join(["## All sections", "", "| section | meaning |", "| --- | --- |", *index]))
    return {page: "\n\n".join(texts) + "\n" for page, texts in parts.items()}


def pages(plugins: PluginManager) -> dict[str, str]:
    """The complete pages below ``run-file/``, by file name."""
    backends = plugins.providers(providers.BackendProvider)
    found = {}
    for page, text in reference(plugins).items():
        title = f"Backend `{page}`" if page in backends else page.replace("-", " ").capitalize()
        found[f"{page}.md"] = f"# {title}\n\nKeys of a [run file](../run-file.md).\n\n{MARKER}\n{text}"
    del found[".md"]  # run-file.md itself, which also has a written part
    return found


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _part(heading: str, summary: str, model: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_cell(kind(field))} | {_cell(default(field))} | {_cell(text)} |"
        for name, field, text in keys(model)
    ]
    table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join([f"## {heading}", "", summary, "", *(table if rows else ["It has no keys."])])


def kind(field: FieldInfo) -> str:
    """The type of a key in words, with its bounds."""
    found = list(_bounds(field.metadata))
    return _kind(field.annotation, found) + (" " + " and ".join(found) if found else "")


def default(field: FieldInfo) -> str:
    """The default, as written in a run file."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)}`"


def capability_table(plugins: PluginManager) -> str:
    """The part of ``capabilities.md`` below the marker: a row per choice and flag, a column per backend."""
    backends = plugins.providers(providers.BackendProvider)
    resolved = [Support.of(default_capabilities(one, plugins), plugins).to_json() for one in backends.values()]
    lines = [
        "| by default | | " + " | ".join(f"`{name}`" for name in backends) + " |",
        "| --- " * (len(backends) + 2) + "|",
    ]
    for what, which, *answers in matrix(resolved):
        lines.append(f"| {what} | {f'`{which}`' if which else ''} | {' | '.join(answers)} |")
    documented = attributes(inspect.getdoc(Capabilities) or "")
    flags = [name for name in resolved[0] if isinstance(resolved[0][name], bool)]
    lines += ["", "| flag | meaning |", "| --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | {_cell(documented[name])} |" for name in flags]
    return "\n".join(lines) + "\n"


def generated(page: str, plugins: PluginManager) -> str:
    """The complete ``run-file.md``, with the hand-written part of ``page``."""
    return _below(page, MARKER, reference(plugins)[""])


def generated_capabilities(page: str, plugins: PluginManager) -> str:
    """The complete ``capabilities.md``, with the hand-written part of ``page``."""
    return _below(page, DECLARED_MARKER, capability_table(plugins))


def _below(page: str, marker: str, text: str) -> str:
    written, found, _ = page.partition(marker)
    if not found:
        raise SystemExit(f"the page lacks the line {marker!r}")
    return f"{written}{marker}\n{text}"


def _nested(name: str, heading: str, model: type[BaseModel]) -> Iterator[tuple[str, str, type[BaseModel]]]:
    yield name, heading, model
    for key, field in model.model_fields.items():
        inner = _section_model(field)
        if inner is not None and not field.exclude:
            path = f"{name}.{key}" if name else key
            shown = f"{path}.NAME" if get_origin(field.annotation) is dict else path
            yield from _nested(path, f"`[{shown}]`", inner)


def _section_model(field: FieldInfo) -> type[BaseModel] | None:
    if get_origin(field.annotation) in (tuple, list):  # a key whose value is a list of tables
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _kind(annotation: Any, found: list[str]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found += [bound for item in arguments[1:] for bound in _bounds(getattr(item, "metadata", [item]))]
        return _kind(arguments[0], found)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument, found) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0], found)}"
    if origin is dict:
        return "table"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "tables"
    return {str: "text", Path: "path", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        for bound, attribute, sign in BOUNDS:
            if isinstance(item, bound):
                yield f"{sign} {getattr(item, attribute):g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    first_party = first_party_plugins()
    for path, write in ((PAGE, generated), (CAPABILITIES, generated_capabilities)):
        path.write_text(write(path.read_text(encoding="utf-8"), first_party), encoding="utf-8")
    protocol.PAGE.write_text(protocol.page(protocol.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for old in SECTIONS.glob("*.md"):
        old.unlink()
    SECTIONS.mkdir(exist_ok=True)
    for name, page in pages(first_party).items():
        (SECTIONS / name).write_text(page, encoding="utf-8")
    for name in hook_pages.SPECS:
        path = hook_pages.FOLDER / f"{name}.md"
        path.write_text(hook_pages.page(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in diagrams.DIAGRAMS.items():
        (diagrams.FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    curves.draw()
    judged_curves.draw()
    architecture.PICTURE.write_text(architecture.drawing().svg(), encoding="utf-8")
