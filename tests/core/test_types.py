"""Tests records: checked when built and assigned, lossless when written, linear in the length of their content."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import pickle
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rllm_core.parser import ParserSession
from rllm_core.types import (
    Episode,
    FinishReason,
    MediaChunk,
    Messages,
    ModelOutput,
    Record,
    SamplingParams,
    Step,
    Task,
    TerminationReason,
    TokenLog,
    TokenOutput,
    TrainingSample,
    Trajectory,
    TrajectoryGroup,
    new_id,
    starts_with,
    text_only,
    token_ids,
)

# --------------------------------------------------------------------------------------------------------------------
# Strategies

text = st.text(max_size=12)
# Ids may contain anything: no code joins or splits them.
ids = st.text(min_size=1, max_size=12) | st.sampled_from(["a:b:0", "-", "\n", " ", "é:😀", "\x1f", "0"])
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=5,
)
json_dicts = st.dictionaries(text, json_values, max_size=3)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
versions = st.integers(0, 2**70)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"])},
        optional={"content": st.none() | text | st.lists(json_dicts, max_size=2), "meta": json_values},
    ),
    max_size=3,
)


@st.composite
def logprobs_of(draw: st.DrawFn, length: int) -> list[float] | None:
    one = st.floats(-1024, 0, width=32)
    return draw(st.none() | st.lists(one, min_size=length, max_size=length))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    completion = draw(tokens)
    return Step(
        step_id=draw(ids),
        messages=draw(messages),
        response=draw(json_dicts),
        prompt_ids=draw(tokens),
        completion_ids=completion,
        logprobs=draw(logprobs_of(len(completion))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        weight_version=draw(st.none() | versions),
        segment=draw(st.integers(0, 3)),
        break_reason=draw(st.none() | text),
        reward=draw(st.none() | numbers),
        metadata=draw(json_dicts),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Steps that continue each other in tokens, in messages, in both or in neither."""
    taken: list[Step] = []
    for step in draw(st.lists(steps(), max_size=4)):
        if taken and draw(st.booleans()):
            before = taken[-1]
            step.prompt_ids = np.concatenate([before.prompt_ids, before.completion_ids, step.prompt_ids])
        if taken and draw(st.booleans()):
            step.messages = [*taken[-1].messages, *step.messages]
        taken.append(step)
    return Trajectory(
        role=draw(ids),
        steps=taken,
        reward=draw(st.none() | numbers),
        trainable=draw(st.booleans()),
        metadata=draw(json_dicts),
    )


@st.composite
def samples(draw: st.DrawFn) -> TrainingSample:
    lengths = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=3))
    spans, end = [], 0
    for gap, sampled in lengths:
        spans.append((end + gap, end + gap + sampled))
        end += gap + sampled
    count = sum(stop - start for start, stop in spans)
    total = end + draw(st.integers(0, 2))
    return TrainingSample(
        sample_id=draw(ids),
        group_id=draw(versions),
        rollout_id=draw(ids),
        role=draw(ids),
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total)),
        turn_spans=spans,
        logprobs=draw(logprobs_of(count)),
        advantages=draw(st.lists(st.floats(-1024, 1024, width=32), min_size=count, max_size=count)),
        weight_versions=draw(st.lists(versions, min_size=len(spans), max_size=len(spans))),
    )


episodes = st.builds(
    Episode,
    task_id=ids,
    rollout_id=text,
    rollout_index=st.integers(0, 99),
    trajectories=st.lists(trajectories(), max_size=2),
    termination_reason=st.sampled_from(TerminationReason),
    is_correct=st.none() | st.booleans(),
    is_validation=st.booleans(),
    error=st.none() | text,
    metrics=st.dictionaries(text, numbers, max_size=2),
    metadata=json_dicts,
)
outputs = {
    "finish_reason": st.sampled_from(FinishReason),
    "weight_version": st.integers(0, 5),
    "newest_weight_version": st.none() | st.integers(5, 9),
}
records: dict[str, st.SearchStrategy[Any]] = {
    "Task": st.builds(Task, task_id=ids, data=json_dicts),
    "MediaChunk": st.builds(
        MediaChunk, sha256=st.text("0123456789abcdef", min_size=64, max_size=64), kind=ids, length_tokens=st.integers(1)
    ),
    "SamplingParams": st.builds(
        SamplingParams,
        temperature=st.floats(0, 9),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 9),
        max_response_tokens=st.integers(1, 9),
        stop_token_ids=st.lists(st.integers(0, 9)),
    ),
    "TokenOutput": tokens.flatmap(
        lambda t: st.builds(TokenOutput, token_ids=st.just(t), logprobs=logprobs_of(len(t)), **outputs)
    ),
    "ModelOutput": tokens.flatmap(
        lambda t: st.builds(
            ModelOutput,
            message=json_dicts,
            prompt_ids=tokens,
            completion_ids=st.just(t),
            logprobs=logprobs_of(len(t)),
            **outputs,
        )
    ),
    "Step": steps(),
    "Trajectory": trajectories(),
    "Episode": episodes,
    "TrajectoryGroup": st.lists(trajectories(), max_size=2).flatmap(
        lambda t: st.builds(
            TrajectoryGroup,
            group_id=versions,
            task_id=ids,
            role=ids,
            trajectories=st.just(t),
            rollout_ids=st.lists(ids, min_size=len(t), max_size=len(t)),
            weight_version=versions,
        )
    ),
    "TrainingSample": samples(),
}


def arrays(record: Any) -> list[np.ndarray[Any, Any]]:
    """Yields every array in a record, including nested ones."""
    if isinstance(record, np.ndarray):
        return [record]
    if isinstance(record, list):
        return [array for item in record for array in arrays(item)]
    return [array for value in vars(record).values() for array in arrays(value)] if isinstance(record, Record) else []


# --------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.slow
@pytest.mark.parametrize("name", records)
@given(data=st.data())
def test_records_survive_paper_pickle_and_copies(name: str, data: st.DataObject) -> None:
    record = data.draw(records[name])
    written = record.to_json()
    assert "\n" not in written
    for again in (
        type(record).from_json(written),
        type(record).from_json(written.encode()),
        type(record).model_validate(record.model_dump()),
        type(record).model_validate(json.loads(json.dumps(record.model_dump(mode="json")))),
        pickle.loads(pickle.dumps(record)),  # noqa: S301 - written here
        copy.copy(record),
        copy.deepcopy(record),
        record.model_copy(deep=True),
    ):
        assert type(again) is type(record)
        assert again == record
        assert again.to_json() == written
        for mine, theirs in zip(arrays(record), arrays(again), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert not theirs.flags.writeable


@pytest.mark.slow
@pytest.mark.parametrize("name", records)
@given(data=st.data())
def test_a_record_equals_only_what_says_the_same(name: str, data: st.DataObject) -> None:
    left, right = data.draw(records[name]), data.draw(records[name])
    # Python's own equality: 0, 0.0, -0.0 and False are equal.
    assert (left == right) == (left.model_dump(mode="json") == right.model_dump(mode="json"))
    assert left != left.to_json()
    assert left != Task(task_id="another")


def test_none_and_empty_stay_different() -> None:
    none, empty = Step(prompt_ids=[1], completion_ids=[]), Step(prompt_ids=[1], completion_ids=[], logprobs=[])
    empty.step_id = none.step_id
    assert none != empty
    assert Step.from_json(none.to_json()).logprobs is None
    read = Step.from_json(empty.to_json()).logprobs
    assert read is not None
    assert len(read) == 0
    episode = Episode(task_id="t", error="", metadata={"a": None, "b": "", "c": [], "d": {}})
    assert Episode.from_json(episode.to_json()).metadata == {"a": None, "b": "", "c": [], "d": {}}
    assert Episode.from_json(episode.to_json()).error == ""


def test_ids_are_fields_that_nobody_parses() -> None:
    episode = Episode(task_id="a:0", rollout_id="b:1:2", trajectories=[Trajectory(role="c:d")])
    again = Episode.from_json(episode.to_json())
    assert (again.task_id, again.rollout_id, again.trajectories[0].role) == ("a:0", "b:1:2", "c:d")


def test_half_a_surrogate_pair_is_refused_in_records_and_spelt_out_in_errors() -> None:
    with pytest.raises(ValidationError, match="half a surrogate pair"):
        Task(task_id="t", data={"x": ["\ud800"]})
    with pytest.raises(ValidationError, match="unicode"):
        Task(task_id="\ud800")
    episode = Episode(task_id="t", error="OSError: no file a\udcff")
    assert episode.error == "OSError: no file a\\udcff"
    assert Episode.from_json(episode.to_json()) == episode


def _report_ids(queue: Any) -> None:
    queue.put([new_id() for _ in range(3)])


def test_ids_of_forked_processes_differ() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_report_ids, args=(queue,))
    child.start()
    theirs = queue.get()
    child.join()
    assert not set(theirs) & {new_id() for _ in range(10)}


# --------------------------------------------------------------------------------------------------------------------
# Checks at construction and assignment

NAN, INF = float("nan"), float("inf")
STEP = {"prompt_ids": [1], "completion_ids": [2, 3]}
OUTPUT = {"token_ids": [1], "finish_reason": "stop", "weight_version": 0}
SAMPLE: dict[str, Any] = {
    "group_id": 0,
    "rollout_id": "r",
    "token_ids": [1, 2, 3, 4],
    "turn_spans": [(1, 2), (3, 4)],
    "logprobs": [-1.0, -2.0],
    "advantages": [0.5, 0.5],
    "weight_versions": [0, 1],
}
GROUP = {"group_id": 0, "task_id": "t", "trajectories": [], "rollout_ids": [], "weight_version": 0}
BAD_IDS = [[-1], [2**31], [2**63], [2**70], [0.5], [1.0], ["1"], [None], [True], [[1]], [1, [2]], 3, None, "12", {1: 2}]
BAD_LOGPROBS = [
    [0.5, -1],
    [NAN, -1],
    [-1, INF],
    [-1, -INF],
    [-1],
    [-1, -1, -1],
    ["a", "b"],
    [None, -1],
    [True, False],
    1,
]
MEDIA = {"sha256": "0" * 64, "kind": "image", "length_tokens": 1}
BAD_NUMBERS = [NAN, INF, -INF, "1", [1], np.array([1.0]), 10**400]


def bad(model: type[Record], base: dict[str, Any], field: str, values: list[Any]) -> list[Any]:
    return [pytest.param(model, base, field, value, id=f"{model.__name__}.{field}={value!r}"[:60]) for value in values]


WRONG = [
    *bad(Step, STEP, "prompt_ids", BAD_IDS),
    *bad(Step, STEP, "completion_ids", BAD_IDS),
    *bad(Step, STEP, "logprobs", BAD_LOGPROBS),
    *bad(Step, STEP, "reward", BAD_NUMBERS),
    *bad(Step, STEP, "segment", [-1, "0", True, 0.0, None]),
    *bad(Step, STEP, "weight_version", [-1, "0", True, 0.5]),
    *bad(Step, STEP, "finish_reason", ["over", None, 3]),
    *bad(Step, STEP, "messages", ["hi", [{"content": "no role"}], [3], {"role": "user"}, None]),
    *bad(Step, STEP, "response", ["hi", None, [1], {"a": NAN}, {1: 2}, {"a": b""}]),
    *bad(Step, STEP, "step_id", ["", 3, None]),
    *bad(Step, STEP, "colour", ["red"]),
    *bad(Trajectory, {}, "reward", BAD_NUMBERS),
    *bad(Trajectory, {}, "trainable", ["yes", 1, None]),
    *bad(Trajectory, {}, "role", ["", None, "x" * 513]),
    *bad(Trajectory, {}, "steps", [[None], [3], ["x"], {}, "x", [{"prompt_ids": [1]}], [{"completion_ids": [1]}]]),
    *bad(Episode, {"task_id": "t"}, "metrics", [{"a": v} for v in [*BAD_NUMBERS, None]]),
    *bad(Episode, {"task_id": "t"}, "task_id", ["", 3, None]),
    *bad(Episode, {"task_id": "t"}, "termination_reason", ["bored", None]),
    *bad(Episode, {"task_id": "t"}, "is_correct", ["yes", 1, 0.5]),
    *bad(Episode, {"task_id": "t"}, "rollout_index", [-1, "1", True]),
    *bad(TokenOutput, OUTPUT, "token_ids", BAD_IDS),
    *bad(TokenOutput, OUTPUT, "logprobs", [[], [-1, -1], [NAN], [1.0]]),
    *bad(TokenOutput, OUTPUT | {"weight_version": 3}, "newest_weight_version", [2, -1, "4"]),
    *bad(SamplingParams, {}, "temperature", [-0.1, NAN, INF, "1", True, None]),
    *bad(SamplingParams, {}, "top_p", [0, 1.01, NAN]),
    *bad(SamplingParams, {}, "max_response_tokens", [0, "3", True]),
    *bad(SamplingParams, {}, "stop_token_ids", [[-1], ["1"], 3, [True]]),
    *bad(TrajectoryGroup, GROUP, "rollout_ids", [["a"]]),
    *bad(TrajectoryGroup, GROUP, "group_id", [-1, "0", True]),
    *bad(TrainingSample, SAMPLE, "token_ids", [[1, 2, 3], [1, 2, 3, -4]]),
    *bad(TrainingSample, SAMPLE, "turn_spans", [[(0, 1), (3, 4)], [(1, 2)], [(1, 3), (2, 3)], [(2, 1), (1, 4)]]),
    *bad(TrainingSample, SAMPLE, "turn_spans", [[(1, 2), (3, 5)], [(-1, 2), (3, 4)], [(3, 4), (1, 2)]]),
    *bad(TrainingSample, SAMPLE, "logprobs", BAD_LOGPROBS),
    *bad(TrainingSample, SAMPLE, "advantages", [[0.5], [NAN, 1], [1, INF], None, ["a", "b"], [1e300, 1]]),
    *bad(TrainingSample, SAMPLE, "weight_versions", [[0], [0, -1], [0, "1"]]),
    *bad(
        MediaChunk,
        {"sha256": "0" * 64, "kind": "image", "length_tokens": 1},
        "sha256",
        ["0" * 63, "G" * 64, "0" * 64 + "\n"],
    ),
    *bad(Task, {"task_id": "t"}, "data", [[], "x", None, {"a": {1: 2}}]),
]


@pytest.mark.parametrize(("model", "base", "field", "value"), WRONG)
def test_what_is_wrong_is_refused_when_built(model: type[Record], base: dict[str, Any], field: str, value: Any) -> None:
    model.model_validate(base)
    with pytest.raises(ValidationError):
        model.model_validate(base | {field: value})


@pytest.mark.parametrize(("model", "base", "field", "value"), WRONG)
def test_what_is_wrong_is_refused_when_assigned_and_changes_nothing(
    model: type[Record], base: dict[str, Any], field: str, value: Any
) -> None:
    record = model.model_validate(base)
    before = record.to_json()
    with pytest.raises(ValidationError):
        setattr(record, field, value)
    assert record.to_json() == before


def test_good_assignments_are_kept() -> None:
    step = Step.model_validate(STEP)
    step.reward = np.float32(0.5)  # type: ignore[assignment]
    step.logprobs = np.array([-1, -2])
    assert type(step.reward) is float
    assert step.logprobs.dtype == np.float32
    trajectory = Trajectory(steps=[step])
    trajectory.reward = 2
    assert trajectory.steps[0] is step
    assert trajectory.total_reward == 2.0
    episode = Episode(task_id="t")
    episode.trajectories = [trajectory]
    assert episode.trajectories[0] is trajectory


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64, ">i4"])
def test_token_ids_of_any_width(dtype: Any) -> None:
    array = token_ids(np.array([0, 1, 100], dtype))
    assert array.dtype == np.int32
    assert array.tolist() == [0, 1, 100]


def test_an_array_that_its_owner_may_change_is_copied_and_a_read_only_one_is_shared() -> None:
    batch = np.arange(1000, dtype=np.int32).reshape(10, 100)
    step = Step(prompt_ids=batch[0, :3], completion_ids=batch[1, :2], logprobs=np.full(2, -1, np.float32))
    batch[:] = 7
    assert step.prompt_ids.tolist() == [0, 1, 2]
    assert step.prompt_ids.base is None, "a row must not keep its whole batch alive"
    again = Step(prompt_ids=step.prompt_ids, completion_ids=step.completion_ids)
    assert again.prompt_ids is step.prompt_ids
    with pytest.raises(ValueError, match="read-only"):
        step.prompt_ids[0] = 5


def test_a_missing_reward_is_no_reward_of_zero() -> None:
    step = Step.model_validate(STEP)
    with pytest.raises(ValueError, match="role 'agent' has no reward"):
        _ = Trajectory(steps=[step]).total_reward
    step.reward = 0.25
    assert Trajectory(steps=[step, step]).total_reward == 0.5
    assert Trajectory(steps=[step], reward=0.0).total_reward == 0.0


def test_the_reward_of_an_episode_is_the_mean_of_its_trainable_trajectories() -> None:
    recorded_only, without = Trajectory(reward=9.0, trainable=False), Trajectory()
    solvers = [Trajectory(role="solver", reward=1.0), Trajectory(role="judge", reward=0.5)]
    assert Episode(task_id="t", trajectories=[*solvers, recorded_only, without]).reward == 0.75
    assert Episode(task_id="t", trajectories=[recorded_only, without]).reward is None


def test_a_failure_is_told_from_an_end() -> None:
    failures = {reason for reason in TerminationReason if reason.is_failure}
    assert failures == {"timeout", "engine_error", "error", "cancelled", "worker_lost"}


def test_frozen_records_can_be_keys() -> None:
    assert len({SamplingParams(), SamplingParams(), SamplingParams(top_k=1)}) == 2
    chunk = MediaChunk(sha256="0" * 64, kind="image", length_tokens=3)
    assert {chunk: 1}[copy.deepcopy(chunk)] == 1
    with pytest.raises(ValidationError, match="frozen"):
        chunk.kind = "audio"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Task(task_id="t"))


def test_media_is_refused_by_name() -> None:
    chunk = MediaChunk(sha256="0" * 64, kind="image", length_tokens=3)
    with pytest.raises(ValueError, match="backend 'x' takes text only, but the prompt holds a chunk of kind 'image'"):
        text_only([1, chunk], "backend 'x'")
    assert text_only([1, 2], "x").tolist() == [1, 2]


def test_the_mask_and_the_counts_follow_from_the_spans() -> None:
    sample = TrainingSample.model_validate(SAMPLE)
    assert sample.loss_mask.tolist() == [False, True, False, True]
    assert (sample.sampled_tokens, sample.prompt_tokens) == (2, 1)


@pytest.mark.slow
@given(tokens, tokens)
def test_starts_with_compares_every_token(left: list[int], right: list[int]) -> None:
    for one in (left + right, token_ids(left + right)):
        assert starts_with(one, left)
        assert starts_with(one, token_ids(left))
    assert starts_with(left, right) == (left[: len(right)] == right)


@pytest.mark.parametrize("length", [1 << 13, 1 << 15])
def test_long_sequences_are_compared_to_the_last_token(length: int) -> None:
    long = token_ids(list(range(length)))
    assert starts_with(long, long[:-1])
    for position in (0, length // 2, length - 1):
        other = long.copy()
        other[position] += 1
        assert not starts_with(long, other)


# --------------------------------------------------------------------------------------------------------------------
# Serialized trajectories share prefixes


def conversation(toys: SimpleNamespace, turns: int) -> Episode:
    """Makes an episode with that many turns, through a session as in a workflow."""
    session: ParserSession = toys.BridgingParser().session()
    said = Messages([{"role": "user", "content": "question"}])
    played = []
    for turn in range(turns):
        prompt = session.next_prompt(said)
        session.record(toys.letters(f"answer number {turn % 10}"))
        completion = session.last_completion_ids
        played.append(
            Step(
                messages=said,
                response=session.answer,
                prompt_ids=prompt.prompt_ids,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                weight_version=0,
            )
        )
        said += [session.answer, {"role": "user", "content": "and then"}]
    return Episode(task_id="t", trajectories=[Trajectory(steps=played, reward=1.0)])


def allocated(build: Callable[[], Any]) -> tuple[int, int]:
    """Returns the bytes held by the result of ``build``, and the peak while building."""
    build()  # warms up caches
    gc.collect()
    tracemalloc.start()
    try:
        result = build()
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return held, peak


@pytest.mark.slow
def test_a_long_episode_is_held_written_read_and_pickled_in_linear_space(toys: SimpleNamespace) -> None:
    short, long = conversation(toys, 50), conversation(toys, 200)
    forms: dict[str, Callable[[Episode, int], Any]] = {
        "played": lambda _, turns: conversation(toys, turns),
        "read": lambda episode, _,: Episode.from_json(written[id(episode)]),
        "unpickled": lambda episode, _: pickle.loads(pickled[id(episode)]),  # noqa: S301
        "deep copy": lambda episode, _: copy.deepcopy(episode),
    }
    written = {id(e): e.to_json() for e in (short, long)}
    pickled = {id(e): pickle.dumps(e) for e in (short, long)}
    assert len(written[id(long)]) < 4.5 * len(written[id(short)])
    assert len(pickled[id(long)]) < 4.5 * len(pickled[id(short)])
    for name, build in forms.items():
        # 4 if linear (5.5 with a buffer that has just doubled), 16 if not.
        few, many = (allocated(lambda e=e, n=n, b=build: b(e, n))[0] for e, n in ((short, 50), (long, 200)))
        assert many < 6 * few, f"{name}: {few} bytes for 50 turns, {many} for 200"
    peak = allocated(long.to_json)[1]
    assert peak < 6 * allocated(short.to_json)[1], "writing needs no more than a few times what is written"


def test_what_is_read_shares_its_tokens_again(toys: SimpleNamespace) -> None:
    episode = conversation(toys, 60)
    for again in (Episode.from_json(episode.to_json()), pickle.loads(pickle.dumps(episode))):  # noqa: S301
        first, *_, last = again.trajectories[0].steps
        assert again == episode
        assert last.messages[0] is first.messages[0]
        pairs = itertools.pairwise(again.trajectories[0].steps)
        assert sum(np.shares_memory(before.completion_ids, after.prompt_ids) for before, after in pairs) > 50


def test_a_copy_is_a_copy_and_shares_what_cannot_change(toys: SimpleNamespace) -> None:
    episode = conversation(toys, 2)
    copied = copy.deepcopy(episode)
    copied.trajectories[0].reward = 5.0
    copied.trajectories[0].steps.pop().reward = 3.0
    copied.metrics["a"] = 1.0
    assert episode.trajectories[0].reward == 1.0
    assert len(episode.trajectories[0].steps) == 2
    assert episode.trajectories[0].steps[1].reward is None
    assert episode.metrics == {}
    assert copied.trajectories[0].steps[0].prompt_ids is episode.trajectories[0].steps[0].prompt_ids
    with pytest.raises(TypeError, match="frozen"):
        copied.trajectories[0].steps[0].response["content"] = "x"


def test_steps_and_written_steps_may_be_mixed(toys: SimpleNamespace) -> None:
    whole = conversation(toys, 3).trajectories[0]
    written = json.loads(whole.to_json())["steps"]
    assert written[1]["prompt_ids"].keys() == written[1]["messages"].keys() == {"continues", "new"}
    mixed = Trajectory(steps=[whole.steps[0], written[1], whole.steps[2]], reward=1.0)
    assert mixed == whole
    assert mixed.steps[0] is whole.steps[0]
    assert mixed.steps[2] is whole.steps[2]


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([STEP | {"prompt_ids": {"continues": True, "new": [1]}}], "needs a complete step before it"),
        ([STEP | {"messages": {"continues": True, "new": []}}], "needs a complete step before it"),
        ([STEP, STEP | {"prompt_ids": {"continues": False, "new": [1]}}], "must be written as"),
        ([STEP, STEP | {"prompt_ids": {"continues": True}}], "must be written as"),
        ([STEP, STEP | {"prompt_ids": {"continues": True, "new": [-1]}}], "between 0"),
        ([STEP, STEP | {"prompt_ids": {"continues": True, "new": [1.5]}}], "must be integers"),
        ([STEP, STEP | {"messages": {"continues": True, "new": [{}]}}], "needs a role"),
        ([STEP, {"prompt_ids": {"continues": True, "new": [1]}}], "completion_ids"),
        (
            [{"prompt_ids": [1]}, STEP | {"prompt_ids": {"continues": True, "new": [1]}}],
            "needs a complete step before it",
        ),
    ],
)
def test_written_steps_that_do_not_fit_are_refused(steps: list[Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        Trajectory.model_validate({"steps": steps})


def test_what_only_compares_equal_is_not_shared() -> None:
    said: list[Any] = [{"role": "user", "n": 1}, {"role": "user", "n": True}, {"n": 1, "role": "user"}]
    said += [{"role": "user", "n": n} for n in (1.0, 0.0, -0.0, False)]
    trajectory = Trajectory(steps=[Step(messages=[one], prompt_ids=[1], completion_ids=[2]) for one in said])
    again = Trajectory.from_json(trajectory.to_json())
    assert json.dumps([list(step.messages) for step in again.steps]) == json.dumps([[one] for one in said])


def test_empty_steps_continue_too() -> None:
    empty = Step(prompt_ids=[], completion_ids=[])
    trajectory = Trajectory(steps=[empty, Step(prompt_ids=[5], completion_ids=[6])])
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@pytest.mark.slow
def test_a_long_training_sample_is_small() -> None:
    tokens_in_all = 32_768

    def build(turns: int, observed: float) -> TrainingSample:
        length = (tokens_in_all - 512) // turns
        sampled = round(length * (1 - observed))
        starts = [512 + turn * length for turn in range(turns)]
        credit = [np.full(sampled, 0.1 * turn, np.float32) for turn in range(turns)]
        return TrainingSample(
            group_id=0,
            rollout_id="r",
            token_ids=np.arange(tokens_in_all),
            turn_spans=[(start, start + sampled) for start in starts],
            logprobs=np.full(sampled * turns, -0.5),
            advantages=np.concatenate(credit) if turns > 1 else np.full(sampled, 0.5),
            weight_versions=[0] * turns,
        )

    assert allocated(lambda: build(1, 0.0))[0] <= 300_000
    assert allocated(lambda: build(20, 0.5))[0] <= 300_000
    sample = build(1, 0.0)
    assert sample.advantages.shape == (tokens_in_all - 512,)
    assert float(sample.advantages.sum(dtype=np.float64)) == 0.5 * (tokens_in_all - 512)
    assert TrainingSample.from_json(sample.to_json()) == sample


def test_a_token_log_keeps_its_views() -> None:
    log = TokenLog([1, 2])
    views = [log.view(0, 2)]
    for token in range(200):
        log.extend([token])
        views.append(log.view(0, len(log)))
    expected = [1, 2, *range(200)]
    for view in views:
        assert view.tolist() == expected[: len(view)]
    with pytest.raises(IndexError):
        log.view(0, 203)
    with pytest.raises(ValueError, match="must be integers"):
        log.extend([0.5])  # type: ignore[list-item]
    assert len(log) == 202
    again = pickle.loads(pickle.dumps(log))  # noqa: S301
    assert again.view(0, 202).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_logs_that_share_memory_are_lists(seed: int) -> None:
    """Logs that go on from each other, alike and differently."""
    rng = random.Random(seed)
    logs: list[tuple[TokenLog, list[int]]] = [(TokenLog(first := list(range(rng.randrange(9)))), first)]
    views: list[tuple[Any, list[int]]] = []
    for _ in range(400):
        log, expected = rng.choice(logs[-8:])
        start, stop = sorted(rng.randint(0, len(expected)) for _ in range(2))
        match rng.randrange(5):
            case 0:
                logs.append((log.prefix(stop), expected[:stop]))
            case 1:
                views.append((log.view(start, stop), expected[start:stop]))
            case 2:
                views.append((log.span(start, stop), expected[start:stop]))
            case _:
                new = [rng.randrange(2)] * rng.choice([1, 3, 40])
                log.extend(new)
                expected += new
    views += [(log.view(0, len(log)), expected) for log, expected in logs]
    assert [np.asarray(view).tolist() for view, _ in views] == [expected for _, expected in views]


def test_logs_that_grow_alike_share_memory() -> None:
    trunk = TokenLog(range(1000))
    one, same, other = (trunk.prefix(1000) for _ in range(3))
    for log, last in ((one, 7), (same, 7), (other, 8)):
        log.extend([5, 6])
        prompt = log.view(0, 1002)
        log.extend([last] * 10)
        assert np.shares_memory(prompt, trunk.view(0, 1000))
        assert log.view(1002, 1012).tolist() == [last] * 10
    assert np.shares_memory(one.view(0, 1012), same.view(0, 1012))
    assert other.view(1000, 1012).tolist() == [5, 6, *[8] * 10]


def test_a_step_shows_a_span_as_an_array() -> None:
    trunk = TokenLog(range(10))
    branch = trunk.prefix(4)
    trunk.extend([7])
    branch.extend([1, 2])
    lazy = Step(step_id="s", prompt_ids=branch.span(0, 5), completion_ids=branch.span(5, 6))
    plain = Step(step_id="s", prompt_ids=[0, 1, 2, 3, 1], completion_ids=[2])
    assert type(lazy.prompt_ids) is np.ndarray
    assert lazy.prompt_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        lazy.prompt_ids[0] = 9
    assert lazy == plain == copy.deepcopy(lazy) == pickle.loads(pickle.dumps(lazy))  # noqa: S301
    assert Step.from_json(lazy.to_json()) == plain
    assert lazy.model_dump() == plain.model_dump()
    assert repr(lazy) == repr(plain)
    assert type(dict(lazy)["prompt_ids"]) is np.ndarray
    assert lazy != Step(step_id="s", prompt_ids=[0, 1, 2, 3, 3], completion_ids=[2])
    with pytest.raises(ValueError, match="2 log-probabilities for 1 tokens"):
        lazy.logprobs = [-1.0, -1.0]  # type: ignore[assignment]
    lazy.prompt_ids = [5]  # type: ignore[assignment]
    assert lazy.prompt_ids.tolist() == [5]
    assert not hasattr(Step, "prompt_ids"), "a subclass would take it for a default"


def test_an_error_of_any_length_is_cut_where_it_is_recorded() -> None:
    error = Episode(task_id="task", error="no such page: " + "x" * 10_000_000).error
    assert error is not None
    assert error.startswith("no such page: xx")
    assert error.endswith("x [10,000,014 characters, cut here]")
    assert len(error) < 5_000
    assert Episode(task_id="task", error=error).error == error, "as when a worker sends it"
    assert Episode(task_id="task", error="short \ud800").error == r"short \ud800"


def test_whether_a_task_is_solved_may_be_a_bool_of_numpy() -> None:
    right = Episode(task_id="task", is_correct=np.array(["a"])[0] == np.array("a"))
    assert right.is_correct is True
    for value in (1.0, np.array([True]), np.float32(1)):
        with pytest.raises(ValidationError, match=r"is_correct\n.*expected True or False, got"):
            Episode(task_id="task", is_correct=value)
