"""``rllm-core new``: creates a working package or file that the user adapts."""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json
from rllm_core.errors import ConfigError
from rllm_devkit.templates import KINDS, PackageNames, single_file, template, try_file, try_package

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_MAX_NAME_CHARACTERS = 32  # other names contain it, and must fit on a line


@click.command("new", short_help="Create a plugin package or file from a template.")
@click.argument("kind", type=click.Choice(list(KINDS)), metavar="KIND")
@click.argument("name", metavar="NAME")
@click.option(
    "--into", type=click.Path(path_type=Path), metavar="FOLDER", help="Output folder. Defaults to ./rllm-NAME."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def new(context: click.Context, kind: str, name: str, into: Path | None, as_json: bool) -> None:
    """Create a plugin package, or a single file, from a template.

    KIND is workflow, reward, scorer, sampler, estimator, loss, correction, backend, engine, parser, tracker, sandbox,
    command or observer. The result works: adapt it. A package has tests and can be published; users select it by NAME,
    and the distribution is called rllm-NAME.

    A NAME that ends in .py creates only that file, for a workflow, reward, scorer, sampler, estimator, loss or
    correction of your own.
    """
    if name.endswith(".py"):
        folder, made, commands = _file(context, kind, Path(name), into)
    else:
        folder, made, commands = _package(context, kind, name, into)
    if as_json:
        stem = Path(name).stem if name.endswith(".py") else name
        echo_json({"kind": kind, "name": stem, "folder": str(folder), "files": sorted(made), "next": commands})
        return
    click.echo(f"created {kind} {name!r} in {folder}:")
    for path in sorted(made):
        click.echo(f"  {path}")
    click.echo("next:")
    for command in commands:
        click.echo(f"  {command}")


def _package(context: click.Context, kind: str, name: str, into: Path | None) -> tuple[Path, dict[str, str], list[str]]:
    """Writes a package; returns its folder, its files and the commands to run next."""
    names = _checked(name)
    files_of_kind = template(kind)
    _check_free(context, names, files_of_kind)
    folder = into if into is not None else Path(names.distribution)
    made = {names.fill(path): names.fill(text) for path, text in files_of_kind.items()} | {"LICENSE": _license()}
    _write(folder, made)
    install = f"pip install -e {shlex.quote(f'{folder}[dev]')}"
    return folder, made, [install, f"pytest {shlex.quote(str(folder))}", *try_package(kind, names, str(folder))]


def _file(context: click.Context, kind: str, path: Path, into: Path | None) -> tuple[Path, dict[str, str], list[str]]:
    """Writes a single file; returns its folder, itself and the commands to run next."""
    if not KINDS[kind].target:
        alone = ", ".join(name for name, chosen in KINDS.items() if chosen.target)
        raise ConfigError(f"kind {kind} needs a package; give a name without .py. One file is enough for: {alone}")
    if into is not None:
        raise ConfigError("--into is the folder of a package; write the folder of a file into its name: FOLDER/NAME.py")
    names = _checked(path.stem)
    if "-" in names.name:
        raise ConfigError(
            f"name {path.name!r} must be one that Python can import; use {names.name.replace('-', '_')}.py"
        )
    text = single_file(kind)
    _check_free(context, names, {path.name: text})
    if path.exists():
        raise ConfigError(f"{path} exists; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(names.fill(text))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    shown = str(path) if path.is_absolute() else f"./{path}"
    return path.parent, {path.name: names.fill(text)}, try_file(kind, names, shown)


def _checked(name: str) -> PackageNames:
    if name.startswith(("rllm-", "rllm_")):
        raise ConfigError(
            f"name {name!r:.80} must not start with {name[:5]!r}; the package name adds it. Use {name[5:]!r:.80}"
        )
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARACTERS:
        raise ConfigError(
            f"name {name!r:.80} must have lowercase letters and digits, with single - or _ between words, start with a "
            f"letter and have at most {_MAX_NAME_CHARACTERS} characters, such as word_count"
        )
    if keyword.iskeyword(name):
        raise ConfigError(f"name {name!r} is a Python keyword; choose another, such as {name}_task")
    return PackageNames(name)


def _check_free(context: click.Context, names: PackageNames, template: Mapping[str, str]) -> None:
    """Rejects a name that is taken, or that would be ambiguous in a run file or in the new modules."""
    from rllm_core.config import RunConfig
    from rllm_core.plugins import CORE_PLUGIN
    from rllm_core.plugins.discovery import installed_plugins, installed_versions, normalized
    from rllm_core.plugins.missing import first_party
    from rllm_core.providers import KINDS as PROVIDERS

    taken = dict.fromkeys(RunConfig.model_fields, "a key of the run file")
    for provider in PROVIDERS:
        for provided in session(context).plugins.providers(provider).values():
            taken[provided.record.name] = f"the {provider.kind} of {provided.plugin.label}"
    for plugin in installed_plugins():
        taken[plugin.name] = f"the plugin of {plugin.label}"
    for (provider, name), package in first_party().items():
        taken[name] = f"the {provider.kind} of {package}"
        taken[package.removeprefix("rllm-")] = f"the plugin of {package}"
    taken[CORE_PLUGIN] = "the plugin of rllm-core itself"
    for other, what in taken.items():
        if normalized(other) == normalized(names.name):
            raise ConfigError(f"name {names.name!r} is taken: {other!r} is {what}; choose another")
    version = installed_versions().get(names.distribution)
    if version is not None:
        raise ConfigError(f"name {names.name!r} is taken: {names.distribution} {version} is installed; choose another")
    text = "\n".join(template.values())
    for identifier in sorted(set(re.findall(r"\bPlaceholder\w*", text))):
        if re.search(rf"\b{names.fill(identifier)}\b", text):
            raise ConfigError(
                f"name {names.name!r}: class {names.fill(identifier)} would shadow a class of rllm-core; choose another"
            )


def _license() -> str:
    import importlib_metadata

    text = importlib_metadata.distribution("rllm-devkit").read_text("licenses/LICENSE")
    if text is None:
        raise ConfigError("rllm-devkit is installed without its license file, which the package needs; reinstall it")
    return text


def _write(folder: Path, made: Mapping[str, str]) -> None:
    """Writes the files into a new or empty folder."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder; choose another with --into FOLDER")
        for path, text in made.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
