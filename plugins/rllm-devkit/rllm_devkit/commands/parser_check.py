"""``rllm-core parser check``: describes a parser for a model, and checks that its conversations stay token-exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import ConfigError
from rllm_core.returned_values import checked, json_object

if TYPE_CHECKING:
    from rllm_core.parser import BaseParser
    from rllm_core.plugins import PluginManager
    from rllm_devkit.checks import CheckResult, Drift


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--parser", "name", metavar="NAME", help="Parser to check. Defaults to the one a run would use.")
@click.option("-o", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Set a key; repeatable.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed for the random completions."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(context: click.Context, model: str, name: str, overrides: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Check that conversations with a model stay token-exact.

    MODEL is a model folder, or a Hugging Face model ID. Checks the parser against its contract on random completions,
    then runs conversations of every kind and compares each prompt with the tokens before it. Reads the tokenizer, not
    the weights. Exits with 1 if the last line starts with NOT exact.
    """
    from rllm_devkit.checks import check_parser, probe_drift

    plugins = session(context).plugins
    name = name or _default_parser(plugins)
    built = _build(plugins, model, name, overrides)
    described = _described(built)
    checks = check_parser(built, seed=seed)
    # Random completions require a working parser.
    drifts = probe_drift(built, seed=seed) if all(result.outcome != "failed" for result in checks) else []
    verdict = _verdict(checks, drifts)
    if as_json:
        echo_json(
            {
                "model": model,
                "parser": name,
                **described,
                "checks": [asdict(result) for result in checks],
                "drift": [asdict(drift) for drift in drifts],
                "exact": verdict.is_exact,
                "verdict": verdict.text,
            }
        )
    else:
        _show(model, name, described, checks, drifts)
        click.echo(verdict.text)
    context.exit(0 if verdict.is_exact else 1)


def _default_parser(plugins: PluginManager) -> str:
    """Returns the parser of a run file that sets neither a parser nor a backend."""
    from rllm_core import providers
    from rllm_core.config import RunConfig

    backend = plugins.providers(providers.BackendProvider).get(RunConfig.model_fields["backend"].default)
    if backend is None or backend.record.default_parser is None:
        raise ConfigError("no default parser; set --parser NAME (run rllm-core parsers for a list)")
    return backend.record.default_parser


def _build(plugins: PluginManager, model: str, name: str, overrides: Sequence[str]) -> BaseParser:
    """Builds the parser as a run with these settings would."""
    from rllm_core import providers
    from rllm_core.run_file import apply_override, toml_key, validated

    provided = plugins.select(providers.ParserProvider, name)
    section = provided.record.name
    tables: dict[str, Any] = {}
    for override in overrides:
        apply_override(tables, override)
    for key in tables:
        if key != section or provided.record.config is None:
            settings = f"its section is [{section}]" if provided.record.config is not None else "it has no settings"
            raise ConfigError(f"unknown key {key!r}; the parser is {name!r} and {settings}")
    config = None
    if provided.record.config is not None:
        keys = plugins.load(provided, provided.record.config)
        config = validated(keys, tables.get(section, {}), toml_key(section), [])
    parser_class: type[BaseParser] = plugins.load(provided)
    return parser_class.from_model(model, config)


def _described(built: BaseParser) -> dict[str, Any]:
    from rllm_devkit.checks.parsers import bridged_tails

    decode = getattr(built.tokenizer, "decode", None)
    stops = [
        {"id": stop, "text": None if decode is None else decode([stop], skip_special_tokens=False)}
        for stop in built.get_stop_token_ids()
    ]
    return {
        **checked(f"parser {built.name!r}", json_object, built.describe(), "describe()"),
        "stop_tokens": stops,
        "supports_tools": built.supports_tools,
        "supports_media": built.supports_media,
        "supports_bridge": built.supports_bridge,
        "bridged_tails": bridged_tails(built) if built.supports_bridge else [],
    }


@dataclass(frozen=True)
class _Verdict:
    is_exact: bool
    text: str


def _verdict(checks: Sequence[CheckResult], drifts: Sequence[Drift]) -> _Verdict:
    failed = [result.name for result in checks if result.outcome == "failed"]
    if failed:
        return _Verdict(False, f"NOT exact: the parser violates its contract ({', '.join(failed)})")
    turns, lost = sum(drift.turns for drift in drifts), sum(drift.lost for drift in drifts)
    rerendered = sum(drift.lost_rerendered for drift in drifts)
    if lost:
        kinds = ", ".join(drift.completions for drift in drifts if drift.lost)
        return _Verdict(False, f"NOT exact: {lost} of {turns} turns would start a new segment ({kinds})")
    return _Verdict(
        True, f"exact: all {turns} turns continue token for token; rendering them again would change {rerendered}"
    )


def _show(
    model: str, name: str, described: Mapping[str, Any], checks: Sequence[CheckResult], drifts: Sequence[Drift]
) -> None:
    stops = [f"{stop['id']} {stop['text'] or ''}".rstrip() for stop in described["stop_tokens"]]
    facts = {"model": model, "parser": name, **described, "stop_tokens": stops}
    echo_table(["property", "value"], [[key.replace("_", " "), _plain(value)] for key, value in facts.items()])
    click.echo()
    echo_table(["check", "result", "seen"], [[r.name, r.outcome, r.detail] for r in checks])
    if drifts:
        click.echo()
        headers = ["completions", "turns", "tokens", "lost", "lost if rendered again", "why"]
        echo_table(headers, [_cells(drift) for drift in drifts])
    click.echo()


def _cells(drift: Drift) -> list[str]:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(drift.reasons.items()))
    lost = [f"{count} ({count / drift.turns:.0%})" for count in (drift.lost, drift.lost_rerendered)]
    return [drift.completions, str(drift.turns), str(drift.completion_tokens), *lost, reasons]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} = {_plain(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(map(_plain, value)) or "none"
    return str(value)
