"""Tests that the chat template benchmark counts each parser error in the right figure, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import templates, templates_player, trials
from benchmarks.templates_reference import TOOL, Reference, Rejected
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, ParsedCompletion, ParsedToolCall, ParserSession, Termination, Turn

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{{ '<tool_call>{"name": ' + (c.function.name | tojson) + ', "arguments": ' + (c.function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# As in Mistral 7B v0.3: the system message becomes part of the last user turn.
MOVES_THE_SYSTEM = """\
{%- set ns = namespace(system='', rest=messages) -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content %}{% set ns.rest = messages[1:] -%}
{%- endif -%}
{%- for m in ns.rest -%}
{{ '<|im_start|>' + m.role + '\\n' + (ns.system if m.role == 'user' and loop.last else '') + (m.content or '') }}
{{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
NO_ANSWERS = "{% for m in messages if m.role == 'assistant' %}{{ raise_exception('no answer') }}{% endfor %}" + TEMPLATE
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["user assistant system tool\nIt is 4.\n\nLet me see what the weather is"] * 3, trainer)
    made.add_special_tokens([START, END, "<|endoftext|>"])
    made.add_tokens(
        [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return made


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer: Tokenizer) -> MakeFolder:
    """Provides ``make_folder(template)``, which makes a model folder."""

    def make(template: str = TEMPLATE, name: str = "toy") -> Path:
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"eos_token": END, "bos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


class Honest(BaseParser):
    """Renders the template above by hand, appends to existing tokens, and reads all completions."""

    name: ClassVar[str] = "honest"
    supports_tools = True
    supports_bridge = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = {t.content: n for n, t in tokenizer.get_added_tokens_decoder().items()}
        self._pattern = re.compile("|".join(map(re.escape, self._controls)))
        self._stop = self._controls[END]

    @classmethod
    def from_model(cls, path: str | Path, config: Any = None) -> Honest:
        return cls(Tokenizer.from_file(str(Path(path) / "tokenizer.json")))

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def get_stop_token_ids(self) -> tuple[int, ...]:
        return (self._stop,)

    def encode(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Encodes pieces of text, each with a flag for whether it may contain control tokens."""
        encode = self._tokenizer.encode
        if all(own or not self._pattern.search(text) for text, own in pieces):
            return list(encode("".join(text for text, _ in pieces)).ids)
        ids: list[int] = []
        for text, own in pieces:
            spelled = self._pattern.search(text) and not own
            ids += [t for part in (text if spelled else [text]) for t in encode(part).ids]
        return ids

    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        pieces = [(f"{START}{message['role']}\n", True)]
        if message.get("reasoning_content"):
            pieces += [("<think>", True), (message["reasoning_content"], False), ("</think>", True)]
        pieces.append((message.get("content") or "", False))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            inside = (
                f'{{"name": "{call["function"]["name"]}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
            )
            pieces += [("<tool_call>", True), (inside, False), ("</tool_call>", True)]
        return [*pieces, (f"{END}\n", True)]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> list[int]:
        begin = [(f"{START}system\n{json.dumps([TOOL])}{END}\n", True)] if tools else []
        asks = [(f"{START}assistant\n", True)] if add_generation_prompt else []
        return self.encode([*begin, *(piece for message in messages for piece in self.message(message)), *asks])

    def bridge_to_next_turn(
        self, prompt_ids: Any, completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> list[int] | None:
        said = [int(token) for token in completion_ids]
        pieces = [("\n", True), *(piece for message in new_messages for piece in self.message(message))]
        closing = [] if said[-1] == self._stop else [self._stop]
        before = [int(token) for token in prompt_ids]
        return [*before, *said, *closing, *self.encode([*pieces, (f"{START}assistant\n", True)])]

    def parse_completion(self, completion_ids: Any, *, prompt_ids: Any = None, tools: Any = None) -> ParsedCompletion:
        ids = [int(token) for token in completion_ids]
        end = ids.index(self._stop) if self._stop in ids else len(ids)
        text = self._tokenizer.decode(ids[:end], skip_special_tokens=False)
        thought = re.match(r"<think>(.*?)(</think>|\Z)", text, re.DOTALL)
        rest = text[thought.end() :] if thought is not None else text
        found = re.findall(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|\Z)", rest, re.DOTALL)
        calls = tuple(self.call(raw, tools) for raw in found)
        for raw in found:
            rest = rest.replace(raw, "", 1)
        stopped = Termination.STOP if end < len(ids) else Termination.TRUNCATED
        return ParsedCompletion(rest, thought[1] if thought is not None else None, calls, stopped)

    def call(self, raw: str, tools: Any) -> ParsedToolCall:
        inside = re.fullmatch(r"<tool_call>(.*)</tool_call>", raw, re.DOTALL)
        try:
            value = json.loads(inside[1]) if inside is not None else None
        except ValueError:
            value = None
        if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
            return ParsedToolCall(None, None, raw, "malformed_structure")
        offered = not tools or value["name"] == "get_weather"
        return ParsedToolCall(value["name"], value["arguments"], raw, "ok" if offered else "unknown_tool")


def counted(folder: Path, load: Callable[[Path], Any]) -> dict[str, int]:
    rows = list(templates_player.play_folder(folder, {"chat_template": load}))
    unread = templates.counts(rows, "chat_template")["unread_calls"]
    return {**templates.figures(rows)["chat_template"], "unread_calls": unread}


KEYS = (
    "templates accepted refused exact_turns broken_turns wrong_turns silent_breaks "
    "vanished_texts leaked_controls malformed_accepted raw_errors"
)
WRONG = (
    "wrong_turns",
    "silent_breaks",
    "vanished_texts",
    "leaked_controls",
    "malformed_accepted",
    "raw_errors",
    "unread_calls",
)


def wrong(found: Mapping[str, int]) -> set[str]:
    return {key for key in WRONG if found[key]}


def test_a_parser_without_a_mistake_has_nothing_counted(make_folder: MakeFolder) -> None:
    found = counted(make_folder(), Honest.from_model)
    assert wrong(found) == set()
    assert (found["templates"], found["accepted"], found["refused"]) == (1, 1, 0)
    assert found["exact_turns"] > 80
    assert 0 < found["broken_turns"] < 20  # edited conversations, and text after a stop token


class NeverBridges(Honest):
    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.mark.slow
def test_reported_breaks_are_counted_and_are_no_mistake(make_folder: MakeFolder) -> None:
    folder = make_folder()
    found, best = counted(folder, NeverBridges.from_model), counted(folder, Honest.from_model)
    assert wrong(found) == set()
    assert found["broken_turns"] > best["broken_turns"]
    assert found["exact_turns"] + found["broken_turns"] == best["exact_turns"] + best["broken_turns"]


class AddsSomething(Honest):
    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> list[int]:
        return [*(super().bridge_to_next_turn(*args, **kwargs) or []), *self.encode([("\n", True)])]


class RendersOther(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return [(text.replace("system\n", "System\n") if own else text, own) for text, own in super().message(message)]


class CutsOtherwise(Honest):
    """Renders the right text with different tokens."""

    def encode(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        pieces = [(part, own) for text, own in pieces for part in ([text] if own else text)]
        return [token for piece in pieces for token in super(CutsOtherwise, self).encode([piece])]


class InventsAnEnd(Honest):
    def bridge_to_next_turn(self, prompt: Any, said: Any, new: Any, *, tools: Any = None) -> list[int] | None:
        cut = int(said[-1]) != self._stop
        extra = [self._controls["<|endoftext|>"]] if cut else []
        bridged = super().bridge_to_next_turn(prompt, said, new, tools=tools) or []
        return [*bridged[: len(prompt) + len(said)], *extra, *bridged[len(prompt) + len(said) :]]


@pytest.mark.parametrize("parser", [AddsSomething, RendersOther, CutsOtherwise, InventsAnEnd])
def test_other_prompts_than_the_templates_are_wrong_turns(make_folder: MakeFolder, parser: type[Honest]) -> None:
    assert wrong(counted(make_folder(), parser.from_model)) == {"wrong_turns"}


class SilentSession(ParserSession):
    def next_prompt(self, *args: Any, **kwargs: Any) -> Turn:
        return dataclasses.replace(super().next_prompt(*args, **kwargs), break_reason=None)


class Silent(NeverBridges):
    def session(self, *, tools: Any = None, on_break: Any = "segment") -> ParserSession:
        return SilentSession(self, tools=tools, on_break=on_break)


def test_a_break_that_is_not_reported_is_silent(make_folder: MakeFolder) -> None:
    assert wrong(counted(make_folder(), Silent.from_model)) == {"silent_breaks"}


class DropsUsers(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return super().message({**message, "content": ""} if message["role"] == "user" else message)


class DropsResults(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return super().message({**message, "content": ""} if message["role"] == "tool" else message)


@pytest.mark.parametrize("parser", [DropsUsers, DropsResults])
def test_a_text_that_is_not_in_the_prompt_has_vanished(make_folder: MakeFolder, parser: type[Honest]) -> None:
    assert wrong(counted(make_folder(), parser.from_model)) == {"wrong_turns", "vanished_texts"}


def test_a_template_that_prints_no_text_of_the_user_is_not_to_be_accepted(make_folder: MakeFolder) -> None:
    folder = make_folder(TEMPLATE.replace("m.content or ''", "m.content if m.role != 'user' else ''"))
    assert "vanished_texts" in wrong(counted(folder, DropsUsers.from_model))


class DropsWhatFollowsCalls(Honest):
    def parse_completion(self, *args: Any, **kwargs: Any) -> ParsedCompletion:
        parsed = super().parse_completion(*args, **kwargs)
        content = "" if parsed.tool_calls else parsed.content
        return dataclasses.replace(parsed, content=content)


class DropsReasoning(Honest):
    def parse_completion(self, *args: Any, **kwargs: Any) -> ParsedCompletion:
        return dataclasses.replace(super().parse_completion(*args, **kwargs), reasoning=None)


@pytest.mark.parametrize("parser", [DropsWhatFollowsCalls, DropsReasoning])
def test_what_a_model_wrote_and_nobody_reads_has_vanished(make_folder: MakeFolder, parser: type[Honest]) -> None:
    assert wrong(counted(make_folder(), parser.from_model)) == {"vanished_texts"}


class ReadsEchoedTags(Honest):
    def parse_completion(self, *args: Any, **kwargs: Any) -> ParsedCompletion:
        parsed = super().parse_completion(*args, **kwargs)
        before, tag, after = parsed.content.partition("</think>")
        return dataclasses.replace(parsed, content=after, reasoning=before) if tag else parsed


def test_what_is_read_around_an_echoed_tag_has_not_vanished(make_folder: MakeFolder) -> None:
    assert wrong(counted(make_folder(), ReadsEchoedTags.from_model)) == set()


class BelievesUsers(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        believed = message["role"] in ("user", "tool")
        return [(text, own or believed) for text, own in super().message(message)]


class BelievesEchoes(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return [(text, own or message["role"] == "assistant") for text, own in super().message(message)]


@pytest.mark.parametrize("parser", [BelievesUsers, BelievesEchoes])
def test_text_that_becomes_a_control_token_has_leaked(make_folder: MakeFolder, parser: type[Honest]) -> None:
    assert wrong(counted(make_folder(), parser.from_model)) == {"wrong_turns", "leaked_controls"}


class AcceptsAnyKey(Honest):
    def call(self, raw: str, tools: Any) -> ParsedToolCall:
        call = super().call(re.sub('"(parameters|argumnts)"', '"arguments"', raw), tools)
        return dataclasses.replace(call, raw=raw)


class AcceptsAnyTool(Honest):
    def call(self, raw: str, tools: Any) -> ParsedToolCall:
        return super().call(raw, None)


@pytest.mark.parametrize(("parser", "expected"), [(AcceptsAnyKey, 2), (AcceptsAnyTool, 2)])
def test_a_malformed_call_that_is_read_as_ok_is_counted(
    make_folder: MakeFolder, parser: type[Honest], expected: int
) -> None:
    found = counted(make_folder(), parser.from_model)
    assert wrong(found) == {"malformed_accepted"}
    assert found["malformed_accepted"] == expected


class ReadsNoCalls(Honest):
    def parse_completion(self, *args: Any, **kwargs: Any) -> ParsedCompletion:
        parsed = super().parse_completion(*args, **kwargs)
        content = parsed.content + "".join(call.raw for call in parsed.tool_calls)
        return dataclasses.replace(parsed, content=content, tool_calls=())


def test_offered_calls_that_stay_text_are_told(make_folder: MakeFolder) -> None:
    assert wrong(counted(make_folder(), ReadsNoCalls.from_model)) == {"unread_calls"}


class WantsContent(Honest):
    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return super().message({**message, "content": message["content"].strip("\0")})


class FailsToRead(Honest):
    def parse_completion(self, *args: Any, **kwargs: Any) -> ParsedCompletion:
        parsed = super().parse_completion(*args, **kwargs)
        if any(call.status != "ok" for call in parsed.tool_calls):
            raise KeyError("arguments")
        return parsed


@pytest.mark.parametrize("parser", [WantsContent, FailsToRead])
def test_exceptions_in_a_turn_are_counted(make_folder: MakeFolder, parser: type[Honest]) -> None:
    assert wrong(counted(make_folder(), parser.from_model)) == {"raw_errors"}


def _raising(error: Exception) -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "raw_errors"),
    [(ConfigError("no such family; set renderer.family"), 0), (ConfigError("two\nlines"), 1), (KeyError("x"), 1)],
)
def test_a_refusal_is_one_line_of_the_projects_own(make_folder: MakeFolder, error: Exception, raw_errors: int) -> None:
    found = counted(make_folder(), _raising(error))
    assert (found["templates"], found["accepted"], found["refused"]) == (1, 0, 1)
    assert found["raw_errors"] == raw_errors
    assert found["exact_turns"] == 0


class RefusesSystem(Honest):
    error: ClassVar[Exception] = ConfigError("the template takes no system message")

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise self.error
        return super().render(messages, **options)


class FailsOnSystem(RefusesSystem):
    error = ValueError("no system")


def test_conversations_that_the_template_does_not_take_want_one_line(make_folder: MakeFolder) -> None:
    folder = make_folder(NO_SYSTEM)
    assert wrong(counted(folder, RefusesSystem.from_model)) == set()
    assert wrong(counted(folder, FailsOnSystem.from_model)) == {"raw_errors"}


class RefusesAnswers(Honest):
    error: ClassVar[Exception] = ConfigError("the template takes no answers")

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if any(message["role"] == "assistant" for message in messages):
            raise self.error
        return super().render(messages, **options)

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> None:
        return None


class FailsOnAnswers(RefusesAnswers):
    error = ValueError("no answer")


def test_a_template_that_takes_no_answers_is_played_up_to_the_first(make_folder: MakeFolder) -> None:
    folder = make_folder(NO_ANSWERS)
    assert wrong(counted(folder, RefusesAnswers.from_model)) == set()
    assert wrong(counted(folder, FailsOnAnswers.from_model)) == {"raw_errors"}


class MovesTheSystem(Honest):
    """Renders `MOVES_THE_SYSTEM`, but appends tokens that this template does not produce."""

    supports_tools = False

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        moved = [dict(message) for message in messages]
        if moved[0]["role"] == "system":
            system = moved.pop(0)["content"]
            if moved[-1]["role"] == "user":
                moved[-1]["content"] = system + moved[-1]["content"]
        return super().render(moved)

    def message(self, message: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return super().message({"role": message["role"], "content": message.get("content")})


class MovesTheSystemAndBreaks(MovesTheSystem):
    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> None:
        return None


def test_a_template_that_moves_the_system_message_cannot_be_continued(make_folder: MakeFolder) -> None:
    folder = make_folder(MOVES_THE_SYSTEM)
    assert "wrong_turns" in wrong(counted(folder, MovesTheSystem.from_model))
    assert wrong(counted(folder, MovesTheSystemAndBreaks.from_model)) == set()


# --------------------------------------------------------------------------------------------------------------------
# The reference


def test_templates_are_found_where_model_folders_have_them(make_folder: MakeFolder) -> None:
    folder = make_folder()
    question = [{"role": "user", "content": "hello"}]
    written = Reference(folder).text(question)
    assert written == f"{START}user\nhello{END}\n{START}assistant\n"
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    assert Reference(folder).text(question) == written
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    assert Reference(folder).text(question) == written
    assert Reference(folder).text(question, [TOOL]) == "1 tools"
    path.write_text(json.dumps(config))
    with pytest.raises(Rejected, match="no template"):
        Reference(folder).text(question)


def test_the_reference_keeps_text_apart_from_control_tokens(make_folder: MakeFolder) -> None:
    reference = Reference(make_folder())
    start, end = reference.control[START], reference.control[END]
    [written] = reference.conversation([{"role": "user", "content": f"a{END}\n{START}system"}])
    assert written.items == (start, f"user\na{END}\n{START}system", end, "\n", start, "assistant\n")
    assert written.token_ids is None
    for ids in (reference.ordinary(f"a{END}b"), reference.respelled("It is 4.")):
        assert not set(ids) & set(reference.control.values())
    assert reference.decode(reference.ordinary(f"a{END}b")) == f"a{END}b"
    assert reference.respelled("It is 4.") != reference.encode("It is 4.")
    assert reference.decode(reference.respelled("It is 4.")) == "It is 4."


# --------------------------------------------------------------------------------------------------------------------
# The figures and the command


def test_figures_have_exactly_the_keys_that_were_asked_for(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder()
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    loads = {"chat_template": Honest.from_model, "renderer": _raising(ConfigError("no such family"))}
    monkeypatch.setattr(templates, "parsers", lambda: loads)
    templates.main([str(tmp_path / "models")])
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert set(found) == {"chat_template", "renderer"}
    for about in found.values():
        assert list(about) == KEYS.split()
    assert found["renderer"] == {**dict.fromkeys(found["renderer"], 0), "templates": 1, "refused": 1}
    assert any("refused: ConfigError: no such family" in line for line in lines)
    assert any(line.startswith("toy") and str(found["chat_template"]["exact_turns"]) in line for line in lines)
    templates.main(["--from-raw"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


@pytest.mark.parametrize("arguments", [[], ["."]])
def test_a_folder_without_models_is_told(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="model folders"):
        templates.main(arguments)


def test_both_parsers_are_played(make_folder: MakeFolder) -> None:
    rows = templates.played(make_folder())
    [ours, renderer] = [row for row in rows if row["kind"] == "model"]
    assert (ours["parser"], ours["outcome"]) == ("chat_template", "accepted")
    assert (renderer["parser"], renderer["outcome"]) == ("renderer", "refused")
    assert templates.figures(rows)["chat_template"]["exact_turns"] > 80
