"""Tests the section of a rollout engine, and an engine that wraps another, with the real command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.engines import standalone_engine
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.config import RunConfig, Section
from rllm_core.errors import ConfigError, PluginError
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.providers import EngineProvider
from rllm_devkit.scripted import ByteParser, ScriptedEngine

Run = Callable[..., subprocess.CompletedProcess[str]]

DISTIL = ("algorithm.name=distill", "teacher.engine=biased", "teacher.model=any")


class BiasedConfig(Section):
    """``[biased]``."""

    skill: float = Field(default=0.25, ge=0, le=1, description="How often it says yes.")


class BiasedEngine(ScriptedEngine):
    """Scripted engine with the skill set in its section."""

    name: ClassVar[str] = "biased"

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> BiasedEngine:
        section: BiasedConfig = config.plugins["biased"]
        return cls(parser, skill=section.skill)


class Plugin:
    """The entry module of a package."""

    @hookimpl
    def rollout_engines(self) -> list[EngineProvider]:
        return [
            EngineProvider(
                name="biased",
                load=f"{__name__}:BiasedEngine",
                config=f"{__name__}:BiasedConfig",
                summary="Says yes as often as its section says.",
            )
        ]


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    manager.register(Plugin(), "rllm-biased")
    return manager


@pytest.mark.parametrize("name", ["biased", "rllm-biased/biased"])
def test_an_engine_that_is_asked_for_gets_its_section(plugins: PluginManager, name: str) -> None:
    for overrides, skill in (((), 0.25), ([f'"{name}".skill=0.75'], 0.75)):
        resolved = resolve_run("say_yes", plugins, overrides=overrides, backend="scripted", engine=name)
        assert resolved.config.to_tables()[name] == {"skill": skill}
        engine = standalone_engine(resolved, name, ByteParser())
        assert isinstance(engine, BiasedEngine)
        assert engine.skill == skill


def test_a_teacher_gets_its_section(plugins: PluginManager) -> None:
    config = load_run_config("say_yes", plugins, overrides=[*DISTIL, "biased.skill=1"], backend="scripted")
    assert config.to_tables()["biased"] == {"skill": 1.0}
    assert load_run_config("say_yes", plugins, overrides=DISTIL, backend="scripted").plugins["biased"].skill == 0.25


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("biased.skil=1", "unknown key 'biased.skil'; did you mean 'biased.skill'?"),
        ("biased.skill=2", "biased.skill = 2: must be less than or equal to 1"),
        ("biased=2", r"biased = 2: must be a section \[biased\]"),
    ],
)
def test_its_keys_are_checked_like_any_other(plugins: PluginManager, override: str, complaint: str) -> None:
    for more, engine in ((DISTIL, None), ((), "biased"), ((), None)):
        with pytest.raises(ConfigError, match=complaint):
            load_run_config("say_yes", plugins, overrides=[*more, override], backend="scripted", engine=engine)


def test_an_engine_without_settings_says_so(plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'scripted'; .* has no settings"):
        load_run_config("say_yes", plugins, overrides=["scripted.x=1"], backend="scripted", engine="scripted")
    with pytest.raises(PluginError, match="did you mean 'biased'"):
        load_run_config("say_yes", plugins, backend="scripted", engine="biassed")


def calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_an_engine_that_wraps_another_packages_is_evaluated(rllm_core: Run, tmp_path: Path) -> None:
    from rllm_local.starter import starter_model

    packages, model = ("rllm-proxy",), str(starter_model())
    given = ("eval", "sort", "--engine", "proxy", "--model", model, "--tasks=3", "-n2", "--json")
    missing = rllm_core(*given, packages=packages)
    assert missing.returncode == 2
    assert missing.stderr == "error: proxy.engine is missing; set it: Name of the engine that answers.\n"
    settings = ("-o", "proxy.engine=local", "-o", "proxy.record=calls.jsonl", "-o", "local.max_batch_rows=2")
    done = rllm_core(*given, *settings, packages=packages)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failed"] == 0
    assert sum(call["completions"] for call in calls(tmp_path / "calls.jsonl")) == 6


@pytest.mark.slow
def test_an_engine_that_wraps_another_packages_teaches(rllm_core: Run, tmp_path: Path) -> None:
    from rllm_local.starter import starter_model

    model = str(starter_model())
    pairs = {
        "model.path": model,
        "algorithm.name": "distill",
        "teacher.engine": "proxy",
        "teacher.model": model,
        "proxy.engine": "local",
        "proxy.record": "calls.jsonl",
        "training.steps": "1",
        "training.groups_per_step": "2",
        "training.rollouts_per_group": "2",
        "training.validation_rollouts": "0",
    }
    overrides = [part for key, value in pairs.items() for part in ("-o", f"{key}={value}")]
    arguments = ("train", "sort", "--backend", "local", *overrides, "--json")
    planned = rllm_core(*arguments, "--dry-run", packages=("rllm-proxy",))
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["resolved"]["proxy"] == {"engine": "local", "record": "calls.jsonl"}
    done = rllm_core(*arguments, "--run-dir", "run", packages=("rllm-proxy",))
    assert done.returncode == 0, done.stderr
    assert '[proxy]\nengine = "local"' in (tmp_path / "run" / "run.toml").read_text()
    assert {call["call"] for call in calls(tmp_path / "calls.jsonl")} == {"score"}


@pytest.mark.slow
def test_its_check_says_what_it_needs_and_passes_with_it(rllm_core: Run) -> None:
    from rllm_local.starter import starter_model

    arguments = ("plugins", "check", "proxy", "--json")
    only = {"RLLM_PLUGINS": "proxy,devkit,local,renderers"}  # it probes all that are installed
    unset = rllm_core(*arguments, packages=("rllm-proxy",), **only)
    assert unset.returncode == 1, unset.stdout
    [engine] = [group for group in json.loads(unset.stdout)["groups"] if group["kind"] == "engine"]
    assert engine["outcome"] == "failed"
    assert engine["checks"] == [
        {
            "name": "built",
            "outcome": "failed",
            "detail": "it has settings without a default; pass -o proxy.engine=VALUE",
        }
    ]
    settings = ("-o", "proxy.engine=local", "-o", "parser=chat_template", "--model", str(starter_model()))
    passed = rllm_core(*arguments, *settings, packages=("rllm-proxy",), **only)
    assert passed.returncode == 0, passed.stdout
    [engine] = [group for group in json.loads(passed.stdout)["groups"] if group["kind"] == "engine"]
    assert engine["outcome"] == "passed"
    assert "scores" in [check["name"] for check in engine["checks"] if check["outcome"] == "passed"]
