"""Tests the run file: precedence, rejected settings, and one helpful line per error."""

from __future__ import annotations

import math
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from rllm_core import hookimpl
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import BackendProtocol
from rllm_core.config import (
    OptimizerConfig,
    RunConfig,
    Section,
    TrainingConfig,
    to_toml,
)
from rllm_core.errors import ConfigError, PluginError
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.providers import BackendProvider, ParserProvider, TrackerProvider, WorkflowProvider
from rllm_core.tracker import Tracker
from rllm_core.workflow import Workflow, WorkflowConfig


class Level(StrEnum):
    EASY = "easy"
    HARD = "hard"


class Reward(Section):
    correct: float = 1.0
    folder: Path = Path("here")


class PuzzleConfig(WorkflowConfig):
    length: Annotated[int, Field(ge=1, le=9)] = 4
    level: Level = Level.EASY
    words: tuple[str, ...] = ("a",)
    reward: Reward = Reward()
    bonus: Reward | None = None
    stages: list[Reward] = Field(default_factory=list)


class ToyConfig(Section):
    threads: int = 1
    scale: float = 1.0


class Puzzle(Workflow):
    config_model = PuzzleConfig


class Tuned(Workflow):
    """Without settings."""


class Toy(BackendProtocol[Any]):
    """A backend that no test creates."""


class ToyParser(BaseParser):
    """A parser that no test creates."""


class Paper(Tracker):
    """A tracker that no test creates."""


def preset() -> dict[str, Any]:
    return {
        "training": {"steps": 11, "seed": 11},
        "rollout": {"temperature": 0.11},
        "puzzle": {"length": 2},
        "elsewhere": {"not": "installed"},
    }


class Provided:
    @hookimpl
    def workflows(self) -> list[WorkflowProvider]:
        here = {"load": f"{__name__}:Puzzle", "summary": "A puzzle."}
        return [
            WorkflowProvider(name="puzzle", config=f"{__name__}:PuzzleConfig", **here),
            WorkflowProvider(
                name="tuned", load=f"{__name__}:Tuned", run_file=f"{__name__}:preset", summary="A puzzle."
            ),
            WorkflowProvider(name="twin", config=f"{__name__}:PuzzleConfig", **here),
            WorkflowProvider(name="model", config=f"{__name__}:PuzzleConfig", **here),
            WorkflowProvider(name="ghost", config="no_such_module_anywhere:Config", **here),
        ]

    @hookimpl
    def backends(self) -> list[BackendProvider]:
        here = {"load": f"{__name__}:Toy", "summary": "A toy."}
        toy = f"{__name__}:ToyConfig"
        return [
            BackendProvider(name="local", config=toy, parsers=("plain", "both"), default_parser="plain", **here),
            BackendProvider(name="open", **here),
            BackendProvider(name="both", config=toy, default_parser="both", **here),
            BackendProvider(name="twin", config=toy, default_parser="plain", **here),
        ]

    @hookimpl
    def parsers(self) -> list[ParserProvider]:
        here = {"load": f"{__name__}:ToyParser", "summary": "A parser."}
        return [ParserProvider(name=name, **here) for name in ("plain", "fancy", "both")]

    @hookimpl
    def trackers(self) -> list[TrackerProvider]:
        return [
            TrackerProvider(name="paper", load=f"{__name__}:Paper", summary="Paper.", config=f"{__name__}:ToyConfig")
        ]


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(Provided(), "provided")
    return manager


class Load:
    """Writes and resolves a run file."""

    def __init__(self, plugins: PluginManager, folder: Path) -> None:
        self.plugins, self.folder = plugins, folder

    def __call__(self, text: str = 'workflow = "puzzle"', *overrides: str, **options: Any) -> RunConfig:
        path = self.folder / "run.toml"
        path.write_text(text, encoding="utf-8")
        return load_run_config(str(path), self.plugins, overrides=overrides, **options)

    def named(self, name: str, *overrides: str, **options: Any) -> RunConfig:
        return load_run_config(name, self.plugins, overrides=overrides, **options)


@pytest.fixture
def load(plugins: PluginManager, tmp_path: Path) -> Load:
    return Load(plugins, tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# Precedence


def test_precedence_is_preset_then_file_then_options_then_overrides(load: Load) -> None:
    assert load.named("puzzle").training.steps == TrainingConfig().steps
    assert load.named("tuned").training.steps == 11
    file = 'workflow = "tuned"\nbackend = "open"\nparser = "fancy"\n[training]\nsteps = 22\n'
    config = load(file)
    assert (config.training.steps, config.training.seed, config.rollout.temperature) == (22, 11, 0.11)
    assert (config.backend, config.parser) == ("open", "fancy")
    config = load(file, backend="local", parser="plain")
    assert (config.backend, config.parser) == ("local", "plain")
    config = load(file, "training.steps=33", "backend=open", "parser=both", backend="local", parser="plain")
    assert (config.training.steps, config.backend, config.parser) == (33, "open", "both")
    assert load(file, "training.steps=33", "training.steps=44").training.steps == 44


def test_an_override_may_choose_another_workflow_with_its_preset(load: Load) -> None:
    config = load('workflow = "puzzle"', "workflow=tuned")
    assert (config.workflow, config.training.steps) == ("tuned", 11)


def test_a_presets_section_of_a_provider_that_is_not_here_is_skipped_but_a_users_is_not(load: Load) -> None:
    assert "elsewhere" not in load.named("tuned").plugins
    with pytest.raises(ConfigError, match="unknown key 'elsewhere'"):
        load('workflow = "tuned"\n[elsewhere]\nnot = 1')


def test_sections_of_plugins(load: Load) -> None:
    config = load('workflow = "puzzle"\n[puzzle]\nlength = 3\nlevel = "hard"\nwords = ["x"]\nreward.correct = 2\n')
    section = config.plugins[config.workflow]
    assert section == PuzzleConfig(length=3, level=Level.HARD, words=("x",), reward=Reward(correct=2.0))
    assert config.plugins["local"] == ToyConfig()
    assert load.named("puzzle", "puzzle.reward.folder=/some/where").plugins["puzzle"].reward.folder == Path(
        "/some/where"
    )
    assert load.named("tuned").plugins["puzzle"].length == 2, "a section may speak to one that was not chosen"
    assert "tuned" not in load.named("tuned").plugins


def test_a_backend_and_its_parser_of_one_name_share_a_section(load: Load) -> None:
    config = load('workflow = "puzzle"\nbackend = "both"\n[both]\nthreads = 3')
    assert config.parser == "both"
    assert config.plugins["both"] == ToyConfig(threads=3)


def test_two_models_for_one_section_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="workflow 'twin' and backend 'twin' both have a section"):
        load.named("twin", backend="twin")
    with pytest.raises(ConfigError, match="workflow 'model' cannot have settings"):
        load.named("model")


def test_trackers_are_looked_up_and_have_sections(load: Load) -> None:
    config = load.named("puzzle", 'training.trackers=["paper"]', "paper.threads=2")
    assert config.plugins["paper"] == ToyConfig(threads=2)
    with pytest.raises(PluginError, match="papre"):
        load.named("puzzle", 'training.trackers=["papre"]')


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.path=/a/b c", "/a/b c"),
        ("model.path='quoted'", "quoted"),
        ("model.path=", ""),
        ("model.path=a=b", "a=b"),
        ('model . "path"=x', "x"),
        ("model.path=x\nbackend = 3", "x\nbackend = 3"),
    ],
)
def test_overrides_of_text(load: Load, override: str, value: str) -> None:
    assert load.named("puzzle", override).model.path == value


def test_a_tilde_is_the_home_folder_of_a_model(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load.named("puzzle", "model.path=~/models/own", "teacher.model=~/models/teacher")
    assert (config.model.path, config.teacher.model) == ("/home/somebody/models/own", "/home/somebody/models/teacher")


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("training.staleness_threshold=2", lambda c: c.training.staleness_threshold, 2.0),
        ("optimizer.learning_rate = 1e-3", lambda c: c.optimizer.learning_rate, 1e-3),
        ("training.partial_rollout=false", lambda c: c.training.partial_rollout, False),
        ("algorithm.loss_options.a.b=[1, 'x']", lambda c: c.algorithm.loss_options, {"a": {"b": [1, "x"]}}),
        ('algorithm.loss_options."a.b"=1', lambda c: c.algorithm.loss_options, {"a.b": 1}),
        ("requires=['x>=1']", lambda c: c.requires, ("x>=1",)),
    ],
)
def test_overrides_of_other_types(load: Load, override: str, read: Any, value: Any) -> None:
    found = read(load.named("puzzle", override))
    assert found == value
    assert type(found) is type(value)


# --------------------------------------------------------------------------------------------------------------------
# Errors

P = 'workflow = "puzzle"\n'

REFUSED = [
    # unknown keys, with the closest match
    (P + "stesp = 3", "unknown key 'stesp'; did you mean 'training.steps'?"),
    (P + "steps = 3", "unknown key 'steps'; did you mean 'training.steps'?"),
    (P + "[trainig]\nsteps = 3", "unknown key 'trainig'; did you mean 'training'?"),
    (P + "[training]\nstep = 3", "unknown key 'training.step'; did you mean 'training.steps'?"),
    (P + "[training]\ntemperature = 3", "unknown key 'training.temperature'; did you mean 'rollout.temperature'?"),
    (P + "[training]\nxyzzy = 3", "unknown key 'training.xyzzy'; allowed: training."),
    (P + "[costs.prices.judge]\nxyzzy = 3", "unknown key 'costs.prices.judge.xyzzy'; allowed: costs.prices.judge."),
    (P + "[puzle]\nlength = 3", "unknown key 'puzle'; did you mean 'puzzle'?"),
    (P + "[puzzle]\nlenght = 3", "unknown key 'puzzle.lenght'; did you mean 'puzzle.length'?"),
    (P + "[puzzle.reward]\ncorect = 3", "unknown key 'puzzle.reward.corect'; did you mean 'puzzle.reward.correct'?"),
    (P + "[puzzle.bonus]\ncorect = 3", "unknown key 'puzzle.bonus.corect'; did you mean 'puzzle.bonus.correct'?"),
    (
        P + "[[puzzle.stages]]\ncorect = 3",
        "unknown key 'puzzle.stages.0.corect'; did you mean 'puzzle.stages.0.correct'?",
    ),
    # names of other libraries
    (P + "lr = 3", "is optimizer.learning_rate here"),
    (
        P + "[training]\nnum_generations = 3",
        "unknown key 'training.num_generations'; num_generations of TRL is training.",
    ),
    (P + "[local]\nlr = 3", "is optimizer.learning_rate here"),
    (
        P + "[algorithm.kl_ctrl]\nkl_coef = 3",
        "unknown key 'algorithm.kl_ctrl.kl_coef'; kl_coef of verl is algorithm.kl.",
    ),
    (P + "[data]\nfiles = []\ntrain_batch_size = 3", "unknown key 'data.train_batch_size'; train_batch_size of verl"),
    (P + "epsilon = 0.2", "epsilon of TRL is algorithm.loss_options here"),
    (P + "ppo_epochs = 3", "ppo_epochs of verl has no counterpart here: "),
    (P + "[optimizer]\nbeta = 3", "unknown key 'optimizer.beta'; did you mean 'optimizer.beta"),
    (P + "[local]\nthread = 3", "unknown key 'local.thread'; did you mean 'local.threads'?"),
    (P + "[plain]\nx = 3", "unknown key 'plain'; parser 'plain' has no settings"),
    (P + "[plugins]\nx = 3", "unknown key 'plugins'"),
    # wrong types: no text as numbers, no numbers as booleans
    (P + '[training]\nsteps = "many"', 'training.steps = "many": must be an integer'),
    (P + '[training]\nsteps = "3"', 'training.steps = "3": must be an integer'),
    (P + "[training]\nsteps = 3.5", "training.steps = 3.5: must be an integer"),
    (P + "[training]\nsteps = true", "training.steps = true: must be an integer"),
    (P + "[training]\npartial_rollout = 1", "training.partial_rollout = 1: must be true or false"),
    (P + '[training]\npartial_rollout = "True"', 'training.partial_rollout = "True": must be true or false'),
    (P + '[rollout]\ntemperature = "hot"', 'rollout.temperature = "hot": must be a number'),
    (P + "[model]\npath = 3", "model.path = 3: must be a string in quotes"),
    (P + '[training]\ntrackers = "paper"', 'training.trackers = "paper": must be a list [...]'),
    (P + "[training]\ntrackers = [3]", "training.trackers.0 = 3: must be a string in quotes"),
    (P + 'training = "long"', 'training = "long": must be a section [training]'),
    (P + "puzzle = 3", "puzzle = 3: must be a section [puzzle]"),
    (P + "[puzzle]\nreward = 3", "puzzle.reward = 3: must be a section [puzzle.reward]"),
    (P + "[puzzle]\nlength = 2020-01-01", 'puzzle.length = "2020-01-01": must be an integer'),
    (P + "backend = 3", "backend = 3: must be a string in quotes"),
    # out of range
    (P + "[training]\nsteps = -1", "training.steps = -1: must be greater than or equal to 0"),
    (P + "[puzzle]\nlength = 10", "puzzle.length = 10: must be less than or equal to 9"),
    (P + '[puzzle]\nlevel = "odd"', "puzzle.level = \"odd\": must be 'easy' or 'hard'"),
    (P + '[training]\nstaleness = "none"', "training.staleness = \"none\": must be 'quota' or 'strict'"),
    (P + "[training]\nstaleness_threshold = inf", "training.staleness_threshold = "),
    (P + "[training]\nstaleness_threshold = nan", "training.staleness_threshold = "),
    (P + "[local]\nscale = nan", "local.scale = "),
    (P + "[rollout]\ntemperature = 0", "rollout.temperature = 0: must be greater than 0"),
    (P + "[training]\ngroups_per_step = 6\ngroups_per_forward_backward = 4", "= 4 does not divide"),
    (P + "[training]\npartial_rollout = true", "training.partial_rollout = true needs"),
    # the file itself
    ("", 'workflow is not set; add workflow = "NAME"'),
    ('workflow = ""', "workflow is not set"),
    ("workflow = 3", "workflow = 3: must be the name of a workflow"),
    ("workflow = ", "is not valid TOML: "),
    ("a = 1\na = 2", "is not valid TOML: "),
    ("[training\nsteps = 1", "is not valid TOML: "),
    # parsers and backends
    (P + 'parser = "fancy"', "parser = 'fancy' does not work with backend 'local'; choose one of plain, both"),
    (P + 'backend = "open"', "backend 'open' has no default parser; set parser = \"NAME\""),
]


@pytest.mark.parametrize(("text", "error"), REFUSED, ids=[t.removeprefix(P)[:50] for t, _ in REFUSED])
def test_a_wrong_file_is_refused_in_one_line(load: Load, text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert error in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("training.steps", "-o 'training.steps' must have the form section.key=value"),
        ("+training.steps=3", "leave out Hydra's +"),
        ("~training.steps", "leave out Hydra's ~"),
        ("=3", "must have the form"),
        ("training.=3", "must have the form"),
        ("training..steps=3", "must have the form"),
        ("[training]=3", "must have the form"),
        ("#=3", "must have the form"),
        ("a\nb=3", "must have the form"),
        ("training.trackers=[1", "-o 'training.trackers=[1': the value is not valid TOML"),
        ("model.path='open", "the value is not valid TOML"),
        ("training.steps.x=3", "training.steps = "),
        ("training=3", "training = 3: must be a section [training]"),
        ("training.stesp=3", "unknown key 'training.stesp'; did you mean 'training.steps'?"),
        ("training.steps=ten", 'training.steps = "ten": must be an integer'),
        ("training.partial_rollout=True", "must be true or false"),
        ("workflow.x=1", "workflow = {x = 1}: must be the name of a workflow"),
        ("model.path=\udcff", "the run file: "),
        (r'training.init_from="a\u0000"', "the character NUL"),
        (r'rollout.python="./a\u0000"', "the character NUL"),
        (r'workflow="./a\u0000.py"', "the character NUL"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(load: Load, override: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.named("puzzle", override)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_cannot_make_a_value_a_section(load: Load) -> None:
    with pytest.raises(ConfigError, match="a is a value, not a section"):
        load.named("puzzle", "algorithm.loss_options.a=1", "algorithm.loss_options.a.b=1")


def test_files_that_cannot_be_read(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run file .*missing\.toml does not exist"):
        load.named(str(tmp_path / "missing.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load.named(str(tmp_path / "folder.toml"))
    (tmp_path / "latin.toml").write_bytes(b'workflow = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load.named(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize("value", [f"1{'0' * 5000}", "[" * 5000], ids=["digits", "lists"])
def test_values_that_python_cannot_read_are_no_toml(load: Load, tmp_path: Path, value: str) -> None:
    (tmp_path / "run.toml").write_text(f"workflow = {value}")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load.named(str(tmp_path / "run.toml"))
    with pytest.raises(ConfigError):
        load.named("puzzle", f"training.steps={value}")


def test_a_byte_order_mark_is_no_part_of_the_first_key(load: Load, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('workflow = "puzzle"', encoding="utf-8-sig")
    assert load.named(str(tmp_path / "run.toml")).workflow == "puzzle"


def test_what_does_not_exist_is_the_plugin_managers_error(load: Load) -> None:
    for options in ({"backend": "lokal"}, {"parser": "plane", "backend": "open"}):
        with pytest.raises(PluginError, match=r"lokal|plane"):
            load.named("puzzle", **options)
    with pytest.raises(PluginError, match="puzle"):
        load.named("puzle")
    with pytest.raises(PluginError, match="no_such_module_anywhere"):
        load.named("ghost")


def test_a_long_value_is_cut_short(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load.named("puzzle", f"training.steps={'x' * 5000}")
    assert len(str(caught.value)) < 200


# --------------------------------------------------------------------------------------------------------------------
# Writing

toml_values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["\x7f", "\x00", "\\u0041", "\r\n", '"""', "😀", "\x85\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), toml_values, max_size=4))
def test_what_is_written_is_read_again(tables: dict[str, Any]) -> None:
    again = tomllib.loads(to_toml(tables))
    assert again == tables
    assert repr(again) == repr(_scalars_first(tables))


def _scalars_first(value: Any) -> Any:
    """Orders a table's values before its subtables, as TOML requires; lists keep their order."""
    if not isinstance(value, dict):
        return value
    items = sorted(value.items(), key=lambda item: isinstance(item[1], dict))
    return {key: _scalars_first(item) for key, item in items}


@pytest.mark.parametrize("value", [None, object(), b"", {1, 2}])
def test_what_is_no_toml_cannot_be_written(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written as TOML"):
        to_toml({"a": [value]})


def test_the_resolved_file_resolves_to_itself(load: Load) -> None:
    config = load.named(
        "tuned",
        "training.groups_per_forward_backward=4",
        "training.staleness_threshold=0.5",
        "algorithm.loss_options.deep.list=[1, {x = 'y'}]",
        'model.path="a\\u007fb😀"',
        "requires=['rllm-local>=0.1']",
        "puzzle.reward.folder=some/where",
        "puzzle.level=hard",
        "puzzle.stages=[{correct = 2.0}]",
    )
    again = load(to_toml(config.to_tables()))
    assert again == config
    assert again.plugins == config.plugins
    assert to_toml(again.to_tables()) == to_toml(config.to_tables())


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def test_derived_numbers() -> None:
    config = RunConfig(
        workflow="puzzle",
        training=TrainingConfig(
            steps=10,
            groups_per_step=8,
            rollouts_per_group=4,
            groups_per_forward_backward=2,
            staleness_threshold=0.5,
            trigger_parameter_sync_step=3,
        ),
    )
    assert config.derived() == {
        "groups_per_step": 8,
        "rollouts_per_step": 32,
        "forward_backward_passes_per_step": 4,
        "optimizer_steps": 10,
        "policy_versions": 4,
        "rollouts_in_total": 320,
        "max_groups_in_flight": 36,
        "max_rollouts_in_flight": 144,
    }


@given(
    staleness=st.integers(0, 30).map(lambda tenths: tenths / 10),
    trigger=st.integers(1, 9),
    groups=st.integers(1, 64),
)
def test_the_quota_of_a_window_is_not_cut_by_rounding(staleness: float, trigger: int, groups: int) -> None:
    config = RunConfig(
        workflow="w",
        training=TrainingConfig(
            staleness_threshold=staleness, trigger_parameter_sync_step=trigger, groups_per_step=groups
        ),
    )
    assert config.window_quota == (10 + round(staleness * 10)) * trigger * groups // 10
    assert config.window_quota >= groups


def test_rollouts_in_flight_are_bounded_by_their_limit() -> None:
    config = RunConfig(workflow="w", rollout={"max_concurrent_rollouts": 5})  # type: ignore[arg-type]
    assert config.derived()["max_rollouts_in_flight"] == 5


def test_the_learning_rate_warms_up_and_decays_to_its_fraction() -> None:
    constant = OptimizerConfig(learning_rate=2.0, warmup_steps=4)
    assert [constant.learning_rate_at(step, 8) for step in (1, 2, 4, 8)] == [0.5, 1.0, 2.0, 2.0]
    linear = OptimizerConfig(learning_rate=2.0, schedule="linear", final_learning_rate_fraction=0.25)
    rates = [linear.learning_rate_at(step, 10) for step in range(1, 11)]
    assert rates == sorted(rates, reverse=True)
    assert math.isclose(rates[-1], 0.5)
    assert all(rate > 0 for rate in rates)


def test_a_linear_schedule_reaches_its_peak_and_learns_in_every_step() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2)
    assert [config.learning_rate_at(step, 6) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert OptimizerConfig(learning_rate=1.0, schedule="linear").learning_rate_at(1, 1) == 1.0


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainingConfig().steps = 3  # type: ignore[misc]
