"""Templates of ``rllm-core new``, and the names of a package that is made from one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

# The command to try each kind, with placeholders as in the templates.
KINDS: dict[str, str] = {
    "workflow": "rllm-core train placeholder --backend local",
    "backend": "rllm-core train sort --backend placeholder -o algorithm.entropy_coefficient=0 "
    "-o optimizer.learning_rate=0.3",
    "engine": "rllm-core eval sort --engine placeholder --parser placeholder",
    "parser": "rllm-core train sort --backend local --parser placeholder",
    "tracker": "rllm-core train sort --backend local -o \"training.trackers=['placeholder']\"",
    "loss": "rllm-core train sort --backend local -o algorithm.loss=placeholder",
}

# Templates are working files, so that they can be formatted and type-checked. These words in the files and their paths
# are replaced by the names of the package.
_PLACEHOLDER = re.compile("rllm_placeholder|rllm-placeholder|Placeholder|placeholder")
# Named pyproject.toml, it would configure tools in the template folder.
_PROJECT_FILE = "pyproject.template.toml"


@dataclass(frozen=True)
class PackageNames:
    """Names of a package, derived from the name that the user gives.

    Attributes:
        name: Name of the provider, the plugin and the run file section, as given: ``word_count``.
    """

    name: str

    @property
    def distribution(self) -> str:
        """Distribution name for pip: ``rllm-word-count``."""
        return "rllm-" + self.name.replace("_", "-")

    @property
    def module(self) -> str:
        """Module name: ``rllm_word_count``."""
        return self.distribution.replace("-", "_")

    @property
    def class_prefix(self) -> str:
        """Prefix of class names: ``WordCount``."""
        return "".join(part.capitalize() for part in re.split("[_-]", self.name))

    def fill(self, text: str) -> str:
        """Replaces the template's names in ``text``."""
        named = {
            "rllm_placeholder": self.module,
            "rllm-placeholder": self.distribution,
            "Placeholder": self.class_prefix,
            "placeholder": self.name,
        }
        return _PLACEHOLDER.sub(lambda found: named[found[0]], text)


def template(kind: str) -> dict[str, str]:
    """Returns the template files of a kind by path, with placeholders for names."""
    return _read(files("rllm_devkit") / "scaffold" / kind)


def _read(folder: Traversable, prefix: str = "") -> dict[str, str]:
    """Reads the files of a template, by path with ``/``."""
    return {path: entry.read_text(encoding="utf-8") for path, entry in _walk(folder, prefix)}


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield prefix + ("pyproject.toml" if entry.name == _PROJECT_FILE else entry.name), entry
        elif entry.name != "__pycache__":  # installers compile the modules they install
            yield from _walk(entry, f"{prefix}{entry.name}/")
