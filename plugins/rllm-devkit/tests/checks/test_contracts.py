"""Tests of the pytest contract classes: the core's providers pass, and violations are reported check by check."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rllm_core import providers
from rllm_core.plugins import PluginManager
from rllm_devkit import scripted_plugin as scripted
from rllm_devkit.checks.check_names import BUILT, checks_of
from rllm_devkit.checks.hosts import ROLLOUT_HOST_CHECKS
from rllm_devkit.checks.provided import Request, check_provided
from rllm_devkit.contracts import (
    AdvantageEstimatorContract,
    CorrectionContract,
    ParserContract,
    PolicyLossContract,
    RolloutHostContract,
    SandboxContract,
    WorkflowContract,
)


class TestBytes(ParserContract):
    name: ClassVar[str] = "bytes"


class TestReturnToGo(AdvantageEstimatorContract):
    name: ClassVar[str] = "return_to_go"
    overrides: ClassVar[tuple[str, ...]] = ("algorithm.estimator_options.baseline='group'",)


class TestTokenTIS(CorrectionContract):
    name: ClassVar[str] = "token_tis"


class TestPPOClip(PolicyLossContract):
    name: ClassVar[str] = "ppo_clip"
    overrides: ClassVar[tuple[str, ...]] = ("algorithm.loss_options.clip_low=0.1",)


@pytest.mark.slow
class TestGuess(WorkflowContract):
    name: ClassVar[str] = "guess"
    overrides: ClassVar[tuple[str, ...]] = ("guess.high=3",)
    answers: ClassVar[tuple[str, ...]] = ("2",)


@pytest.mark.slow
class TestChild(SandboxContract):
    name: ClassVar[str] = "child"


@pytest.mark.slow
class TestInline(RolloutHostContract):
    name: ClassVar[str] = "inline"


@pytest.mark.slow
class TestProcesses(RolloutHostContract):
    name: ClassVar[str] = "processes"
    overrides: ClassVar[tuple[str, ...]] = ("rollout.workers=2",)

    def test_nothing_is_skipped(self) -> None:
        found = self._results()
        assert set(found) >= set(ROLLOUT_HOST_CHECKS)
        assert {name for name, result in found.items() if result.outcome != "passed"} == set()


AUTHOR = """
from rllm_devkit.contracts import *


class TestScripted(EngineContract):
    name = "scripted"

    def test_of_their_own(self, tmp_path):
        assert tmp_path.is_dir()


class TestWithoutSettings(WorkflowContract):
    name = "sft"


class TestMisspelt(CorrectionContract):
    name = "token_tiss"


class TestWrongSettings(AdvantageEstimatorContract):
    name = "grpo"
    overrides = ("algorithm.estimator_options.no_such_option=1",)
"""


def pytest_of(text: str, folder: Path) -> tuple[int, str]:
    """Runs tests the way a plugin author would."""
    path = folder / "test_mine.py"
    path.write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", str(path)]
    environ = {**os.environ, "COLUMNS": "200", "RLLM_PLUGINS": "workflows"}
    run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    return run.returncode, run.stdout


@pytest.mark.slow
def test_what_breaks_a_contract_says_so_check_by_check(tmp_path: Path) -> None:
    code, said = pytest_of(AUTHOR, tmp_path)
    assert code == 1
    assert "test_mine.py::TestScripted::test_contract[greedy] PASSED" in said
    assert "test_mine.py::TestScripted::test_contract[vocabulary] FAILED" in said
    assert "engine 'scripted': vocabulary: a prompt with token id 2147483647 must raise" in said
    assert "test_mine.py::TestScripted::test_of_their_own PASSED" in said
    assert "test_mine.py::TestWithoutSettings::test_contract[built] FAILED" in said
    assert "workflow 'sft' cannot be checked: it has settings without a default; pass -o sft.train=VALUE" in said
    assert "workflow 'sft' could not be built" in said
    assert "no correction named 'token_tiss'; did you mean 'token_tis'?" in said
    assert "no_such_option" in said


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment()
    manager.register(scripted, "testing")
    return manager


@pytest.mark.parametrize(
    ("kind", "name", "request_"),
    [
        (providers.ParserProvider, "bytes", Request()),
        (providers.EngineProvider, "scripted", Request()),
        (providers.BackendProvider, "scripted", Request()),
        (providers.AdvantageEstimatorProvider, "grpo", Request()),
        (providers.PolicyLossProvider, "gspo", Request()),
        (providers.CorrectionProvider, "icepop", Request()),
        pytest.param(providers.SandboxProvider, "child", Request(), marks=pytest.mark.slow),
        pytest.param(providers.RolloutHostProvider, "inline", Request(), marks=pytest.mark.slow),
        pytest.param(providers.WorkflowProvider, "say_yes", Request(), marks=pytest.mark.slow),
    ],
)
def test_results_have_the_names_that_are_told_before(
    plugins: PluginManager, kind: type[providers.Provider], name: str, request_: Request, tmp_path: Path
) -> None:
    found = check_provided(plugins, plugins.select(kind, name), request_, tmp_path)
    assert tuple(result.name for result in found) == checks_of(kind)
    assert found[0].name == BUILT


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (providers.WorkflowProvider, "sft", "pass -o sft.train=VALUE"),
        (providers.ParserProvider, "chat_template", "pass --model PATH"),
        (providers.ParserProvider, "renderer", "pass --model PATH"),
    ],
)
def test_what_needs_settings_says_which_and_passes_nothing(
    plugins: PluginManager, kind: type[providers.Provider], name: str, words: str, tmp_path: Path
) -> None:
    [result] = check_provided(plugins, plugins.select(kind, name), Request(), tmp_path)
    assert result.outcome == "failed"
    assert words in result.detail


@pytest.mark.parametrize(
    ("export", "words"), [("json:no_such_function", "no_such_function"), ("math:pi", "a function")]
)
def test_the_export_of_a_backend_is_imported(plugins: PluginManager, export: str, words: str, tmp_path: Path) -> None:
    provided = plugins.select(providers.BackendProvider, "scripted")
    provided = replace(provided, record=replace(provided.record, export=export))
    [result] = check_provided(plugins, provided, Request(), tmp_path)
    assert (result.name, result.outcome) == (BUILT, "failed")
    assert words in result.detail


def test_settings_of_the_provider_reach_it(plugins: PluginManager, tmp_path: Path) -> None:
    provided = plugins.select(providers.WorkflowProvider, "guess")
    wrong = check_provided(plugins, provided, Request(overrides=("guess.low=9",)), tmp_path)
    assert [(result.outcome, "low = 9 must be less than" in result.detail) for result in wrong] == [("failed", True)]


@pytest.mark.slow
def test_importing_the_checks_needs_no_pytest(tmp_path: Path) -> None:
    code = (
        "import sys, rllm_devkit.checks, rllm_devkit.checks.provided; "
        "sys.exit('pytest' in sys.modules or 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, timeout=120, check=False)
    assert run.returncode == 0
