"""Tests completers: exact steps, one conversation at a time, and retryable failures."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm_core.costs import SAMPLING
from rllm_core.engine import Completer, EngineError, RolloutEngine, Terminated, TITOCompleter, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.parser import SegmentBreak
from rllm_core.types import (
    Episode,
    FinishReason,
    MediaChunk,
    Messages,
    ModelOutput,
    PlacedMedia,
    SamplingParams,
    Step,
    TerminationReason,
    TokenOutput,
    Trajectory,
)
from rllm_devkit.scripted import ScriptedEngine

USER = {"role": "user", "content": "ask"}
MORE = {"role": "user", "content": "more"}


def play(completer: Completer, *tails: list[Any], first: list[Any] | None = None) -> list[Step]:
    """Asks once, then once more after each tail."""

    async def run() -> list[Step]:
        messages = Messages(first or [USER])
        steps = [await completer.complete(messages)]
        for tail in tails:
            messages.append(steps[-1].response)
            messages.extend(tail)
            steps.append(await completer.complete(messages))
        return steps

    return asyncio.run(run())


@pytest.fixture
def engine(toys: SimpleNamespace) -> Any:
    return toys.ListEngine(toys.BridgingParser(), [toys.letters(text) for text in ("one", "two", "three")])


def test_what_is_no_token_output_is_refused_where_it_comes_in(toys: SimpleNamespace) -> None:
    class Careless(toys.ListEngine):  # type: ignore[misc]
        async def get_token_output_from_token_input(self, *args: Any, **options: Any) -> Any:
            output = await super().get_token_output_from_token_input(*args, **options)
            return SimpleNamespace(**output.__dict__) if len(self.calls) == 1 else output

    completer = TITOCompleter(Careless(toys.BridgingParser(), [toys.letters("one"), toys.letters("two")]))
    with pytest.raises(EngineError, match=r"engine 'list' \(Careless\) returned SimpleNamespace, not TokenOutput"):
        play(completer)
    assert play(completer)[0].text == "two", "nothing of it was kept"


def test_the_first_call_needs_no_reset(engine: Any, toys: SimpleNamespace) -> None:
    """Upstream's first `complete` raised TypeError: a dataclass field on a class that is not a dataclass."""
    (step,) = play(TITOCompleter(engine))
    assert step.prompt_ids.tolist() == toys.LetterParser().render([USER])
    assert step.completion_ids.tolist() == toys.letters("one")
    assert (step.text, step.segment, step.weight_version) == ("one", 0, 7)


def test_the_second_prompt_holds_the_completion_once(engine: Any, toys: SimpleNamespace) -> None:
    """Upstream duplicated the completion: its remembered text lacked it, but its remembered tokens contained it."""
    first, second = play(TITOCompleter(engine), [MORE])
    assert second.prompt_ids.tolist() == [
        *first.prompt_ids.tolist(),
        *toys.letters("one"),
        *toys.LetterParser().render([MORE]),
    ]
    assert engine.calls[1].prompt == second.prompt_ids.tolist()
    assert (second.segment, second.break_reason) == (0, None)


def test_other_messages_do_not_go_on_from_stale_tokens(engine: Any, toys: SimpleNamespace) -> None:
    """Upstream appended unrelated messages to the tokens of the previous conversation."""

    async def run() -> tuple[Step, Step]:
        completer = TITOCompleter(engine)
        return await completer.complete([USER]), await completer.complete([MORE])

    first, second = asyncio.run(run())
    assert second.prompt_ids.tolist() == toys.LetterParser().render([MORE])
    assert (second.segment, second.break_reason) == (1, "shrunk")
    assert first.prompt_ids.tolist() == toys.LetterParser().render([USER])


@pytest.mark.parametrize(("parser", "token_in_token_out"), [(True, False), (False, True)])
def test_an_engine_without_token_in_token_out_is_refused_by_name(
    toys: SimpleNamespace, parser: bool, token_in_token_out: bool
) -> None:
    engine = toys.ListEngine(toys.BridgingParser() if parser else None, [], token_in_token_out=token_in_token_out)
    with pytest.raises(
        ValueError, match=r"engine 'list' \(ListEngine\) (does not support token-in/token-out|has no parser)"
    ):
        TITOCompleter(engine)


def test_token_in_token_out_is_off_unless_an_engine_says_otherwise() -> None:
    assert RolloutEngine.supports_token_in_token_out.fget(object()) is False  # type: ignore[attr-defined]
    assert inspect.isabstract(RolloutEngine)


def test_seeds_follow_from_every_part() -> None:
    parts = [(1,), ("1",), (1, 2), (12,), ("1", "2"), ("1\x1f2",), ("a", "b"), ("ab",), ("b", "a"), (-1,), ("é",), ()]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("run", 3) == derive_seed("run", int(np.int64(3))) == derive_seed("run", np.int64(3))  # type: ignore[arg-type]
    assert derive_seed("train", 0, 3) == derive_seed("train", 0, 3)


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_turns_and_forks_have_seeds_of_their_own_and_the_same_ones_again(
    toys: SimpleNamespace, kind: type[Completer]
) -> None:
    def seeds(root: int) -> list[int]:
        engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("a")] * 8)
        completer = kind(engine, seed=root)
        play(completer, [MORE])
        left, right = completer.fork(), completer.fork()
        assert type(left) is kind
        play(left, [MORE])
        play(right)
        play(left.fork())
        play(right.fork(), [MORE])
        return [call.seed for call in engine.calls]

    assert seeds(5) == seeds(5)
    assert len(set(seeds(5)) | set(seeds(6))) == 16


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_forks_keep_parameters_limits_and_purpose(toys: SimpleNamespace, kind: type[Completer]) -> None:
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("a")] * 3)
    params = SamplingParams(temperature=0.5)
    fork = kind(engine, sampling_params=params, is_validation=True, max_prompt_tokens=50).fork()
    play(fork)
    assert engine.calls[0].is_validation
    assert engine.calls[0].params.temperature == 0.5
    assert engine.calls[0].params.stop_token_ids == (toys.END, toys.PAD)
    assert fork.max_prompt_tokens == 50


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_validation_travels_with_the_call_and_is_no_state_of_the_engine(
    toys: SimpleNamespace, kind: type[Completer]
) -> None:
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("a")] * 4)
    before = {k: v for k, v in vars(engine).items() if k not in ("answers", "calls")}

    async def run() -> None:
        validation, training = kind(engine, is_validation=True), kind(engine)
        await validation.complete([USER])
        await training.complete([USER])
        await asyncio.gather(training.fork().complete([USER]), validation.fork().complete([USER]))

    asyncio.run(run())
    assert [call.is_validation for call in engine.calls] == [True, False, False, True]
    assert {k: v for k, v in vars(engine).items() if k not in ("answers", "calls")} == before


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_one_call_at_a_time(toys: SimpleNamespace, kind: type[Completer]) -> None:
    class Slow(toys.ListEngine):  # type: ignore[misc, name-defined]
        async def get_token_output_from_token_input(self, *args: Any, **kwargs: Any) -> TokenOutput:
            await asyncio.sleep(0)
            return await super().get_token_output_from_token_input(*args, **kwargs)  # type: ignore[no-any-return]

    engine = Slow(toys.BridgingParser(), [toys.letters("a")] * 3)

    async def run() -> list[Any]:
        completer = kind(engine)
        first = await asyncio.gather(completer.complete([USER]), completer.complete([USER]), return_exceptions=True)
        return [*first, await completer.fork().complete([USER])]

    step, error, forked = asyncio.run(run())
    assert isinstance(step, Step)
    assert isinstance(forked, Step)
    assert isinstance(error, RuntimeError)
    assert "completer.fork()" in str(error)


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
@pytest.mark.parametrize("retry", ["same", "other"])
@pytest.mark.parametrize("failure", ["error", "cancelled", "abort"])
def test_after_a_failure_the_conversation_can_go_on(
    toys: SimpleNamespace, kind: type[Completer], retry: str, failure: str
) -> None:
    failures = {
        "error": EngineError("down"),
        "cancelled": asyncio.CancelledError(),
        "abort": TokenOutput(token_ids=[150], logprobs=[-1], finish_reason=FinishReason.ABORT, weight_version=0),
    }
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("one"), failures[failure], toys.letters("two")])

    async def run() -> list[Step]:
        completer = kind(engine, seed=3)
        messages = Messages([USER])
        first = await completer.complete(messages)
        messages += [first.response, MORE]
        with pytest.raises((EngineError, asyncio.CancelledError)):
            await completer.complete(messages)
        if retry == "other":
            messages[-1] = {"role": "user", "content": "shorter"}
        return [first, await completer.complete(messages)]

    first, second = asyncio.run(run())
    assert (second.segment, second.break_reason) == (0, None)
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + len(first.completion_ids)] == [
        *first.prompt_ids.tolist(),
        *first.completion_ids.tolist(),
    ]
    assert engine.calls[1].seed == engine.calls[2].seed
    if retry == "same":
        assert engine.calls[1].prompt == engine.calls[2].prompt


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
@pytest.mark.parametrize(
    ("allowed", "longest", "message"), [(20, 500, "allowed"), (None, 60, "do not fit the model's 60 positions")]
)
def test_a_prompt_that_is_too_long_ends_the_rollout_or_is_asked_again_shorter(
    toys: SimpleNamespace, kind: type[Completer], allowed: int | None, longest: int, message: str
) -> None:
    class Short(toys.ListEngine):  # type: ignore[misc, name-defined]
        max_model_tokens = longest

        async def get_token_output_from_token_input(
            self, token_input: Any, *, sampling_params: Any, **more: Any
        ) -> Any:
            self.check_prompt(np.asarray(token_input), sampling_params.max_response_tokens)
            return await super().get_token_output_from_token_input(token_input, sampling_params=sampling_params, **more)

    engine = Short(toys.BridgingParser(), [toys.letters("one")] * 3)

    async def run() -> Step:
        completer = kind(engine, max_prompt_tokens=allowed, sampling_params=SamplingParams(max_response_tokens=8))
        with pytest.raises(Terminated, match=message) as caught:
            await completer.complete([{"role": "user", "content": "x" * 100}])
        assert caught.value.reason is TerminationReason.MAX_PROMPT_TOKENS
        return await completer.complete([USER])

    step = asyncio.run(run())
    assert (step.segment, step.break_reason, step.text) == (0, None, "one")


def test_an_empty_completion_is_an_error_of_the_engine(toys: SimpleNamespace) -> None:
    with pytest.raises(EngineError, match=r"engine 'list' .* empty completion"):
        play(TITOCompleter(toys.ListEngine(toys.BridgingParser(), [[]])))


def test_a_plain_completer_finds_segments_by_comparing_tokens(toys: SimpleNamespace) -> None:
    def answers() -> list[list[int]]:
        return [toys.letters("one"), [7, *toys.letters("two")], toys.letters("three")]

    first, second, third = play(Completer(toys.ListEngine(toys.LetterParser(), answers())), [MORE], [MORE])
    assert [s.segment for s in (first, second, third)] == [0, 0, 1]
    assert [s.break_reason for s in (first, second, third)] == [None, None, "prefix_mismatch"]
    assert second.prompt_ids.base is second.completion_ids.base
    merging = play(Completer(toys.ListEngine(toys.MergingParser(), answers())), [MORE], [MORE])
    assert [s.segment for s in merging] == [0, 1, 2]


def test_a_plain_completer_works_with_an_engine_that_only_speaks_messages(toys: SimpleNamespace) -> None:
    class Chat(toys.ListEngine):  # type: ignore[misc, name-defined]
        async def get_model_response(self, messages: Any, **_: Any) -> ModelOutput:
            return ModelOutput(
                message={"role": "assistant", "content": str(len(messages))},
                prompt_ids=[],
                completion_ids=[],
                finish_reason=FinishReason.STOP,
                weight_version=0,
            )

    assert [s.text for s in play(Completer(Chat(None, [])), [MORE])] == ["1", "3"]


def test_a_list_that_is_edited_later_changes_no_step(engine: Any) -> None:
    async def run() -> tuple[Step, Step, list[dict[str, Any]]]:
        completer = TITOCompleter(engine)
        nested = [{"type": "text", "text": "ask"}]
        system: dict[str, Any] = {"role": "system", "content": "kind", "meta": nested}
        messages: list[dict[str, Any]] = [system, dict(USER)]
        first = await completer.complete(messages)
        messages += [dict(first.response), dict(MORE)]
        second = await completer.complete(messages)
        nested[0]["text"] = system["content"] = messages[1]["content"] = "edited"
        del messages[2:]
        return first, second, messages

    first, second, messages = asyncio.run(run())
    system = {"role": "system", "content": "kind", "meta": [{"type": "text", "text": "ask"}]}
    assert messages[0]["content"] == "edited"
    assert first.messages == [system, USER]
    assert second.messages == [system, USER, first.response, MORE]


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_steps_share_the_messages_and_tokens_of_plain_lists(toys: SimpleNamespace, kind: type[Completer]) -> None:
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("a")] * 2)

    async def run() -> tuple[Step, Step]:
        completer = kind(engine)
        first = await completer.complete([dict(USER)])
        return first, await completer.complete([dict(USER), dict(first.response), dict(MORE)])

    first, second = asyncio.run(run())
    assert first.messages[0] is second.messages[0]
    assert np.shares_memory(first.completion_ids, second.prompt_ids)


def test_a_step_per_call_may_have_its_own_limit(engine: Any) -> None:
    async def run() -> None:
        completer = TITOCompleter(engine, sampling_params=SamplingParams(max_response_tokens=9, top_k=3))
        step = await completer.complete([USER], max_response_tokens=4)
        await completer.complete([USER, step.response, MORE])

    asyncio.run(run())
    assert [(c.params.max_response_tokens, c.params.top_k) for c in engine.calls] == [(4, 3), (9, 3)]


def test_one_prompt_many_seeds_keeps_their_order(engine: Any, toys: SimpleNamespace) -> None:
    outputs = asyncio.run(
        engine.get_token_outputs_from_token_input(
            [4, 5], sampling_params=SamplingParams(), seeds=[3, 1], is_validation=True
        )
    )
    assert [o.token_ids.tolist() for o in outputs] == [toys.letters("one"), toys.letters("two")]
    assert [(c.seed, c.is_validation) for c in engine.calls] == [(3, True), (1, True)]


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_tools_that_nobody_reads_are_an_error_by_name(toys: SimpleNamespace, kind: type[Completer]) -> None:
    """Otherwise tool calls would silently become plain content and rewards would stay flat."""
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("one")])
    completer, tool = kind(engine), {"type": "function", "function": {"name": "look_up"}}
    engine.parser.supports_tools = False
    with pytest.raises(
        ConfigError, match=r"offers tools \(look_up\), but parser '.*' cannot read tool calls of this model"
    ):
        asyncio.run(completer.complete([{"role": "user", "content": "q"}], tools=[tool]))
    engine.parser.supports_tools = True
    step = asyncio.run(completer.complete([{"role": "user", "content": "q"}], tools=[tool]))
    assert step.response
    assert step.tools == [tool]


def test_media_is_refused_by_name(toys: SimpleNamespace) -> None:
    chunk = MediaChunk(sha256="0" * 64, kind="image", length_tokens=3)
    with pytest.raises(ValueError, match=r"engine 'scripted' takes text only.*'image'"):
        asyncio.run(
            ScriptedEngine().get_token_output_from_token_input([4, chunk], sampling_params=SamplingParams(), seed=0)
        )


def test_an_engine_without_a_parser_says_so(toys: SimpleNamespace) -> None:
    engine = toys.ListEngine(None, [[150]])
    assert engine.tokenizer is None
    with pytest.raises(EngineError, match="'list' has no parser"):
        play(Completer(engine))


def test_a_rollout_survives_a_parser_that_breaks_every_turn(toys: SimpleNamespace) -> None:
    engine = toys.ListEngine(toys.NoncompliantParser(), [toys.letters("a")] * 3)
    steps = play(TITOCompleter(engine), [MORE], [MORE])
    assert [(s.segment, s.break_reason) for s in steps] == [(0, None), (1, "prefix_mismatch"), (2, "prefix_mismatch")]
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=steps, reward=1.0)])
    assert Episode.from_json(episode.to_json()) == episode


def test_a_strict_completer_does_not_go_on_in_a_new_segment(toys: SimpleNamespace) -> None:
    engine = toys.ListEngine(toys.MergingParser(), [toys.letters("hi"), toys.letters("there")])
    strict = TITOCompleter(engine, on_segment_break="raise")
    for completer in (strict, strict.fork()):
        engine.answers = [toys.letters("hi"), toys.letters("there")]
        with pytest.raises(SegmentBreak, match="bridge_none"):
            play(completer, [MORE])


def test_a_plain_completer_carries_images_too(toys: SimpleNamespace) -> None:
    image = PlacedMedia(sha256="0" * 64, kind="image", length_tokens=1, start=1)

    class Seeing(toys.LetterParser):  # type: ignore[misc, name-defined]
        def place_media(self, prompt_ids: Any, messages: Any, *, start: int = 0) -> tuple[PlacedMedia, ...]:
            return (image,)

    asked: list[Any] = []

    class Engine(toys.ListEngine):  # type: ignore[misc, name-defined]
        async def get_token_output_from_token_input(self, token_input: Any, **options: Any) -> TokenOutput:
            asked.append(token_input)
            return await super().get_token_output_from_token_input([1], **options)

    [step] = play(Completer(Engine(Seeing(), [toys.letters("one")])))
    assert step.prompt_media == (image,)
    assert [token for token in asked[0] if isinstance(token, MediaChunk)] == [image]
    assert len(asked[0]) == len(step.prompt_ids)


@pytest.mark.parametrize(("temperature", "sources"), [(1.0, [1, 2]), (0.0, [3, 0])])
def test_later_turns_use_the_later_source_unless_sampling_is_greedy(
    engine: Any, toys: SimpleNamespace, temperature: float, sources: list[int]
) -> None:
    later = toys.ListEngine(engine.parser, list(engine.answers))
    params = SamplingParams(temperature=temperature)
    play(TITOCompleter(engine, sampling_params=params, later_source=later), [MORE], [MORE])
    assert [len(engine.calls), len(later.calls)] == sources


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_every_call_is_counted_once_with_its_tokens(engine: Any, kind: type[Completer]) -> None:
    completer = kind(engine)
    steps = play(completer, [MORE])
    spent = completer.scope.tally.kinds[SAMPLING]
    assert spent.calls == len(steps) == 2
    assert spent.prompt_tokens == sum(len(step.prompt_ids) for step in steps)
    assert spent.completion_tokens == sum(step.completion_tokens for step in steps)
    assert spent.unmetered == 0


@pytest.mark.parametrize("kind", [Completer, TITOCompleter])
def test_a_failed_call_is_counted_once_and_as_unmetered(toys: SimpleNamespace, kind: type[Completer]) -> None:
    completer = kind(toys.ListEngine(toys.BridgingParser(), [EngineError("down"), toys.letters("one")]))
    with pytest.raises(EngineError, match="down"):
        play(completer)
    [step] = play(completer)
    spent = completer.scope.tally.kinds[SAMPLING]
    assert (spent.calls, spent.unmetered) == (2, 1)
    assert (spent.prompt_tokens, spent.completion_tokens) == (len(step.prompt_ids), step.completion_tokens)


def test_a_prompt_fits_up_to_the_last_position_and_the_last_id(toys: SimpleNamespace) -> None:
    class Limited(toys.ListEngine):  # type: ignore[misc]
        max_model_tokens = 5
        vocabulary_size = 4

    engine = Limited(toys.BridgingParser(), [])
    engine.check_prompt(np.array([1, 2, 3]), 2)
    for prompt, new_tokens in ([1, 2, 3], 3), ([1, 2, 4], 2), ([], 1):
        with pytest.raises(EngineError):
            engine.check_prompt(np.array(prompt, dtype=np.int64), new_tokens)


def test_an_answer_without_tokens_cannot_be_asked_for(toys: SimpleNamespace) -> None:
    completer = TITOCompleter(toys.ListEngine(toys.BridgingParser(), [toys.letters("one")]))
    for count in (0, 2.0, "2", True):
        with pytest.raises(ValueError, match=f"count must be an integer and at least 1, got {count!r}"):
            asyncio.run(completer.complete_many([USER], count))
        with pytest.raises(ValueError, match=f"max_response_tokens must be an integer and at least 1, got {count!r}"):
            asyncio.run(completer.complete([USER], max_response_tokens=count))


def test_a_limit_may_be_a_number_of_numpy(toys: SimpleNamespace) -> None:
    engine = toys.ListEngine(toys.BridgingParser(), [toys.letters("one")])
    asyncio.run(TITOCompleter(engine).complete([USER], max_response_tokens=np.int64(4)))  # type: ignore[arg-type]
    assert type(engine.calls[0].params.max_response_tokens) is int


@pytest.mark.parametrize("tools", ["add", ["add"], {"name": "add"}, [len], [{"function": "add"}], 3])
def test_tools_that_describe_nothing_are_refused_before_the_template_sees_them(
    toys: SimpleNamespace, tools: Any
) -> None:
    completer = TITOCompleter(toys.ListEngine(toys.BridgingParser(), [toys.letters("one")]))
    for call in (completer.complete, completer.count_prompt_tokens):
        with pytest.raises(ValueError, match="tools must be a list of dictionaries that describe tools"):
            asyncio.run(call([USER], tools=tools))


@pytest.mark.parametrize("key", [1, ["a"], 1.5])
def test_the_key_of_a_fork_is_a_text(toys: SimpleNamespace, key: Any) -> None:
    completer = TITOCompleter(toys.ListEngine(toys.BridgingParser(), []))
    with pytest.raises(TypeError, match="key must be a text"):
        completer.fork(key=key)
