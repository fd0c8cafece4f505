"""Contract checks as pytest classes: name a provider, and each check of its kind becomes a test.

    from rllm_devkit.contracts import WorkflowContract


    class TestMine(WorkflowContract):
        name = "mine"

Install your plugin first; the provider is selected the same way as on the command line. Needs pytest:
``pip install 'rllm-core[testing]'``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rllm_devkit.scripted_plugin
from rllm_core import providers
from rllm_core.plugins import PluginManager
from rllm_devkit.checks.check_names import BUILT, checks_of
from rllm_devkit.checks.provided import Request, check_provided
from rllm_devkit.checks.results import CheckResult

__all__ = [
    "AdvantageEstimatorContract",
    "BackendContract",
    "CommandContract",
    "CorrectionContract",
    "EngineContract",
    "GroupScorerContract",
    "ParserContract",
    "PolicyLossContract",
    "RewardFunctionContract",
    "RolloutHostContract",
    "SandboxContract",
    "TaskSamplerContract",
    "TrackerContract",
    "WorkflowContract",
]


class _Contract:
    """Base class of the contracts.

    Attributes:
        name: Name of the provider, as in a run file.
        overrides: Settings as ``"section.key=value"``, like ``-o``. Defaults should suffice as a rule.
        kind: Record class of the provider.
    """

    name: ClassVar[str] = ""
    overrides: ClassVar[Sequence[str]] = ()
    kind: ClassVar[type[providers.Provider]]
    _found: ClassVar[dict[str, CheckResult]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generates one test per check."""
        if "check" in metafunc.fixturenames:
            metafunc.parametrize("check", checks_of(self.kind))

    def test_contract(self, check: str) -> None:
        """Reports one check; the first test runs all of them."""
        found = self._results()
        built = found[BUILT]
        if built.outcome != "passed":
            if check == BUILT:
                pytest.fail(f"{self.kind.kind} {self.name!r} cannot be checked: {built.detail}", pytrace=False)
            pytest.skip(f"{self.kind.kind} {self.name!r} could not be built")
        result = found[check]
        if result.outcome == "skipped":
            pytest.skip(result.detail)
        if result.outcome == "failed":
            pytest.fail(f"{self.kind.kind} {self.name!r}: {check}: {result.detail}", pytrace=False)

    @classmethod
    def _results(cls) -> dict[str, CheckResult]:
        if "_found" not in cls.__dict__:
            plugins = PluginManager.from_environment()
            plugins.register(rllm_devkit.scripted_plugin, "testing")
            provided = plugins.select(cls.kind, cls.name)
            with tempfile.TemporaryDirectory(prefix="rllm-contract-") as folder:
                results = check_provided(plugins, provided, cls._request(), Path(folder))
            cls._found = {result.name: result for result in results}
        return cls._found

    @classmethod
    def _request(cls) -> Request:
        return Request(overrides=tuple(cls.overrides))


class WorkflowContract(_Contract):
    """The contract of `rllm_core.workflow.Workflow`.

    Attributes:
        answers: Answers that fit its tasks; see `rllm_devkit.checks.check_workflow`.
    """

    kind: ClassVar[type[providers.Provider]] = providers.WorkflowProvider
    answers: ClassVar[Sequence[str]] = ()

    @classmethod
    def _request(cls) -> Request:
        return Request(overrides=tuple(cls.overrides), answers=tuple(cls.answers))


class RolloutHostContract(_Contract):
    """The contract of `rllm_core.hosts.contract.RolloutHost`."""

    kind: ClassVar[type[providers.Provider]] = providers.RolloutHostProvider


class TrackerContract(_Contract):
    """The contract of `rllm_core.tracker.Tracker`.

    Attributes:
        local: Whether it writes only below the run folder.
    """

    kind: ClassVar[type[providers.Provider]] = providers.TrackerProvider
    local: ClassVar[bool] = False

    @staticmethod
    def read(run_dir: Path) -> Mapping[str, Sequence[tuple[int, float]]]:
        """Reads the metrics a run recorded; see `rllm_devkit.checks.check_tracker`. Override it to check them."""
        raise NotImplementedError

    @classmethod
    def _request(cls) -> Request:
        read = None if cls.read is TrackerContract.read else cls.read
        return Request(overrides=tuple(cls.overrides), read=read, local=cls.local)


class _WithModel(_Contract):
    """Base class for providers that need a model.

    Attributes:
        model: Folder or Hugging Face model ID. A class fixture may set it before the first test.
    """

    model: ClassVar[str | Path] = ""
    logprob_tolerance: ClassVar[float] = 1e-4

    @classmethod
    def _request(cls) -> Request:
        return Request(overrides=tuple(cls.overrides), model=str(cls.model), logprob_tolerance=cls.logprob_tolerance)


class ParserContract(_WithModel):
    """The contract of `rllm_core.parser.BaseParser`; set ``model`` if the parser reads a tokenizer."""

    kind: ClassVar[type[providers.Provider]] = providers.ParserProvider


class EngineContract(_WithModel):
    """The contract of `rllm_core.engine.RolloutEngine`, for engines that work without a backend."""

    kind: ClassVar[type[providers.Provider]] = providers.EngineProvider


class BackendContract(_WithModel):
    """The contract of `rllm_core.backend.BackendProtocol`, and of its engine.

    Attributes:
        logprob_tolerance: Maximum log-probability difference between trainer and engine. Raise it for lower precision.
    """

    kind: ClassVar[type[providers.Provider]] = providers.BackendProvider


class AdvantageEstimatorContract(_Contract):
    """The contract of `rllm_core.algorithms.advantages.AdvantageEstimator`."""

    kind: ClassVar[type[providers.Provider]] = providers.AdvantageEstimatorProvider


class PolicyLossContract(_Contract):
    """The contract of `rllm_core.algorithms.torch_losses.PolicyLoss`; needs torch."""

    kind: ClassVar[type[providers.Provider]] = providers.PolicyLossProvider


class CorrectionContract(_Contract):
    """The contract of `rllm_core.algorithms.corrections.Correction`."""

    kind: ClassVar[type[providers.Provider]] = providers.CorrectionProvider


class GroupScorerContract(_Contract):
    """The contract of `rllm_core.algorithms.group_scorer.GroupScorer`."""

    kind: ClassVar[type[providers.Provider]] = providers.GroupScorerProvider


class TaskSamplerContract(_Contract):
    """The contract of `rllm_core.algorithms.task_sampler.TaskSampler`."""

    kind: ClassVar[type[providers.Provider]] = providers.TaskSamplerProvider


class RewardFunctionContract(_Contract):
    """The contract of a reward function; see `rllm_devkit.checks.check_reward_function`.

    Attributes:
        tasks: Data of tasks that the function can reward.
    """

    kind: ClassVar[type[providers.Provider]] = providers.RewardFunctionProvider
    tasks: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    def _request(cls) -> Request:
        return Request(overrides=tuple(cls.overrides), tasks=tuple(cls.tasks))


class CommandContract(_Contract):
    """The contract of a command: it can be loaded and has help."""

    kind: ClassVar[type[providers.Provider]] = providers.CommandProvider


class SandboxContract(_Contract):
    """The contract of `rllm_core.sandbox.Sandbox`."""

    kind: ClassVar[type[providers.Provider]] = providers.SandboxProvider
