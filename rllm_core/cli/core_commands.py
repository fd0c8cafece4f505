"""Commands of the core: their modules and one-line summaries."""

from __future__ import annotations

from rllm_core.providers import CommandProvider

COMMANDS = {
    "train": ("train:train", "Train a model on a workflow."),
    "eval": ("eval:evaluate", "Evaluate a model on a workflow (pass@k)."),
    "plugins": ("plugins:plugins", "List and manage plugins."),
    "plugins show": ("plugins:show", "Show all details of one plugin."),
    "plugins enable": ("plugins:enable", "Re-enable a disabled plugin."),
    "plugins disable": ("plugins:disable", "Disable a plugin for all runs."),
    "backends": ("backends:backends", "List backends and their capabilities."),
    "engines": ("plugins:engines", "List rollout engines."),
    "parsers": ("plugins:parsers", "List parsers."),
    "parser": ("plugins:parser", "Check a parser with a model's tokenizer."),
    "workflows": ("plugins:workflows", "List workflows."),
    "algorithms": ("algorithms:algorithms", "List estimators, losses, corrections, group scorers and task samplers."),
    "doctor": ("doctor:doctor", "Check versions and known conflicts."),
    "completion": ("completion:completion", "Print a shell completion script."),
}
CORE_COMMANDS = {
    name: CommandProvider(name=name, load=f"rllm_core.cli.{path}", summary=summary)
    for name, (path, summary) in COMMANDS.items()
}
