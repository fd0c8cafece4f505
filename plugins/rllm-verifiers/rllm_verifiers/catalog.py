"""Finds installed tasksets without importing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

REQUIRES_VERIFIERS = re.compile(r"verifiers(?![\w.-])", re.IGNORECASE)
OWN = "rllm-verifiers"


def variants() -> list[str]:
    """Returns the names of tasksets in verifiers itself, and in installed packages that require it."""
    return sorted({*_of_verifiers(), *_of_packages()})


def _of_verifiers() -> Iterator[str]:
    spec = util.find_spec("verifiers")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in (Path(place) / "v1" / "tasksets").glob("*/__init__.py"):
            yield file.parent.name


def _of_packages() -> Iterator[str]:
    for distribution in metadata.distributions():
        requires = distribution.requires or ()
        if distribution.name == OWN or not any(REQUIRES_VERIFIERS.match(one) for one in requires):
            continue
        for file in distribution.files or ():
            is_module = len(file.parts) == 1 and file.suffix == ".py"
            is_package = len(file.parts) == 2 and file.name == "__init__.py"
            if (is_module or is_package) and _exports_taskset(Path(str(file.locate()))):
                yield file.parts[0].removesuffix(".py")


def _exports_taskset(file: Path) -> bool:
    """Whether a module exports a taskset in its ``__all__``, as verifiers requires."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "__all__" in text and "Taskset" in text
