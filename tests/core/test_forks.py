"""Tests conversations that begin after a step, alternatives of an answer, stop texts and metadata."""

from __future__ import annotations

import asyncio
import gc
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm_core.algorithms.samples import segments
from rllm_core.engine import Completer, EngineError, TITOCompleter, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.parser import ParsedCompletion, ParsedToolCall
from rllm_core.types import FinishReason, Messages, SampledMessage, Step

USER = {"role": "user", "content": "ask"}
MORE = {"role": "user", "content": "more"}
OTHER = {"role": "user", "content": "other"}
KINDS = pytest.mark.parametrize("kind", [Completer, TITOCompleter])


def engine_of(toys: SimpleNamespace, *answers: str, parser: Any = None) -> Any:
    return toys.ListEngine(parser or toys.BridgingParser(), [toys.letters(answer) for answer in answers])


def sequence(step: Step) -> list[int]:
    """Prompt and completion."""
    return [*step.prompt_ids.tolist(), *step.completion_ids.tolist()]


async def trunk_of(completer: Completer) -> list[Step]:
    """Two turns."""
    messages = Messages([USER])
    steps = [await completer.complete(messages)]
    messages += [steps[0].response, MORE]
    return [*steps, await completer.complete(messages)]


@KINDS
def test_a_fork_goes_on_after_any_step_token_for_token(toys: SimpleNamespace, kind: type[Completer]) -> None:
    engine = engine_of(toys, "one", "two", "three", "four", "five")

    async def run() -> tuple[list[Step], ...]:
        completer = kind(engine)
        trunk = await trunk_of(completer)
        branches = []
        for after in trunk:
            fork = completer.fork(after=after)
            branches.append([await fork.complete([*after.messages, after.response, OTHER])])
            messages = [*branches[-1][0].messages, branches[-1][0].response, MORE]
            if after is trunk[0]:
                branches[-1].append(await fork.complete(messages))
        return trunk, *branches

    trunk, early, late = asyncio.run(run())
    assert early[0].prompt_ids.tolist() == [*sequence(trunk[0]), *toys.LetterParser().render([OTHER])]
    assert early[1].prompt_ids.tolist() == [*sequence(early[0]), *toys.LetterParser().render([MORE])]
    assert late[0].prompt_ids.tolist() == [*sequence(trunk[1]), *toys.LetterParser().render([OTHER])]
    steps = [*trunk, *late, *early]
    assert [step.break_reason for step in steps] == [None] * 5
    assert segments(steps) == [[0, 1, 2], [3, 4]], "a branch behind its trunk continues it"
    assert [step.text for step in steps] == ["one", "two", "five", "three", "four"]


def test_the_trunk_goes_on_unchanged_beside_its_branches(toys: SimpleNamespace) -> None:
    engine = engine_of(toys, "one", "two", "three", "four")

    async def run() -> list[Step]:
        completer = TITOCompleter(engine)
        first = await completer.complete([USER])
        fork = completer.fork(after=first)
        before = sequence(first)
        branch = await fork.complete([USER, first.response, OTHER])
        second = await completer.complete([USER, first.response, MORE])
        assert sequence(first) == before
        assert branch.prompt_ids.tolist() == [*before, *toys.LetterParser().render([OTHER])]
        assert second.prompt_ids.tolist() == [*before, *toys.LetterParser().render([MORE])]
        [segment] = fork.session.segments
        assert segment.completion_spans == ((len(branch.prompt_ids), len(sequence(branch))),)
        return [first, branch, second]

    asyncio.run(run())


def test_a_chain_of_forks_shares_its_memory(toys: SimpleNamespace) -> None:
    """An agent over HTTP forks at every call, because the next one may come from anywhere."""
    turns = 200
    engine = engine_of(toys, *["answer"] * turns)

    async def run() -> list[Step]:
        completer, messages, steps = TITOCompleter(engine), Messages([USER]), []
        for turn in range(turns):
            at = completer.fork(after=steps[-1] if steps else None, key=str(turn))
            steps.append(await at.complete(messages))
            messages += [steps[-1].response, MORE]
        return steps

    steps = asyncio.run(run())
    assert segments(steps) == [list(range(turns))]
    held = {id(array.base): array.base.nbytes for step in steps for array in (step.prompt_ids, step.completion_ids)}
    assert sum(held.values()) <= 4 * 4 * len(sequence(steps[-1]))


def test_branches_share_the_memory_of_their_prefix(toys: SimpleNamespace) -> None:
    turns = 50
    engine = engine_of(toys, *["a long answer " * 10] * 2 * turns)

    async def run() -> tuple[TITOCompleter, list[Step], list[Step]]:
        completer, messages = TITOCompleter(engine), Messages([USER])
        trunk: list[Step] = []
        branches: list[Step] = []
        for _ in range(turns):
            trunk.append(await completer.complete(messages))
            messages.append(trunk[-1].response)
            branches.append(await completer.fork(after=trunk[-1]).complete([*messages, OTHER]))
            messages.append(MORE)
        return completer, trunk, branches

    completer, trunk, branches = asyncio.run(run())
    other = toys.LetterParser().render([OTHER])
    for before, branch in zip(trunk, branches, strict=True):
        assert branch.prompt_ids.tolist() == [*sequence(before), *other]
    del engine.calls[:]
    distinct = len(sequence(trunk[-1])) + sum(len(other) + len(branch.completion_ids) for branch in branches)
    assert held_bytes(completer) < 2 * 4 * distinct + 1000  # with a copy of each prefix, it would be more than 10 times


def held_bytes(owner: object) -> int:
    """Returns the bytes of all buffers of token ids that an object leads to."""
    seen: set[int] = set()
    buffers: dict[int, int] = {}
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            if one.dtype == np.int32:
                buffers[id(one)] = one.nbytes
        else:
            waiting += gc.get_referents(one)
    return sum(buffers.values())


def test_after_a_failure_a_branch_can_go_on(toys: SimpleNamespace) -> None:
    engine = engine_of(toys, "one", "two", "three")
    engine.answers.insert(1, EngineError("503"))

    async def run() -> tuple[Step, Step]:
        completer = TITOCompleter(engine)
        first = await completer.complete([USER])
        fork = completer.fork(after=first)
        with pytest.raises(EngineError):
            await fork.complete([USER, first.response, OTHER])
        return first, await fork.complete([USER, first.response, MORE])

    first, second = asyncio.run(run())
    assert second.prompt_ids.tolist() == [*sequence(first), *toys.LetterParser().render([MORE])]


def test_a_branch_that_edits_its_history_breaks_with_a_reason(toys: SimpleNamespace) -> None:
    async def run() -> Step:
        completer = TITOCompleter(engine_of(toys, "one", "two"))
        first = await completer.complete([USER])
        return await completer.fork(after=first).complete([OTHER, first.response, MORE])

    step = asyncio.run(run())
    assert (step.break_reason, step.segment) == ("history_edited", 1)


def test_a_branch_keeps_the_tools_of_its_step(toys: SimpleNamespace) -> None:
    offered: list[Any] = []

    class ToolParser(toys.BridgingParser):  # type: ignore[misc]
        supports_tools = True

        def bridge_to_next_turn(self, *arguments: Any, tools: Any = None, **more: Any) -> Any:
            offered.append(tools)
            return super().bridge_to_next_turn(*arguments, **more)

    tools = [{"type": "function", "function": {"name": "f"}}]
    parser = ToolParser()

    async def run() -> Step:
        completer = TITOCompleter(engine_of(toys, "one", "two", parser=parser))
        first = await completer.complete([USER], tools=tools)
        return await completer.fork(after=first).complete([USER, first.response, MORE])

    step = asyncio.run(run())
    assert step.break_reason is None
    assert step.tools == tools
    assert offered == [tools]


def test_what_a_branch_renders_anew_treats_old_answers_as_sampled(toys: SimpleNamespace) -> None:
    """Control tokens that the policy spelled do not become real when a branch breaks; those of examples stay."""
    seen: list[Any] = []

    class Spelling(toys.BridgingParser):  # type: ignore[misc]
        def render(self, messages: Any, **more: Any) -> Any:
            seen[:] = messages
            return super().render(messages, **more)

        def count_control_tokens(self, messages: Any) -> int:
            return sum(str(one.get("content")).count("<") for one in messages)

    example = [USER, {"role": "assistant", "content": "example <"}]

    async def run() -> list[Step]:
        completer = TITOCompleter(engine_of(toys, "one<", "two<", "three", parser=Spelling()))
        first = await completer.complete([*example, USER])
        second = await completer.complete([*example, USER, first.response, MORE])
        fork = completer.fork(after=second)
        plain = [dict(one) for one in (first.response, second.response)]
        await fork.complete([*example, OTHER, plain[0], MORE, plain[1], MORE])
        return [first, second]

    sampled = asyncio.run(run())
    answers = [one for one in seen if one["role"] == "assistant"]
    assert [isinstance(one, SampledMessage) for one in answers] == [False, True, True]
    assert [list(ids) for ids in answers[1].completions] == [step.completion_ids.tolist() for step in sampled]


@KINDS
def test_only_a_step_of_the_same_rollout_can_be_forked(toys: SimpleNamespace, kind: type[Completer]) -> None:
    async def run() -> None:
        engine = engine_of(toys, "one", "two", "three")
        one, other = kind(engine), kind(engine)
        step = await one.complete([USER])
        with pytest.raises(ValueError, match=rf"step {step.step_id} was not sampled in this rollout"):
            other.fork(after=step)
        with pytest.raises(TypeError, match=r"'s' is not a step; use one that a completer of this rollout returned"):
            one.fork(after="s")  # type: ignore[arg-type]
        fork = one.fork()
        branch = await fork.fork(after=step).complete([USER, step.response, MORE])
        assert branch.prompt_ids.tolist()[: len(sequence(step))] == sequence(step), "of any of its conversations"

    asyncio.run(run())


@KINDS
def test_seeds_of_named_forks_do_not_depend_on_the_order(toys: SimpleNamespace, kind: type[Completer]) -> None:
    completer = kind(engine_of(toys), seed=5)
    names = ["writer", "critic", "1"]
    seeds = {name: completer.fork(key=name).seed for name in names}
    numbered = completer.fork().seed
    again = kind(engine_of(toys), seed=5)
    assert again.fork().seed == numbered, "forks without a name are counted without the others"
    assert {name: again.fork(key=name).seed for name in reversed(names)} == seeds
    assert again.fork(key="writer").seed == seeds["writer"] == derive_seed(5, "fork", "writer")
    assert len({numbered, *seeds.values()}) == 4


def test_ids_of_tool_calls_differ_between_conversations(toys: SimpleNamespace) -> None:
    class Calling(toys.BridgingParser):  # type: ignore[misc]
        def parse_completion(self, completion_ids: Any, **_: Any) -> ParsedCompletion:
            return ParsedCompletion("", tool_calls=(ParsedToolCall(name="f", arguments={}, raw=""),))

    async def run() -> list[str]:
        completer = TITOCompleter(engine_of(toys, *"abcde", parser=Calling()), seed=3)
        steps = await trunk_of(completer)
        asked = [*steps[0].messages, steps[0].response, OTHER]
        steps.append(await completer.fork().complete([USER]))
        steps.append(await completer.fork(after=steps[0]).complete(asked))
        steps.append(await completer.fork(after=steps[0], key="x").complete(asked))
        return [call["id"] for step in steps for call in step.response["tool_calls"]]

    ids = asyncio.run(run())
    assert ids[:2] == ["call_0_0", "call_1_0"]
    assert len(set(ids)) == 5
    assert asyncio.run(run()) == ids, "they derive from the seed"


@KINDS
def test_alternatives_are_asked_at_once_and_the_conversation_stays(
    toys: SimpleNamespace, kind: type[Completer]
) -> None:
    engine = engine_of(toys, "one", "left", "right", "two", "on")

    async def run() -> tuple[list[Step], Step, Step]:
        completer = kind(engine)
        first = await completer.complete([USER])
        asked = [USER, first.response, MORE]
        ways = await completer.complete_many(asked, 2, max_response_tokens=9, metadata={"of": "two"})
        on = await completer.complete(asked)
        best = ways[1]
        return ways, on, await completer.fork(after=best).complete([*best.messages, best.response, OTHER])

    ways, on, after = asyncio.run(run())
    assert [way.text for way in ways] == ["left", "right"]
    assert [dict(way.metadata) for way in ways] == [{"of": "two"}] * 2
    assert ways[0].prompt_ids.tolist() == ways[1].prompt_ids.tolist() == on.prompt_ids.tolist()
    assert [call.params.max_response_tokens for call in engine.calls[1:3]] == [9, 9]
    assert len({call.seed for call in engine.calls}) == 5
    assert after.prompt_ids.tolist() == [*sequence(ways[1]), *toys.LetterParser().render([OTHER])]


def test_alternatives_may_begin_a_conversation(toys: SimpleNamespace) -> None:
    async def run() -> list[Step]:
        return await TITOCompleter(engine_of(toys, "a", "b", "c")).complete_many([USER], 3)

    assert [step.text for step in asyncio.run(run())] == ["a", "b", "c"]


def test_if_an_alternative_fails_the_others_end(toys: SimpleNamespace) -> None:
    cancelled = []

    class Slow(toys.ListEngine):  # type: ignore[misc]
        async def get_token_output_from_token_input(self, *arguments: Any, **options: Any) -> Any:
            output = await super().get_token_output_from_token_input(*arguments, **options)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(output)
                raise

    async def run() -> None:
        completer = TITOCompleter(Slow(toys.BridgingParser(), [toys.letters("a"), EngineError("503"), [1]]))
        with pytest.raises(EngineError, match="503"):
            await completer.complete_many([USER], 3)
        await asyncio.sleep(0)
        assert len(cancelled) == 2

    asyncio.run(run())


@KINDS
@pytest.mark.parametrize(
    ("texts", "kept"),
    [(["Stop"], "say Stop"), (["n", "Stop", "ay"], "say"), (["zz"], None), (["now"], "say Stop now")],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_text(
    toys: SimpleNamespace, kind: type[Completer], texts: list[str], kept: str | None
) -> None:
    engine = engine_of(toys, "say Stop now", "two")

    async def run() -> tuple[Step, Step]:
        completer = kind(engine)
        first = await completer.complete([USER], stop_texts=texts)
        return first, await completer.complete([USER, first.response, MORE])

    first, second = asyncio.run(run())
    sampled = toys.letters("say Stop now")
    expected = sampled if kept is None else sampled[: len(kept)]
    assert first.completion_ids.tolist() == expected
    assert first.text == (kept or "say Stop now")
    assert first.logprobs is not None
    assert len(first.logprobs) == len(expected)
    assert first.finish_reason is FinishReason.STOP
    assert engine.calls[0].params.stop_texts == tuple(texts)
    assert engine.calls[1].params.stop_texts == ()
    assert second.prompt_ids.tolist()[: len(sequence(first))] == sequence(first)
    assert second.break_reason is None


@pytest.mark.parametrize("texts", ["Stop", [""], [3]])
def test_wrong_stop_texts_are_refused(toys: SimpleNamespace, texts: Any) -> None:
    with pytest.raises(ValueError, match="stop_texts must be a list of texts that are not empty"):
        asyncio.run(TITOCompleter(engine_of(toys, "a")).complete([USER], stop_texts=texts))


def test_stop_texts_need_a_parser(toys: SimpleNamespace) -> None:
    engine = engine_of(toys, "a")
    completer = Completer(engine)

    async def without_parser(*_: Any, **__: Any) -> Any:
        output = engine.assemble_model_output(engine.parser.render([USER]), await sampled())
        engine.parser = None
        return output

    async def sampled() -> Any:
        return await engine.get_token_output_from_token_input([1], sampling_params=None, seed=0)

    engine.get_model_response = without_parser
    with pytest.raises(ConfigError, match="stop texts need a parser, and engine 'list' has none"):
        asyncio.run(completer.complete([USER], stop_texts=["x"]))


@KINDS
def test_a_step_has_the_metadata_of_its_call(toys: SimpleNamespace, kind: type[Completer]) -> None:
    step = asyncio.run(kind(engine_of(toys, "a")).complete([USER], metadata={"call": "x-1"}))
    assert step.metadata == {"call": "x-1"}


@KINDS
def test_a_prompt_is_counted_as_it_would_be_sampled_from(toys: SimpleNamespace, kind: type[Completer]) -> None:
    engine = engine_of(toys, "one", "two", "three")

    async def run() -> None:
        completer = kind(engine)
        messages = Messages([USER])
        for _ in range(2):
            counted = await completer.count_prompt_tokens(messages)
            step = await completer.complete(messages)
            assert counted == len(step.prompt_ids)
            messages += [step.response, MORE]
        fork = completer.fork(after=step)
        counted = await fork.count_prompt_tokens([*step.messages, step.response, OTHER])
        assert counted == len((await fork.complete([*step.messages, step.response, OTHER])).prompt_ids)

    asyncio.run(run())
    assert len(engine.calls) == 3


@KINDS
def test_the_bytes_of_a_sampled_token(toys: SimpleNamespace, kind: type[Completer]) -> None:
    engine = engine_of(toys, "one", "two")

    async def run() -> None:
        completer = kind(engine)
        step = await completer.complete([USER])
        assert await completer.fork().spell(step) == engine.parser.spell(step.completion_ids)
        assert b"".join(await completer.spell(step)).decode() == engine.parser.decode(step.completion_ids)
        with pytest.raises(ValueError, match="was not sampled in"):
            await kind(engine).spell(step)

    asyncio.run(run())


def test_an_engine_without_a_parser_cannot_count(toys: SimpleNamespace) -> None:
    engine = engine_of(toys, "one")
    engine.parser = None

    async def run() -> None:
        with pytest.raises(EngineError, match="has no parser"):
            await Completer(engine).count_prompt_tokens([USER])

    asyncio.run(run())


@KINDS
@pytest.mark.parametrize("turns", [10, 100, 300])
def test_a_conversation_keeps_little_more_than_its_tokens(
    toys: SimpleNamespace, kind: type[Completer], turns: int
) -> None:
    engine = engine_of(toys, *["a long answer"] * turns)

    async def run() -> list[Step]:
        completer, messages, steps = kind(engine), Messages([USER]), []
        for _ in range(turns):
            steps.append(await completer.complete(messages))
            messages += [steps[-1].response, MORE]
        return steps

    steps = asyncio.run(run())
    for step, prompt in zip(steps, engine.calls, strict=True):
        assert step.prompt_ids.tolist() == prompt.prompt
    buffers = {}
    for array in [ids for step in steps for ids in (step.prompt_ids, step.completion_ids)]:
        while isinstance(array.base, np.ndarray):
            array = array.base
        buffers[id(array)] = array.nbytes
    assert sum(buffers.values()) < 1.3 * 4 * len(sequence(steps[-1])) + 1000
