"""Tests estimators, losses and corrections of installed packages: selection in a run file, and their errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rllm_devkit.scripted_plugin
from rllm_core import providers
from rllm_core.algorithms.corrections import Correction, Corrections
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss, losses_of
from rllm_core.assembly.components import configured
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import Capabilities
from rllm_core.cli.algorithms import piece_rows
from rllm_core.errors import ConfigError, PluginError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_devkit.scripted import ScriptedBackend

Run = Callable[..., subprocess.CompletedProcess[str]]
Manager = Callable[..., PluginManager]

AHEAD = ("training.staleness_threshold=1",)
SMALL = (
    "training.steps=2",
    "training.groups_per_step=2",
    "training.rollouts_per_group=4",
    "training.validation_rollouts=0",
)
THEIRS = (
    "algorithm.name=ranks",
    "algorithm.estimator_options.spread=2.0",
    "algorithm.loss=soft_clip",
    "algorithm.loss_options.width=0.5",
    "algorithm.proximal_policy=forward",
    'algorithm.corrections=["young_mask"]',
    "algorithm.correction_options.young_mask.limit=0.7",
)


@pytest.fixture
def scripted(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """Provides ``scripted("rllm-thirds")``: a manager whose scripted backend supports everything."""
    able = Capabilities(torch_losses=True, policies=frozenset({"current", "proximal", "reference"}), kl_loss=True)
    overrides = {"torch_losses": True, "policies": able.policies, "kl_loss": True}
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", overrides)

    def build(*packages: str) -> PluginManager:
        plugins = manager(*packages)
        plugins.register(rllm_devkit.scripted_plugin, "testing")
        return plugins

    return build


def assembled(plugins: PluginManager, *overrides: str) -> Parts:
    config = load_run_config("say_yes", plugins, overrides=(*SMALL, *overrides), backend="scripted")
    return assemble(config, plugins)


def trained(assembly: Parts, path: Path) -> dict[str, Any]:
    return asyncio.run(launch.train(assembly, path, resume=False, progress=Progress()))


# --------------------------------------------------------------------------------------------------------------------
# Compliant components


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [(), AHEAD])
def test_pieces_of_a_package_train_by_name(scripted: Manager, tmp_path: Path, ahead: tuple[str, ...]) -> None:
    assembly = assembled(scripted("rllm-thirds"), *THEIRS, *ahead)
    [estimator], [correction] = assembly.algorithm.estimators.all, assembly.algorithm.corrections.corrections
    assert estimator.label == "advantage estimator 'ranks' (rllm-thirds 0.7)"
    assert (estimator.options.spread, correction.options.limit) == (2.0, 0.7)
    summary = trained(assembly, tmp_path / "run")
    assert (summary["status"], summary["optimizer_steps"]) == ("completed", 2)


def test_the_options_decide_what_is_computed(scripted: Manager) -> None:
    plugins = scripted("rllm-thirds")
    weights = [
        assembled(plugins, *THEIRS[:-1], f"algorithm.correction_options.young_mask.limit={limit}")
        .algorithm.corrections.weights(np.array([0.3, -0.6]), np.array([0]))
        .tolist()
        for limit in (0.2, 0.5, 1.0)
    ]
    assert weights == [[0, 0], [1, 0], [1, 1]]


def test_their_options_are_checked_as_ours_are(scripted: Manager) -> None:
    plugins = scripted("rllm-thirds")
    with pytest.raises(
        ConfigError, match=r"'algorithm.estimator_options.sprad'; did you mean .*estimator_options.spread"
    ):
        assembled(plugins, "algorithm.name=ranks", "algorithm.estimator_options.sprad=1.0")
    with pytest.raises(
        ConfigError, match=r"'algorithm.loss_options.with'; did you mean 'algorithm.loss_options.width'"
    ):
        assembled(plugins, "algorithm.loss=soft_clip", "algorithm.loss_options.with=1.0")
    with pytest.raises(ConfigError, match=r"algorithm.estimator_options.spread = -1.0: must be greater than 0"):
        assembled(plugins, "algorithm.name=ranks", "algorithm.estimator_options.spread=-1.0")
    with pytest.raises(
        ConfigError, match=r"estimator_options.spread': it is an option of 'ranks', but algorithm.name = 'g"
    ):
        assembled(plugins, "algorithm.name=grpo", "algorithm.estimator_options.spread=1.0")


def test_a_name_that_two_packages_have_must_say_whose(scripted: Manager) -> None:
    plugins = scripted("rllm-wrongs")
    with pytest.raises(
        PluginError, match=r"'rloo' is provided by rllm-core .* and rllm-wrongs 0.2 .*'rllm-core/rloo' or"
    ):
        assembled(plugins, "algorithm.name=rloo")
    assembly = assembled(plugins, "algorithm.name=rllm-core/rloo")
    assert type(assembly.algorithm.estimators.default).__module__ == "rllm_core.builtin.estimators.outcome"
    assembled(plugins, "algorithm.loss=rllm-wrongs/averages")


# --------------------------------------------------------------------------------------------------------------------
# Noncompliant components


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.name=cannot_be_imported"], "no_such_module"),
        (["algorithm.name=raises_at_import"], "RuntimeError: the abacus is broken"),
        (
            ["algorithm.name=no_estimator"],
            "must be a subclass of rllm_core.algorithms.advantages.AdvantageEstimator",
        ),
        (["algorithm.name=lax_options"], "or unknown keys would be ignored"),
        (["algorithm.loss=no_loss"], "must be a subclass of rllm_core.algorithms.torch_losses.PolicyLoss"),
        (["algorithm.name=cannot_be_made"], "cannot be created: rllm_wrongs/estimators.py:20: KeyError: 'ABACUS_HOME'"),
        (["algorithm.name=exits_when_made"], "cannot be created: rllm_wrongs/estimators.py:71: SystemExit: 0"),
        (["algorithm.roles.helper.name=no_estimator"], "must be a subclass of"),
        (["algorithm.corrections=['no_correction']", "algorithm.proximal_policy=forward"], "must be a subclass of"),
    ],
)
def test_one_that_cannot_be_used_is_told_before_anything_starts(
    scripted: Manager, overrides: list[str], expected: str
) -> None:
    with pytest.raises(PluginError) as refused:
        assembled(scripted("rllm-wrongs"), *overrides)
    message = str(refused.value)
    assert expected in message
    assert "rllm-wrongs 0.2" in message
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ahead", "expected"),
    [
        ("says_nan", (), "returned advantages array([nan"),
        ("wrong_shape", AHEAD, "returned advantages array([[0., 0.]]) for 1 steps"),
        ("wrong_count", (), "returned advantages for 1 of 4 trajectories of task 'train-"),
        ("says_nothing", AHEAD, "returned advantages None for 1 steps"),
        ("fails", (), "rllm_wrongs/estimators.py:40: ZeroDivisionError: division by zero"),
        ("fails", AHEAD, "rllm_wrongs/estimators.py:40: ZeroDivisionError: division by zero"),
        ("exits", AHEAD, "rllm_wrongs/estimators.py:66: SystemExit"),
        ("undeclared_tokens", AHEAD, "returns advantages per token; declare this"),
    ],
)
def test_an_estimator_that_goes_wrong_ends_the_run_with_its_name(
    scripted: Manager, tmp_path: Path, name: str, ahead: tuple[str, ...], expected: str
) -> None:
    with pytest.raises((RunError, ValueError)) as failed:
        trained(assembled(scripted("rllm-wrongs"), f"algorithm.name={name}", *ahead), tmp_path / "run")
    message = str(failed.value)
    assert f"advantage estimator {name!r} (rllm-wrongs 0.2)" in message
    assert expected in message
    assert "\n" not in message
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["books"]["trained"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("negative", "must return one finite weight >= 0 per token"),
        ("short", "must return one finite weight >= 0 per token"),
        ("failing_correction", "failed: plugin 'wrongs' (rllm-wrongs 0.2), rllm_wrongs/corrections.py:"),
    ],
)
def test_a_correction_that_goes_wrong_is_named(scripted: Manager, name: str, expected: str) -> None:
    piece: Correction = configured(
        scripted("rllm-wrongs"), providers.CorrectionProvider, "algorithm.corrections", name, {}, "x"
    )
    with pytest.raises(RunError) as failed:
        Corrections([piece]).weights(np.zeros(3), np.array([0]))
    assert str(failed.value).startswith(f"correction {name!r} (rllm-wrongs 0.2) {expected}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("averages", "must return one loss per token, (3,), not shape ()"),
        ("nan_loss", "returned losses that are not finite"),
        (
            "failing_loss",
            "failed: plugin 'wrongs' (rllm-wrongs 0.2), rllm_wrongs/losses.py:22: AttributeError: 'LossInputs' object "
            "has no attribute 'log_probs'",
        ),
    ],
)
def test_a_loss_that_goes_wrong_is_named(scripted: Manager, name: str, expected: str) -> None:
    piece = configured(scripted("rllm-wrongs"), providers.PolicyLossProvider, "algorithm.loss", name, {}, "x")
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = LossInputs(logprobs, None, torch.ones(3), torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(RunError) as failed:
        losses_of(piece, inputs)
    assert str(failed.value) == f"policy loss {name!r} (rllm-wrongs 0.2) {expected}"
    with pytest.raises(
        PluginError, match=r"'no_loss' \(rllm-wrongs 0.2\): .* must be a subclass of .*torch_losses.PolicyLoss"
    ):
        configured(scripted("rllm-wrongs"), providers.PolicyLossProvider, "algorithm.loss", "no_loss", {}, "x")


def changes_its_inputs(inputs: LossInputs) -> torch.Tensor:
    inputs.advantages.mul_(2.0)
    return -inputs.logprobs


@pytest.mark.parametrize(
    ("lose", "expected"),
    [
        (lambda inputs: inputs.logprobs.detach(), "returned losses without a gradient; compute them from inputs"),
        (lambda inputs: inputs.logprobs > 0, "must return floating-point losses, not torch.bool"),
        (lambda inputs: inputs.logprobs.double() * 1e300, "returned finite losses whose gradient is not finite"),
        (lambda inputs: (inputs.logprobs - inputs.logprobs.detach()).sqrt(), "returned finite losses whose gradient"),
        (changes_its_inputs, "changed its inputs in place"),
    ],
)
def test_a_loss_that_would_train_nothing_or_ruin_the_step_is_named(
    lose: Callable[[LossInputs], torch.Tensor], expected: str
) -> None:
    class Wrong(PolicyLoss):
        def __call__(self, inputs: LossInputs) -> torch.Tensor:
            return lose(inputs)

    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = LossInputs(logprobs, None, torch.ones(3), torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(RunError, match=f"Wrong {expected}"):
        losses_of(Wrong(), inputs).sum().backward()


def test_a_loss_is_not_blamed_for_a_policy_that_is_lost(scripted: Manager) -> None:
    piece = configured(scripted("rllm-wrongs"), providers.PolicyLossProvider, "algorithm.loss", "nan_loss", {}, "x")
    inputs = LossInputs(torch.full((1,), torch.nan), None, torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    assert losses_of(piece, inputs).isnan().all()


# --------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.slow
def test_algorithms_lists_them_beside_ours_and_says_what_is_wrong(rllm_core: Run) -> None:
    packages, only = ("rllm-thirds", "rllm-wrongs"), {"RLLM_PLUGINS": "thirds,wrongs"}
    run = rllm_core("algorithms", "--json", packages=packages, **only)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    keys = ["kind", "name", "summary", "options", "status", "error", "package", "version", "plugin", "load"]
    assert all(row.keys() == set(keys) for row in rows)
    found = {(row["kind"], row["name"]): row for row in rows}
    assert found["policy loss", "soft_clip"]["options"] == [
        {
            "name": "width",
            "required": False,
            "default": 0.3,
            "description": "How far the log ratio goes before it saturates.",
        }
    ]
    assert found["policy loss", "ppo_clip"]["plugin"] == "core"
    assert {("advantage estimator", "rllm-core/rloo"), ("advantage estimator", "rllm-wrongs/rloo")} <= set(found)
    broken = {name for (_, name), row in found.items() if row["status"] == "broken"}
    assert broken == {
        "cannot_be_imported",
        "raises_at_import",
        "no_estimator",
        "lax_options",
        "no_loss",
        "no_correction",
    }
    assert all((row["options"] is None) == (row["status"] == "broken") == bool(row["error"]) for row in rows)
    plain = rllm_core("algorithms", packages=packages, **only).stdout
    [line] = [line for line in plain.splitlines() if line.startswith("young_mask ")]
    assert line.split()[-3:] == ["limit=0.5", "rllm-thirds", "0.7"]


def test_losses_are_listed_where_torch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    rows = piece_rows(PluginManager.from_environment(no_plugins=True))
    losses = [row for row in rows if row["kind"] == "policy loss"]
    assert {(row["status"], row["error"]) for row in losses} == {
        ("available", "losses need torch, which is not installed")
    }
    assert {row["status"] for row in rows if row["kind"] != "policy loss"} == {"loaded"}


def test_backends_count_the_losses_and_corrections_of_plugins(rllm_core: Run) -> None:
    packages = ("rllm-good", "rllm-thirds")
    run = rllm_core("backends", "--json", packages=packages, RLLM_PLUGINS="good,thirds")
    [row] = json.loads(run.stdout)
    assert (row["name"], row["status"], row["error"]) == ("good", "loaded", None)
    assert "soft_clip" not in row["capabilities"]["losses"], "it runs no torch losses"
    assert row["capabilities"]["corrections"] == [], "it knows no proximal policy"
    assert row["capabilities"]["entropy_bonus"] is True


@pytest.mark.slow
def test_a_run_file_names_them_for_local_from_end_to_end(rllm_core: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        workflow = "sort"
        backend = "local"

        [training]
        steps = 2
        groups_per_step = 2
        rollouts_per_group = 4
        validation_rollouts = 4

        [algorithm]
        name = "ranks"
        estimator_options = { spread = 2.0 }
        loss = "soft_clip"
        loss_options = { width = 0.5 }
        proximal_policy = "forward"
        corrections = ["young_mask"]

        [algorithm.correction_options.young_mask]
        limit = 0.7
        """
    )
    only = {"RLLM_PLUGINS": "local,workflows,renderers,thirds"}
    run = rllm_core("train", "run.toml", "--run-dir", "run", "--json", packages=("rllm-thirds",), **only)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["status"], summary["optimizer_steps"]) == ("completed", 2)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["grad_norm"] > 0 for line in metrics)
    broken = rllm_core(
        "train", "run.toml", "-o", "algorithm.loss=averages", "-o", "algorithm.loss_options={}", "--run-dir", "broken",
        packages=("rllm-thirds", "rllm-wrongs"), RLLM_PLUGINS="local,workflows,renderers,thirds,wrongs",
    )  # fmt: skip
    assert broken.returncode == 1
    assert "error: policy loss 'averages' (rllm-wrongs 0.2) must return one loss per token" in broken.stderr
