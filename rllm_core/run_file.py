"""Reads, overrides, validates and writes run files in TOML, with one-line errors."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from rllm_core.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)

_FOREIGN_KEYS_FILE = Path(__file__).with_name("foreign_keys.toml")


class Section(BaseModel):
    """Base class of every section, including plugin sections: frozen; an unknown key is an error that suggests one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Preset(NamedTuple):
    """Settings of a workflow's own run file, which may depend on the user's settings.

    Attributes:
        tables: Tables of a run file.
        reason: Reason for these settings, for ``--dry-run``.
    """

    tables: Mapping[str, Any]
    reason: str


def to_toml(tables: Mapping[str, Any], remarks: Mapping[str, str] | None = None) -> str:
    """Writes nested tables as TOML (the subset a run file uses: scalars, lists, tables).

    ``remarks`` become comments after values, by dotted key as in `leaf_keys`.
    """
    lines: list[str] = []

    def write(table: Mapping[str, Any], path: str) -> None:
        scalars = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
        if path and (scalars or not table):
            lines.extend(["", f"[{path}]"])
        for key, value in scalars.items():
            line = f"{toml_key(key)} = {_toml_value(value)}"
            remark = (remarks or {}).get(f"{path}.{toml_key(key)}" if path else toml_key(key))
            lines.append(f"{line:<40}  # {remark}" if remark else line)
        for key, value in table.items():
            if isinstance(value, Mapping):
                write(value, f"{path}.{toml_key(key)}" if path else toml_key(key))

    write(tables, "")
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_key(key: str) -> str:
    """Formats a key for TOML, quoted where needed."""
    bare = key.replace("-", "").replace("_", "").isalnum() and key.isascii()
    return key if bare else _toml_string(key)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(f"{value!r} cannot be written as TOML")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors on Windows write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"run file {path} is not valid TOML: {_one_line(error)}") from error


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Sets one ``section.key=value`` in ``tables``; a value that is not TOML is a string."""
    key, equals, text = override.partition("=")
    form = f"-o {override!r} must have the form section.key=value"
    if override.startswith(("+", "~")):
        form += f"; leave out Hydra's {override[0]}: every key exists, and one that is not set has its default"
    if not equals:
        raise ConfigError(form)
    parts = _parts(key, form)
    value = _override_value(text.strip(), override)
    for part in parts[:-1]:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"-o {override!r}: {part} is a value, not a section")
    tables[parts[-1]] = value


def tables_of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of settings from Python: ``{"training.steps": 5}`` or ``{"training": {"steps": 5}}``.

    Raises:
        ConfigError: If it is no mapping, a key is malformed, or a value is a function or a class.
    """
    if not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise ConfigError(f"settings must be a dictionary such as {{'training.steps': 5}}, got {kind}")
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        form = f"settings: the key {key!r} must have the form 'section.key'"
        if not isinstance(key, str):
            raise ConfigError(form)
        *outer, last = _parts(key, form)
        nested: Any = {last: _plain(value, key)}
        for part in reversed(outer):
            nested = {part: nested}
        tables = merged(tables, nested)
    return tables


def _plain(value: Any, key: str) -> Any:
    """Converts a Python value to one that a run file can contain."""
    if isinstance(value, Mapping):
        return {name: _plain(content, f"{key}.{name}") for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch, such as one of a sweep
        return value.item()
    if callable(value):
        raise ConfigError(
            f"settings: {key} is a function or class of this program, which other processes of a run cannot import; "
            "write it to a file, and set the path of the file, such as './score.py'"
        )
    return str(value) if isinstance(value, Path) else value


def _parts(key: str, form: str) -> list[str]:
    """Splits a dotted key as TOML does; ``form`` is the error message for a malformed key."""
    try:
        parts = list(_path(tomllib.loads(f"{key} = 0"))) if "\n" not in key else []
    except tomllib.TOMLDecodeError:
        parts = []
    if not parts:
        raise ConfigError(form)
    return parts


def _path(tables: dict[str, Any]) -> Iterator[str]:
    """Yields the keys that lead to the only value in nested tables."""
    while tables:
        key, tables = next(iter(tables.items()))
        yield key


def _override_value(text: str, override: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"-o {override!r}: the value is not valid TOML: {_one_line(error)}") from None
        return text
    return read["value"] if len(read) == 1 else text


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges ``over`` into a copy of ``base``, table by table."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def validated(model: type[ModelT], table: Any, path: str, core_keys: Sequence[str]) -> ModelT:
    """Validates the table at ``path`` as ``model``.

    ``path`` is "" for the whole file. ``core_keys``, as ``section.key``, are for suggestions.

    Raises:
        ConfigError: For the first problem found.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} = {shown(table)}: must be a section [{path}]")
    try:
        # Strict: rejects 1 for true and "5" for 5. As JSON: still accepts lists as tuples and strings as paths.
        return model.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(model, error.errors()[0], path, core_keys)) from None


_WANTED = {
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string in quotes",
    "tuple_type": "must be a list [...]",
    "list_type": "must be a list [...]",
    "set_type": "must be a list [...]",
}


def _explain(model: type[BaseModel], error: Any, path: str, core_keys: Sequence[str]) -> str:
    """Formats a pydantic error as one line."""
    where = [str(part) for part in error["loc"]]
    key = ".".join([path, *where] if path else where)
    kind, message = error["type"], _one_line(error["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        section = _section_at(model, where[:-1])
        prefix = key.rpartition(".")[0]
        siblings = [f"{prefix}.{name}" if prefix else name for name in _fields(section)]
        return unknown_key(key, siblings, core_keys, error["input"])
    if kind == "json_invalid":
        return f"{path or 'the run file'}: {message}"
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    if kind == "missing":
        field = _fields(_section_at(model, where[:-1])).get(where[-1])
        description = field.description if field is not None else None
        return f"{key} is missing" if description is None else f"{key} is missing; set it: {_one_line(description)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key} = {shown(error['input'])}: must be a section [{key}]"
    wanted = _WANTED.get(kind) or f"{message[:1].lower()}{message[1:]}".replace("input should", "must")
    return f"{key} = {shown(error['input'])}: {wanted}"


def shown(value: Any) -> str:
    """Formats a value as in the run file, shortened to 80 characters."""
    try:
        text = _toml_value(value)
    except TypeError:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _section_at(model: type[BaseModel], where: Sequence[str]) -> type[BaseModel] | None:
    """Returns the model of a nested section; None if it is ambiguous, such as a union of several models."""
    section: type[BaseModel] | None = model
    is_table = False
    for part in where:
        if is_table:  # a name that the user chose, such as a kind of cost
            is_table = False
            continue
        field = section.model_fields.get(part) if section is not None else None
        if field is not None:
            section, is_table = model_in(field.annotation), get_origin(field.annotation) is dict
        elif not part.isdigit():  # an index into a list of sections keeps the list's model
            return None
    return section


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the only model in an annotation, looking through ``| None`` and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inside = [found for found in map(model_in, get_args(annotation)) if found is not None]
    return inside[0] if len(inside) == 1 else None


def _fields(model: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """Returns the fields of a section by their keys."""
    if model is None:
        return {}
    return {field.alias or name: field for name, field in model.model_fields.items() if not field.exclude}


def unknown_key(key: str, siblings: Sequence[str], elsewhere: Sequence[str], value: Any = None) -> str:
    """Builds the error for an unknown key. Suggests our key for a setting of another library, or the nearest key.

    Args:
        key: Unknown key, with its section.
        siblings: Allowed keys of that section.
        elsewhere: Keys of the core.
        value: Value of the key; if it is an unknown section, its keys may be settings of another library.
    """
    name = key.rpartition(".")[2]
    near = _nearest(name, siblings, 0.85)
    if not near:
        for path in leaf_keys(value, key):
            if foreign := _foreign(path):
                return foreign
        near = (
            _nearest(name, siblings, 0.75)
            or _nearest(name, elsewhere, 0.8)
            or _nearest(name, siblings, 0.55)
            or _nearest(name, elsewhere, 0.75)
        )
    if near:
        return f"unknown key {key!r}; did you mean {near!r}?"
    return f"unknown key {key!r}" + ("; allowed: " + ", ".join(sorted(siblings)) if siblings else "")


@cache
def foreign_keys() -> dict[str, dict[str, Any]]:
    """Returns settings of other libraries by name: the library (``of``), our key to ``use``, and a ``note``."""
    return tomllib.loads(_FOREIGN_KEYS_FILE.read_text(encoding="utf-8"))


def _foreign(key: str) -> str:
    """Returns the error for a setting of another library; "" if the key is not one."""
    name = key.rpartition(".")[2]
    found = foreign_keys().get(name)
    if found is None:
        return ""
    ours = f"is {' and '.join(found['use'])} here" if found["use"] else "has no counterpart here"
    note = f": {found['note']}" if "note" in found else ""
    return f"unknown key {key!r}; {name} of {found['of']} {ours}{note}"


def leaf_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yields the dotted keys of the values in nested tables below ``key``; only ``key`` if ``value`` is not a table."""
    if not isinstance(value, Mapping):
        yield key
        return
    for name, content in value.items():
        yield from leaf_keys(content, f"{key}.{toml_key(name)}" if key else toml_key(name))


def _nearest(name: str, keys: Sequence[str], cutoff: float) -> str:
    """Returns the key whose last part is most similar to ``name``; "" if none reaches ``cutoff``."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=cutoff)
    return by_name[near[0]] if near else ""
