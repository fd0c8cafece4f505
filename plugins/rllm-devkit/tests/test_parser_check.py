"""Tests ``rllm-core parser check``: facts, checks, drift, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

import rllm_devkit.scripted_plugin
from rllm_core.cli import Session
from rllm_core.config import Section
from rllm_core.errors import ConfigError, RunError, UserError
from rllm_core.hookspecs import hookimpl
from rllm_core.plugins import PluginManager
from rllm_core.providers import ParserProvider
from rllm_devkit.commands import parser_check
from rllm_devkit.scripted import ByteParser

HERE = "the_module_of_this_test"


class ForgetfulConfig(Section):
    forget: bool = True


class ForgetfulParser(ByteParser):
    """Drops the last token of every completion if ``forget`` is set."""

    name: ClassVar[str] = "forgetful"
    forget = True

    @classmethod
    def from_model(cls, path: Any, config: Any = None) -> ForgetfulParser:
        if str(path) == "nowhere":
            raise ConfigError("model folder nowhere does not exist")
        parser = cls()
        parser.forget = config.forget
        return parser

    def describe(self) -> dict[str, Any]:
        return {"family": "goldfish", "options": {"bowl": "round", "alone": True}}

    def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **more: Any) -> Any:
        ids = super().bridge_to_next_turn(prompt_ids, completion_ids, new_messages, **more)
        end = len(prompt_ids) + len(completion_ids)
        return [*ids[: end - 1], *ids[end:]] if self.forget and ids is not None else ids


class AnewParser(ByteParser):
    """Renders every turn from scratch."""

    name: ClassVar[str] = "anew"
    supports_bridge = False

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


class Plugin:
    @hookimpl
    def parsers(self) -> list[ParserProvider]:
        config = f"{HERE}:ForgetfulConfig"
        return [
            ParserProvider(name="forgetful", load=f"{HERE}:ForgetfulParser", config=config, summary="Forgets."),
            ParserProvider(name="anew", load=f"{HERE}:AnewParser", summary="Anew."),
        ]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``rllm-core parser check`` with the parsers of the testing plugin and those above."""
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(Plugin(), "parsers-of-the-test")
    session = Session()
    monkeypatch.setitem(session.__dict__, "plugins", plugins)
    monkeypatch.setattr(plugins, "load", _load(plugins.load))
    return lambda *arguments: CliRunner().invoke(parser_check.check, arguments, obj=session)


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Loads the parsers of this module, which cannot be imported by name."""

    def found(provided: Any, path: str | None = None) -> Any:
        module, _, name = (path or provided.record.load).partition(":")
        return globals()[name] if module == HERE else load(provided, path)

    return found


def test_an_exact_parser_ends_with_its_verdict_and_0(check: Callable[..., Result]) -> None:
    result = check("a/model", "--parser", "bytes")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("exact: all 48 turns")
    for part in ("a/model", "257", "[tool, user]", "random tokens", "sessions"):
        assert part in result.output


@pytest.mark.parametrize("answer", [None, "text", {1: 2}, {"a": object()}, {"a": float("nan")}])
def test_a_description_that_is_no_json_is_the_parsers_fault(
    check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(ForgetfulParser, "describe", lambda self: answer)
    result = check("a/model", "--parser", "forgetful")
    assert isinstance(result.exception, RunError)
    assert str(result.exception).startswith("parser 'forgetful': describe() returned ")


def test_a_parser_that_breaks_its_contract_ends_with_1_and_names_what(check: Callable[..., Result]) -> None:
    result = check("a/model", "--parser", "forgetful")
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last == "NOT exact: the parser violates its contract (bridging, sessions)"
    assert "goldfish" in result.output
    assert "bowl = round; alone = yes" in result.output


def test_settings_of_the_parser_are_heeded(check: Callable[..., Result]) -> None:
    assert check("a/model", "--parser", "forgetful", "-o", "forgetful.forget=false").exit_code == 0


def test_a_parser_that_cannot_carry_tokens_on_is_not_exact(check: Callable[..., Result]) -> None:
    result = check("a/model", "--parser", "anew", "--seed", "1")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("NOT exact: ")
    assert "would start a new segment (random tokens" in result.output
    assert "bridge_none" in result.output


def test_json_has_everything(check: Callable[..., Result]) -> None:
    result = check("a/model", "--parser", "forgetful", "--json")
    report = json.loads(result.output)
    assert (report["exact"], result.exit_code) == (False, 1)
    assert report["family"] == "goldfish"
    assert report["stop_tokens"] == [{"id": 257, "text": None}]
    assert {check["name"]: check["outcome"] for check in report["checks"]}["bridging"] == "failed"
    report = json.loads(check("a/model", "--parser", "bytes", "--json").output)
    assert report["exact"] is True
    random_tokens = next(row for row in report["drift"] if row["completions"] == "random tokens")
    assert random_tokens["lost"] == 0 < random_tokens["lost_rerendered"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m", "--parser", "byte"], ["no parser named 'byte'", "bytes"]),
        (["m", "--parser", "bytes", "-o", "bytes.x=1"], ["unknown key 'bytes'", "no settings"]),
        (["m", "--parser", "forgetful", "-o", "forgetful.frget=1"], ["'forgetful.frget'", "'forgetful.forget'"]),
        (["m", "--parser", "forgetful", "-o", "renderer.x=1"], ["unknown key 'renderer'", "[forgetful]"]),
        (["nowhere", "--parser", "forgetful"], ["does not exist"]),
        (["m"], ["--parser NAME"]),
    ],
)
def test_mistakes_are_one_line(check: Callable[..., Result], arguments: list[str], words: list[str]) -> None:
    result = check(*arguments)
    assert isinstance(result.exception, UserError)
    assert all(word in str(result.exception) for word in words), result.exception
    assert "\n" not in str(result.exception)
