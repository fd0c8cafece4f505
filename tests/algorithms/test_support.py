"""Tests that the support matrix shows exactly what a dry run accepts."""

from __future__ import annotations

from typing import Any

import pytest

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.assembly.support import Support
from rllm_core.backend import Capabilities
from rllm_core.cli.backends import default_capabilities
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager
from rllm_core.providers import BackendProvider
from rllm_devkit.scripted import ScriptedBackend

EVERYTHING: dict[str, Any] = {
    "torch_losses": True,
    "aggregations": frozenset(
        {"token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"}
    ),
    "policies": frozenset({"current", "proximal", "reference"}),
    "interpolated_proximal": True,
    "kl_loss": True,
    "entropy_bonus": True,
}
NOTHING: dict[str, Any] = {
    "losses": frozenset({"magic"}),
    "policies": frozenset(),
    "per_token_advantages": False,
    "entropy_bonus": False,
}


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    return manager


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provides ``able(vision=True)``, which sets the capabilities of the scripted backend."""
    return lambda **declared: monkeypatch.setattr(ScriptedBackend, "capability_overrides", declared)


def check(plugins: PluginManager, *overrides: str) -> None:
    assemble(load_run_config("say_yes", plugins, overrides=overrides, backend="scripted"), plugins)


def support(plugins: PluginManager, backend: str = "scripted") -> dict[str, Any]:
    return Support.of(default_capabilities(plugins.select(BackendProvider, backend), plugins), plugins).to_json()


def settings(what: str, which: str) -> list[str]:
    """Returns the overrides that select one entry of the matrix."""
    return {
        "losses": [f"algorithm.loss={which}"],
        "aggregations": [f"algorithm.aggregation={which}"],
        "corrections": [f"algorithm.corrections=['{which}']", "algorithm.proximal_policy=forward"],
        "proximal_policies": [f"algorithm.proximal_policy={which}"],
        "kl_places": ["algorithm.kl.coefficient=0.1", f"algorithm.kl.place={which}"],
    }[what]


WRITTEN = {"cross_entropy"}  # losses for target tokens, which cannot be combined with sampled tokens


@pytest.mark.parametrize("what", ["losses", "aggregations", "corrections", "proximal_policies", "kl_places"])
def test_every_choice_of_the_matrix_is_accepted_and_no_other(plugins: PluginManager, able: Any, what: str) -> None:
    able(**EVERYTHING)
    everything = set(support(plugins)[what])
    assert everything
    for which in everything - WRITTEN:
        check(plugins, *settings(what, which))
    able(**NOTHING)
    little = set(support(plugins)[what])
    assert little < everything | {"magic"}
    for which in everything - little - WRITTEN:
        with pytest.raises(ConfigError) as refused:
            check(plugins, "algorithm.loss=magic", *settings(what, which))
        assert "backend 'scripted'" in str(refused.value)
        assert "rllm-core backends lists what each supports" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.loss=gspo"], "loss = 'gspo' is not supported by backend 'scripted', which supports: magic;"),
        (["algorithm.loss=magick"], "did you mean 'magic'?"),
        (["algorithm.aggregation=sequence_mean_token_sum"], "algorithm.aggregation = 'sequence_mean_token_sum' is not"),
        (["algorithm.proximal_policy=interpolated"], "algorithm.proximal_policy = 'interpolated' is not supported by"),
        (["algorithm.corrections=['token_tis']", "algorithm.proximal_policy=forward"], "['token_tis'] must be empty"),
        (["algorithm.kl.coefficient=0.1"], "algorithm.kl.coefficient = 0.1 must be 0: backend 'scripted'"),
        (["algorithm.entropy_coefficient=0.1"], "algorithm.entropy_coefficient = 0.1 must be 0"),
        (["algorithm.entropy_coefficient_final=0.1"], "algorithm.entropy_coefficient_final = 0.1 must be 0"),
        (["algorithm.name=precomputed"], "algorithm.name = 'precomputed' returns advantages per token, but backend"),
        (["algorithm.roles.judge.name=precomputed"], "algorithm.roles.judge.name = 'precomputed' returns"),
        (["training.rollouts_per_group=1"], "training.rollouts_per_group = 1 is too small: algorithm.name = 'grpo'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_one_line(
    plugins: PluginManager, able: Any, overrides: list[str], expected: str
) -> None:
    able(**NOTHING)
    with pytest.raises(ConfigError) as refused:
        check(plugins, "algorithm.loss=magic", *overrides)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_backend_that_shares_its_devices_takes_turns(plugins: PluginManager, able: Any) -> None:
    able(colocated=True)
    with pytest.raises(ConfigError, match=r"training.staleness_threshold = 1.0 must be 0: .* take turns"):
        check(plugins, "training.staleness_threshold=1.0")


@pytest.mark.parametrize(
    ("overrides", "error", "expected"),
    [
        (["algorithm.name=grop"], PluginError, r"^algorithm.name = 'grop': .*mean 'grpo'\?.*installed: .*rloo"),
        (["algorithm.roles.judge.name=rlo"], PluginError, r"^algorithm.roles.judge.name = 'rlo': .* mean 'rloo'\?"),
        (["algorithm.loss=ppo_clp"], ConfigError, r"^algorithm.loss = 'ppo_clp' .*gspo.*; did you mean 'ppo_clip'\?"),
        (["algorithm.corrections=['tokn_tis']"], PluginError, r"^algorithm.corrections = 'tokn_tis': .*'token_tis'\?"),
        (["algorithm.name=return_to_go", "algorithm.estimator_options.discont=1.0"], ConfigError, r".*discount'\?"),
        (["algorithm.estimator_options.discount=1.0"], ConfigError, r"option of 'return_to_go', but .*name = 'grpo'"),
        (["algorithm.corrections=['token_tis']"], ConfigError, r"needs algorithm.proximal_policy = 'forward'"),
        (["algorithm.correction_options.token_tis.cap=3.0"], ConfigError, r"has no correction .* remove its options"),
        (
            ["algorithm.corrections=['token_tis']", "algorithm.correction_options.tokn_tis.cap=3.0"],
            ConfigError,
            r"^algorithm.correction_options.tokn_tis has no correction .*did you mean 'token_tis'\?",
        ),
    ],
)  # fmt: skip
def test_a_slip_of_the_pen_is_one_line_with_the_nearest(
    plugins: PluginManager, able: Any, overrides: list[str], error: type[Exception], expected: str
) -> None:
    able(**EVERYTHING)
    with pytest.raises(error, match=expected) as refused:
        check(plugins, *overrides)
    assert "\n" not in str(refused.value)


def test_the_same_names_in_the_same_order_whatever_the_hashes_are(plugins: PluginManager, able: Any) -> None:
    able(**EVERYTHING)
    resolved = support(plugins)
    assert list(resolved) == sorted(resolved)
    assert all(names == sorted(names) for names in resolved.values() if isinstance(names, list))
    assert {type(value) for value in resolved.values()} == {bool, list}


def test_every_declared_capability_is_in_the_matrix(plugins: PluginManager, able: Any) -> None:
    """Capabilities that resolve alike would hide one of them."""
    able()
    before = support(plugins)
    declared = ScriptedBackend.capabilities(None)  # type: ignore[arg-type]
    changes: dict[str, Any] = {name: not value for name, value in vars(declared).items() if isinstance(value, bool)}
    changes |= {"losses": frozenset({"m"}), "aggregations": frozenset({"m"})}
    changes["policies"] = frozenset({"proximal", "reference", "current"})
    assert set(changes) == set(vars(Capabilities()))
    needed = {"kl_loss": {"policies": frozenset({"reference"})}}
    for name, value in changes.items():
        able(**needed.get(name, {}))
        before = support(plugins)
        able(**{**needed.get(name, {}), name: value})
        assert support(plugins) != before, name


def test_corrections_need_single_tokens_or_a_backend_that_applies_them(plugins: PluginManager, able: Any) -> None:
    able(policies=frozenset({"proximal"}), per_token_advantages=False)
    assert support(plugins)["corrections"] == []
    able(interpolated_proximal=True, per_token_advantages=False)
    assert "token_tis" in support(plugins)["corrections"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda: 1 / 0, r"failed: \S*tests/algorithms/test_support\.py:\d+: ZeroDivisionError"),
        (lambda: {"lora": True}, "returned {'lora'"),
    ],
)
def test_a_backend_that_cannot_say_is_broken(
    plugins: PluginManager, monkeypatch: pytest.MonkeyPatch, answer: Any, expected: str
) -> None:
    monkeypatch.setattr(ScriptedBackend, "capabilities", classmethod(lambda cls, config: answer()))
    with pytest.raises(PluginError, match=f"backend 'scripted' .*: its capabilities\\(\\) {expected}"):
        support(plugins)


def test_options_of_a_replaced_piece_go_with_it(plugins: PluginManager, able: Any, tmp_path: Any) -> None:
    able(**EVERYTHING)
    path = tmp_path / "run.toml"
    path.write_text(
        """
        workflow = "say_yes"
        backend = "scripted"
        [algorithm]
        name = "return_to_go"
        estimator_options = { discount = 0.5 }
        proximal_policy = "forward"
        corrections = ["token_tis", "k3_rejection"]
        [algorithm.correction_options]
        token_tis = { cap = 3.0 }
        k3_rejection = { limit = 0.5 }
        [algorithm.roles.judge]
        name = "return_to_go"
        estimator_options = { discount = 0.25 }
        """
    )
    overrides = ("algorithm.corrections=['k3_rejection']", "algorithm.roles.judge.name=rloo")
    config = load_run_config(str(path), plugins, overrides=overrides)
    algorithm = assemble(config, plugins).algorithm
    assert config.algorithm.correction_options == {"k3_rejection": {"limit": 0.5}}
    assert config.algorithm.roles["judge"].estimator_options == {}
    assert algorithm.estimators.default.options.discount == 0.5
