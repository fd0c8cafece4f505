"""Templates of ``rllm-core new``, and the names that replace their placeholders."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable


@dataclass(frozen=True)
class Kind:
    """A kind of package that ``rllm-core new`` creates.

    Attributes:
        description: Description of the package.
        dependencies: Requirements of the package.
        commands: Commands to try the result. ``{provider}`` is its name or, for a single file, its path and `target`;
            ``{examples}`` is a file with questions.
        target: Function or class that a run file names, if a single file works without a package.
        examples: File with questions, relative to the package.
        shares: Folders of files that several kinds share.
    """

    description: str
    dependencies: tuple[str, ...]
    commands: tuple[str, ...]
    target: str = ""
    examples: str = ""
    shares: tuple[str, ...] = ("common",)


CORE = "rllm-core>=0.1"
CLICK, NUMPY, PYDANTIC = "click>=8.1", "numpy>=1.26", "pydantic>=2.7"

KINDS: dict[str, Kind] = {
    "workflow": Kind(
        "A workflow for rllm-core: spell a word backwards",
        (PYDANTIC, CORE),
        ("rllm-core train {provider} --backend local",),
        target="PlaceholderWorkflow",
    ),
    "reward": Kind(
        "A reward function for rllm-core: the answer, or characters in the right place",
        (CORE,),
        (
            "rllm-core train dataset --backend local -o dataset.train_file={examples} -o dataset.reward={provider} "
            "-o optimizer.learning_rate=1e-3 -o rollout.max_response_tokens=6",
        ),
        target="score",
        examples="tests/examples.jsonl",
    ),
    "estimator": Kind(
        "An advantage estimator for rllm-core: distance from the median",
        (NUMPY, PYDANTIC, CORE),
        ("rllm-core train sort --backend local -o algorithm.name={provider}",),
        target="PlaceholderEstimator",
    ),
    "loss": Kind(
        "A policy loss for rllm-core: policy gradient with a saturating ratio",
        (PYDANTIC, "rllm-core[torch]>=0.1"),
        ("rllm-core train sort --backend local -o algorithm.loss={provider}",),
        target="PlaceholderLoss",
    ),
    "correction": Kind(
        "An off-policy correction for rllm-core: fades out tokens that have moved",
        (NUMPY, PYDANTIC, CORE),
        (
            "rllm-core train sort --backend local -o training.trigger_parameter_sync_step=2 "
            '-o algorithm.proximal_policy=forward -o algorithm.corrections=["{provider}"]',
        ),
        target="PlaceholderCorrection",
    ),
    "scorer": Kind(
        "A group scorer for rllm-core: the rank of a rollout among those of its task",
        (PYDANTIC, CORE),
        ("rllm-core train sort --backend local -o algorithm.group_scorer={provider}",),
        target="PlaceholderScorer",
    ),
    "sampler": Kind(
        "A task sampler for rllm-core: tasks that were not solved come sooner again",
        (PYDANTIC, CORE),
        ("rllm-core train sort --backend local -o training.sampler={provider}",),
        target="PlaceholderSampler",
    ),
    "backend": Kind(
        "A training backend for rllm-core: a table of logits in numpy",
        (NUMPY, PYDANTIC, CORE),
        (
            "rllm-core train sort --backend {provider} -o algorithm.entropy_coefficient=0 "
            "-o optimizer.learning_rate=0.3",
        ),
        shares=("common", "bytes"),
    ),
    "engine": Kind(
        "A rollout engine for rllm-core: a table of logits in numpy",
        (NUMPY, PYDANTIC, CORE),
        ("rllm-core eval sort --engine {provider} --parser {provider}",),
        shares=("common", "bytes"),
    ),
    "parser": Kind(
        "A parser for rllm-core: ChatML with the model's own tokenizer",
        (PYDANTIC, CORE, "tokenizers>=0.21", "transformers>=5.0"),
        ("rllm-core train sort --backend local --parser {provider}",),
    ),
    "tracker": Kind(
        "A metrics tracker for rllm-core: one CSV file per run",
        (PYDANTIC, CORE),
        ('rllm-core train sort --backend local -o training.trackers=["{provider}"]',),
    ),
    "sandbox": Kind(
        "A sandbox for rllm-core: programs in processes with limits",
        (CORE,),
        ("rllm-core plugins check {provider}",),
    ),
    "command": Kind(
        "A command for rllm-core: the rewards of a run as bars",
        (CLICK, CORE),
        (
            "rllm-core train sort --backend local --run-dir runs/{provider}",
            "rllm-core {provider} runs/{provider}",
        ),
    ),
    "observer": Kind(
        "An observer for rllm-core: one line per optimizer step",
        (CORE,),
        (
            "rllm-core train sort --backend local --run-dir runs/{provider}",
            "cat runs/{provider}/{provider}.log",
        ),
    ),
}

# Templates are working files, so that they can be formatted and type-checked. In files and paths, the package's names
# replace these words.
_PLACEHOLDER = re.compile("rllm_placeholder|rllm-placeholder|Placeholder|placeholder")
# Under the name pyproject.toml, it would configure tools in the template folder.
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
    chosen = KINDS[kind]
    found: dict[str, str] = {}
    for folder in (*chosen.shares, kind):
        found |= _read(files("rllm_devkit") / "scaffold" / folder)
    project = found["pyproject.toml"].replace('"DESCRIPTION"', json.dumps(chosen.description))
    found["pyproject.toml"] = project.replace('["DEPENDENCIES"]', json.dumps(list(chosen.dependencies)))
    return found


def single_file(kind: str) -> str:
    """Returns the template of a single file, which is the package's module."""
    return template(kind)[f"rllm_placeholder/{kind}.py"]


def try_package(kind: str, names: PackageNames, folder: str) -> list[str]:
    """Returns the commands for trying a package in ``folder``."""
    return _commands(kind, names.name, f"{folder}/{KINDS[kind].examples}")


def try_file(kind: str, names: PackageNames, path: str) -> list[str]:
    """Returns the commands for trying a single file."""
    return _commands(kind, f"{path}:{names.fill(KINDS[kind].target)}", "QUESTIONS.jsonl")


def _commands(kind: str, provider: str, examples: str) -> list[str]:
    def filled(word: str) -> str:
        return word.replace("{provider}", provider).replace("{examples}", examples)

    return [shlex.join(map(filled, command.split())) for command in KINDS[kind].commands]


def _read(folder: Traversable, prefix: str = "") -> dict[str, str]:
    """Reads the files of a template, by path with ``/``."""
    return {path: entry.read_text(encoding="utf-8") for path, entry in _walk(folder, prefix)}


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield prefix + ("pyproject.toml" if entry.name == _PROJECT_FILE else entry.name), entry
        elif entry.name != "__pycache__":  # installers compile the modules they install
            yield from _walk(entry, f"{prefix}{entry.name}/")
