"""Tests task samplers: who chooses what, which results it gets and when, and exact resuming in every mode."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import COMMAND, STEPS, start, wait_for_checkpoint

from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.assembly.tasks import TaskStream
from rllm_core.errors import ConfigError, PluginError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint
from rllm_core.types import Task
from rllm_devkit.scripted import ScriptedBackend, ScriptedWorkflow
from rllm_viewer.verify import verify

RunScripted = Callable[..., Any]
pytestmark = pytest.mark.slow
ASYNCHRONOUS = ("training.staleness_threshold=2", "training.partial_rollout=true")
SAMPLER = """
import json
from pathlib import Path

from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.errors import ConfigError

HERE = Path(__file__).parent

def log(**fields):
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\\n")


class Sampler(TaskSampler):
    '''Draws by a hash of everything that it was told so far, so that any difference shows in all later tasks.'''

    def begin(self, tasks, seed):
        self.tasks, self.told, self.drawn, self.digest = len(tasks), 0, 0, seed

    def next(self, n):
        return [self.one() for _ in range(n)]

    def one(self):
        self.drawn += 1
        return (self.digest * 1103515245 + self.drawn * 12345) // 65536 % self.tasks

    def observe(self, result):
        log(**vars(result))
        rewards = sum(reward * 2**n for n, reward in enumerate(result.rewards))
        self.told += 1
        self.digest = (self.digest * 31 + int(1000 * rewards) + result.position + 7 * self.told) % 2**31

    def metrics(self):
        return {"told": self.told}

    def state_dict(self):
        return {"told": self.told, "drawn": self.drawn, "digest": self.digest}

    def load_state_dict(self, state):
        self.told, self.drawn, self.digest = state["told"], state["drawn"], state["digest"]
"""


@pytest.fixture
def sampler(tmp_path: Path) -> Callable[..., str]:
    """Writes a file with a sampler, changed by replacing some of its text, and returns the setting that selects it."""

    def write(*changes: tuple[str, str]) -> str:
        text = SAMPLER
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "sampler.py"
        path.write_text(text)
        return f"training.sampler={path}"

    return write


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


def dispatched(run: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in run.lines("events"):
        if event["event"] == "dispatch":
            assert found.setdefault(event["group"], event["task"]) == event["task"], "a group keeps its task"
    return found


@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS])
def test_uniform_is_the_order_of_the_task_stream(run_scripted: RunScripted, mode: tuple[str, ...]) -> None:
    run = run_scripted("training.steps=12", "training.seed=5", *mode)
    assert run.error is None
    stream = TaskStream(ScriptedWorkflow().tasks("train"), 5)
    found = dispatched(run)
    assert len(found) >= 48
    assert found == {ordinal: stream[ordinal].task_id for ordinal in found}
    epochs = {e["group"]: e["epoch"] for e in run.lines("events") if e["event"] == "dispatch"}
    assert epochs == {ordinal: stream.epoch(ordinal) for ordinal in found}


def test_a_sampler_chooses_and_is_told_each_result_once_and_in_order(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path
) -> None:
    run = run_scripted(sampler(), "algorithm.filter_uniform_groups=true")
    assert run.error is None
    told = calls(tmp_path)
    assert [call["ordinal"] for call in told] == list(range(len(told)))
    by_outcome = Counter(call["outcome"] for call in told)
    rollouts = run.summary["books"]
    assert by_outcome["trained"] * 4 == rollouts["trained"] == 6 * 4 * 4
    assert by_outcome["filtered"] * 4 == rollouts["filtered"] > 0
    tasks = run.assembly.tasks.of("train")
    assert {call["ordinal"]: tasks[call["position"]].task_id for call in told} == dispatched(run)
    assert [call["step"] for call in told] == sorted(call["step"] for call in told)
    for call in told:
        assert len(call["rewards"]) == 4
        assert call["solved"] == sum(call["rewards"]) / 4
        assert (call["outcome"] == "filtered") == (len(set(call["rewards"])) == 1)
        assert call["reason"] == {"trained": "trained", "filtered": "uniform_reward"}[call["outcome"]]
    counts = Counter(call["step"] for call in told)
    before = [0, *(sum(counts[step] for step in range(1, done + 1)) for done in range(1, 6))]
    assert [row["sampler/told"] for row in run.lines("metrics")] == before
    assert {row["epoch"] for row in run.lines("metrics")} == {0}


def test_results_come_late_and_out_of_order_in_an_asynchronous_run(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path
) -> None:
    run = run_scripted(sampler(), *ASYNCHRONOUS, "training.steps=12", "algorithm.filter_uniform_groups=true")
    assert run.error is None
    told = [call["ordinal"] for call in calls(tmp_path)]
    assert len(set(told)) == len(told) >= 48
    trained = [ordinal for event in run.lines("events") if event["event"] == "step" for ordinal in event["groups"]]
    assert set(trained) <= set(told)
    drawn_at_sync, steps = {}, 0
    for event in run.lines("events"):
        if event["event"] == "dispatch":
            drawn_at_sync[event["group"]] = steps
        steps += event["event"] == "step"
    late = [call for call in calls(tmp_path) if call["step"] > drawn_at_sync[call["ordinal"]] + 1]
    assert late, "generation ran ahead"


def test_a_synchronous_run_does_not_depend_on_which_group_ends_first(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path
) -> None:
    """Also if several optimizer steps share a window, and gradients accumulate while groups arrive."""
    modes = ("algorithm.filter_uniform_groups=true", "training.groups_per_forward_backward=1")
    for sync in (1, 3):
        setting, found = sampler(), []
        for number, latency in enumerate((lambda rng: 0.0, lambda rng: rng.random() / 50)):

            def slow(assembly: Parts, latency: Any = latency) -> None:
                backend: Any = assembly.backend
                assert isinstance(backend, ScriptedBackend)
                backend.script.latency_seconds = latency

            every = f"training.trigger_parameter_sync_step={sync}"
            run = run_scripted(setting, *modes, every, path=tmp_path / f"{sync}-{number}", prepare=slow)
            assert run.error is None
            found.append(dispatched(run))
        assert found[0] == found[1]


@pytest.mark.parametrize("mode", [(), ASYNCHRONOUS, ("training.trigger_parameter_sync_step=3",)])
def test_a_resumed_run_keeps_the_tasks_of_its_groups(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    def fail_in_step_four(assembly: Parts) -> None:
        backend: Any = assembly.backend
        assert isinstance(backend, ScriptedBackend)
        update = backend.update_policy

        async def failing(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await update(step)

        backend.update_policy = failing

    setting = sampler()
    same = (setting, *mode, "training.checkpoint_every_steps=1", "algorithm.filter_uniform_groups=true")
    first = run_scripted(*same, prepare=fail_in_step_four)
    assert first.error is not None
    saved = checkpoint.read(first.path / "checkpoints/step-000003")["generation"]["draws"]
    again = run_scripted(*same, path=first.path, resume=True)
    assert again.error is None
    tasks, found = again.assembly.tasks.of("train"), dispatched(again)
    for ordinal, position in saved["chosen"].items():
        if int(ordinal) in found:
            assert found[int(ordinal)] == tasks[position].task_id
    told = [call["ordinal"] for call in calls(tmp_path)]
    assert len(set(told)) == len(told), "each result is told once"


@pytest.mark.parametrize("name", ["file", "difficulty", "difficulty with subsets"])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, sampler: Callable[..., str], name: str
) -> None:
    """Byte by byte, after SIGKILL and SIGTERM: metrics, the sampler's state, and the tasks of all groups."""
    settings = [sampler() if name == "file" else "training.sampler=difficulty"]
    if name == "difficulty with subsets":
        settings.append("training.sampler_options={subsets='number', spacing=2}")
    command = COMMAND
    if name != "file":
        command = command.replace(
            'manager.register(rllm_devkit.scripted_plugin, "testing")',
            'manager.register(rllm_devkit.scripted_plugin, "testing"); '
            'import rllm_samplers; manager.register(rllm_samplers, "samplers")',
        )
    kept = ("algorithm.filter_uniform_groups=true", "algorithm.refill_filtered_groups=false")
    more = [argument for override in (*settings, *kept) for argument in ("-o", override)]
    whole = tmp_path / "whole"
    _, err = (process := start(whole, *more, command=command)).communicate(timeout=600)
    assert process.returncode == 0, err
    for how in (signal.SIGKILL, signal.SIGTERM):
        stopped = tmp_path / how.name
        process = start(stopped, *more, command=command)
        wait_for_checkpoint(stopped, process, after_step=10)
        process.send_signal(how)
        process.communicate(timeout=600)
        _, err = (process := start(stopped, "--resume", *more, command=command)).communicate(timeout=600)
        assert process.returncode == 0, err
        assert verify(stopped).problems == []
        assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        draws = [
            checkpoint.read(run / f"checkpoints/step-{STEPS:06d}")["generation"]["draws"] for run in (whole, stopped)
        ]
        assert json.dumps(draws[0]) == json.dumps(draws[1])
        tasks = []
        for run in (whole, stopped):
            events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
            tasks.append({event["group"]: event["task"] for event in events if event["event"] == "dispatch"})
        assert tasks[0] == tasks[1]
        assert len(set(tasks[0].values())) > 3


BROKEN = {
    "raises": ("return [self.one() for _ in range(n)]", "raise OSError('no tasks today')", "OSError: no tasks today"),
    "returns text": ("return [self.one() for _ in range(n)]", "return 'abcd'", "returned str, not a list"),
    "returns too few": ("return [self.one() for _ in range(n)]", "return []", "returned 0 positions"),
    "returns an id": ("return [self.one() for _ in range(n)]", "return ['train-1'] * n", "returned position 'train-1'"),
    "returns another": ("return [self.one() for _ in range(n)]", "return [self.tasks] * n", "position 20 of 20 tasks"),
    "cannot observe": ("log(**vars(result))", "raise KeyError('reward')", "KeyError"),
    "measures nothing": ('{"told": self.told}', '{"told": float("nan")}', "'told' = nan"),
    "measures None": ('return {"told": self.told}\n', "return None\n", "metrics() returned NoneType, not a mapping"),
    "exits": ("log(**vars(result))", "raise SystemExit", "sampler.py:29: SystemExit"),
    "keeps an object": ('"drawn": self.drawn,', '"drawn": self if self.told else 0,', "a value that is not JSON"),
    "keeps a tuple": ('"drawn": self.drawn,', '"drawn": (1,) if self.told else 0,', "JSON values, without tuples"),
    "cannot begin": ("self.tasks, self.told", "raise ConfigError('no lengths'); self.tasks, self.told", "no lengths"),
}


NUMPY = (
    ("import json\n", "import json\n\nimport numpy as np\n"),
    ('{"told": self.told}\n\n', '{"told": np.float32(self.told)}\n\n'),
)
AS_NUMPY = {"an array": "np.array({})", "its numbers": "list(np.array({}))"}


@pytest.mark.parametrize("form", AS_NUMPY)
def test_a_sampler_may_return_numbers_of_numpy(
    run_scripted: RunScripted, sampler: Callable[..., str], form: str
) -> None:
    """`numpy.random.Generator.integers` draws an array, and indexing it gives no Python int."""
    drawn = "[self.one() for _ in range(n)]"
    run = run_scripted(sampler(*NUMPY, (f"return {drawn}", f"return {AS_NUMPY[form].format(drawn)}")))
    assert run.error is None
    plain = run_scripted(sampler(), path=run.path.with_name("plain"))
    assert dispatched(run) == dispatched(plain)
    told = [[row["sampler/told"] for row in one.lines("metrics")] for one in (run, plain)]
    assert told[0] == told[1]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_sampler_ends_the_run_with_its_name(
    plugins: PluginManager, run_scripted: RunScripted, sampler: Callable[..., str], how: str
) -> None:
    old, new, message = BROKEN[how]
    setting = sampler((old, new))
    if how == "cannot begin":
        with pytest.raises(ConfigError, match=message):
            assemble(load_run_config("say_yes", plugins, overrides=(setting,), backend="scripted"), plugins)
        return
    run = run_scripted(setting, "training.validation_rollouts=0", "training.checkpoint_every_steps=1")
    assert isinstance(run.error, RunError)
    assert message in str(run.error)
    assert "sampler" in str(run.error)
    books = run.summary["books"]
    assert books["dispatched"] == sum(books[key] for key in ("trained", "filtered", "failed", "cancelled"))


@pytest.mark.parametrize("state", ["None", "{1: 2}", "{'drawn': object()}"])
def test_a_state_that_no_checkpoint_holds_is_found_before_the_run(
    plugins: PluginManager, sampler: Callable[..., str], state: str
) -> None:
    setting = sampler(("def state_dict(self):\n", f"def state_dict(self):\n        return {state}\n"))
    with pytest.raises(RunError, match=r"state_dict\(\) returned .*JSON"):
        assemble(load_run_config("say_yes", plugins, overrides=(setting,), backend="scripted"), plugins)


def test_a_task_in_quarantine_is_told_at_once_and_never_ends_in_a_circle(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path
) -> None:
    def fail_on_three(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Any:
            if task.task_id == "train-3":
                raise ValueError("row 3 is broken")
            return await play(task, completer)

        assembly.workflow.run = run  # type: ignore[method-assign]

    endless = ("rollout.max_attempts=1", "rollout.max_failure_share=1.0", "rollout.max_consecutive_failures=100000")
    only_three = sampler(("return [self.one() for _ in range(n)]", "return [3] * n"))
    run = run_scripted(only_three, *endless, "training.validation_rollouts=0", prepare=fail_on_three)
    assert isinstance(run.error, RunError)
    assert "chose only quarantined tasks, 41 in a row" in str(run.error)
    skipped = [call for call in calls(tmp_path) if call["outcome"] == "skipped"]
    assert {(call["position"], call["reason"], call["solved"]) for call in skipped} == {(3, "quarantine", None)}


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("training.sampler=nobody",), PluginError, "training.sampler = 'nobody'"),
        (("training.sampler_options={a=1}",), ConfigError, "training.sampler_options.a"),
        (("SAMPLER", "training.sampler_options={a=1}"), ConfigError, "training.sampler_options.a"),
    ],
)
def test_wrong_settings_are_refused(
    plugins: PluginManager,
    sampler: Callable[..., str],
    overrides: tuple[str, ...],
    error: type[Exception],
    message: str,
) -> None:
    setting = sampler()
    given = tuple(setting if one == "SAMPLER" else one for one in overrides)
    with pytest.raises(error, match=message):
        assemble(load_run_config("say_yes", plugins, overrides=given, backend="scripted"), plugins)


def test_another_sampler_has_its_own_options(plugins: PluginManager, tmp_path: Path) -> None:
    """Options of a run file are those of its sampler; an override that names another leaves them out."""
    run_file = tmp_path / "run.toml"
    run_file.write_text('workflow = "say_yes"\n[training]\nsampler = "difficulty"\nsampler_options = { memory = 5 }\n')
    resolved = resolve_run(str(run_file), plugins, overrides=("training.sampler=uniform",), backend="scripted")
    assert resolved.config.training.sampler_options == {}


def test_a_resume_with_another_sampler_is_refused(
    run_scripted: RunScripted, sampler: Callable[..., str], tmp_path: Path
) -> None:
    first = run_scripted("training.steps=2")
    resumed = run_scripted("training.steps=4", sampler(), path=first.path, resume=True)
    assert isinstance(resumed.error, ConfigError)
    assert "these keys differ: training.sampler. " in str(resumed.error)


@pytest.mark.parametrize("now", [6, 9])
def test_a_resume_with_another_number_of_tasks_is_refused(run_scripted: RunScripted, tmp_path: Path, now: int) -> None:
    """Positions of the checkpoint would be those of other tasks."""
    path = tmp_path / "run"
    assert run_scripted("training.steps=2", "say_yes.tasks=8", path=path).error is None

    def changed(assembly: Parts) -> None:
        del assembly.tasks.of("train")[now:]  # type: ignore[attr-defined]
        assembly.tasks.of("train").extend(  # type: ignore[attr-defined]
            Task(task_id=f"new-{number}", data={"number": number}) for number in range(8, now)
        )

    before = (path / "metrics.jsonl").read_bytes()
    options = ("training.steps=4", "say_yes.tasks=8")
    resumed = run_scripted(*options, path=path, resume=True, prepare=changed, is_begun=False)
    assert isinstance(resumed.error, ConfigError)
    assert f"the checkpoint has 8 training tasks, but there are {now}; resume with the same" in str(resumed.error)
    assert run_scripted(*options, path=path, resume=True).error is None, "nothing was lost"
    assert (path / "metrics.jsonl").read_bytes().startswith(before)
