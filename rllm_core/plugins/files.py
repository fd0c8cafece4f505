"""Providers from the user's own files: ``./env.py:MyEnv`` replaces the name of an installed provider.

Only files that the command line or the run file names are loaded, each once per process and as a separate module.
Other modules in the same folder do not become importable.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, TypeVar

from rllm_core.errors import PluginError
from rllm_core.file_references import file_reference, section_name
from rllm_core.plugins.blame import located
from rllm_core.plugins.listing import PluginInfo, Provided
from rllm_core.plugins.sections import WITH_OPTIONS
from rllm_core.providers import PolicyLossProvider, Provider, RewardFunctionProvider, WorkflowProvider, resolve

ProviderT = TypeVar("ProviderT", bound=Provider)

KINDS: tuple[type[Provider], ...] = (WorkflowProvider, RewardFunctionProvider, *WITH_OPTIONS)
"""Kinds of providers that can come from a file; all other kinds need a package."""


def provided_by_file(kind: type[ProviderT], reference: str) -> Provided[ProviderT]:
    """Loads a file and returns the provider that it contains.

    Args:
        kind: Record class of the provider.
        reference: Absolute path of the file, with ``:NAME`` if it contains several such classes or functions.

    Raises:
        PluginError: If the file does not exist, fails, or does not contain exactly one such class or function.
    """
    path, name = file_reference(reference)
    if kind not in KINDS:
        possible = ", ".join(one.kind for one in KINDS)
        raise PluginError(
            f"{kind.kind} {reference!r}: a file can contain a {possible}, but a {kind.kind} needs a package; create "
            f"one with: rllm-core new {kind.kind} NAME"
        )
    if not path.is_file():
        raise PluginError(f"{kind.kind} {reference!r}: there is no file {path}")
    info = PluginInfo(path.stem, "", "", str(path), "loaded")
    try:
        module = resolve(str(path))
        contract = resolve(kind.contract) if kind.contract else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file that calls sys.exit() is broken, but the process continues
        raise PluginError(f"{kind.kind} {reference!r} cannot be loaded: {located(error, None)}") from error
    own, found = _chosen(kind, module, contract, reference, name)
    fields: dict[str, Any] = {}
    if kind is WorkflowProvider:
        has_section = contract is not None and found.config_model is not contract.config_model
        fields["config"] = f"{path}:{own}.config_model" if has_section else None
        fields["run_file"] = f"{path}:run_file" if inspect.isfunction(getattr(module, "run_file", None)) else None
    elif kind is PolicyLossProvider:
        fields["learns_written"] = bool(getattr(found, "learns_written", False))
    record = kind(
        name=section_name(str(path)),
        load=f"{path}:{own}",  # not its __name__: decorators and lambdas have another
        summary=f"{own} of {path.name}",
        **fields,
    )
    return Provided(record, info)


def _chosen(
    kind: type[Provider], module: ModuleType, contract: type | None, reference: str, name: str | None
) -> tuple[str, Any]:
    """Returns the class or function called ``name``, or the only one of this kind in it, with its name."""
    found = {
        own: value
        for own, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not own.startswith("_") and _is_a(value, contract)
    }
    what = "functions" if contract is None else f"subclasses of {contract.__module__}.{contract.__name__}"
    names = ", ".join(found) or "none"
    unfinished: Any = vars(module).get(name) if name is not None else None
    if not found and contract is not None:
        own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
        unfinished = unfinished or next((value for value in own if inspect.isabstract(value)), None)
    if inspect.isabstract(unfinished):
        missing = ", ".join(sorted(unfinished.__abstractmethods__))
        raise PluginError(f"{kind.kind} {reference!r}: class {unfinished.__name__} must also define {missing}")
    if name is not None and name not in found:
        raise PluginError(f"{kind.kind} {reference!r}: {name} is not one of the file's {what} ({names})")
    if not found:
        raise PluginError(f"{kind.kind} {reference!r}: the file has no {what}; write one, or choose another file")
    if name is None and len(found) > 1:
        raise PluginError(
            f"{kind.kind} {reference!r}: the file has several {what}: {names}; name one, such as "
            f"{reference}:{next(iter(found))}"
        )
    chosen = name or next(iter(found))
    return chosen, found[chosen]


def _is_a(value: Any, contract: type | None) -> bool:
    if contract is None:
        return inspect.isfunction(value)
    return isinstance(value, type) and issubclass(value, contract) and not inspect.isabstract(value)
