"""What both parsers of ``rllm-renderers`` do with real chat templates, judged by transformers and ``tokenizers`` alone.

    python -m benchmarks.templates FOLDER

FOLDER holds model folders: ``tokenizer.json``, ``tokenizer_config.json``, and ``chat_template.jinja`` or the template
inside ``tokenizer_config.json``. Each parser plays about sixty short conversations with each of them (see
`benchmarks.templates_corpus`), token by token, with the parser sessions that a rollout uses. The last line is one JSON
object: the figures of ``chat_template`` and of ``renderer``.

**The reference** (`benchmarks.templates_reference`) shares no code with what is measured: transformers renders the
template, ``tokenizers`` encodes it. Text of users, tools and models is kept apart from the template's own text, so it
never becomes a control token; sampled completions are spliced in as they are. A control token is an added token that is
special, or whose name is in angle or square brackets. Where text spells one, prompts are compared as text and control
tokens in turns; everywhere else token for token.

**The figures**, each a count over all conversations of all templates:

* ``templates``: model folders; ``accepted`` and ``refused`` add up to it. A template is refused by an error of the
  project's own family (`rllm_core.errors.UserError`) with one line of text. Any other exception is counted in
  ``refused`` and in ``raw_errors``.
* ``exact_turns``: prompts after the first one that are the prompt before, the completion, and exactly what the template
  adds. What it adds is read off its rendering of the whole conversation with words in place of the model's answers:
  what follows the last answer, from its stop token on. It adds nothing, and only a break is right, where that rendering
  changes what stands before an answer, does not print the answer or its end, or ends it with another stop token than
  the sampled one. Neither white space nor reasoning that the template would drop from an earlier answer counts as such
  a change. A prompt that equals the rendering of the whole conversation as it was read is exact, too.
* ``broken_turns``: prompts that the session reported as a new segment, and that are the rendering of the whole
  conversation; also those that a conversation forces.
* ``wrong_turns``: prompts that are neither, and first prompts that are not what the template renders; also those with
  the same text in other tokens.
* ``silent_breaks``: prompts that do not begin with the prompt before and its completion, with no break reported.
* ``vanished_texts``: texts of users that a prompt does not hold, texts of tools and the system that it does not hold
  though the template prints them (letter by letter or as JSON, white space at the ends aside), and texts that the model
  wrote before its stop token and that are in neither content, reasoning nor calls as read.
* ``leaked_controls``: control tokens in prompts that some message spells, beyond those that the template writes and
  those that were sampled.
* ``malformed_accepted``: calls that are broken in one place, or name a tool that was not offered, and were read as ok.
  Only where tools are offered, which is where the parser says it supports them.
* ``raw_errors``: exceptions from accepted parsers; any at all in a conversation that the template takes, and any but an
  error of the project's own family in one that it does not take. Those conversations count for nothing else.

Tools are offered only to parsers that support them. Calls that were offered, well-formed and not read as they were
written are counted as ``unread_calls`` in the table and in the raw trials.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.environments import SETTINGS
from benchmarks.templates_player import COUNTED, Load, play_folder
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.sandbox.worker import die_with_parent

PARSERS = ("chat_template", "renderer")
KEYS = ("templates", "accepted", "refused", *(key for key in COUNTED if key != "unread_calls"))


def model_folders(folder: Path | None) -> list[Path]:
    """The model folders in a folder.

    Raises:
        SystemExit: If there are none.
    """
    if folder is None:
        raise SystemExit("FOLDER is missing: give a folder of model folders, or --from-raw")
    found = sorted(path.parent for path in folder.glob("*/tokenizer.json"))
    if not found:
        raise SystemExit(f"{folder} holds no model folders: each needs a tokenizer.json; give the folder above them")
    return found


def parsers() -> dict[str, Load]:
    """What makes each parser of a model folder."""
    from rllm_renderers.chat_template import ChatTemplateParser
    from rllm_renderers.renderer import RendererParser

    return {"chat_template": ChatTemplateParser.from_model, "renderer": RendererParser.from_model}


def played(folder: Path) -> list[Row]:
    """All rows of one model folder."""
    return list(play_folder(folder, parsers()))


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Play with every model folder, and print a table of what happened."""
    os.environ.update(SETTINGS)
    folders = model_folders(options.folder)
    print(f"{'template':52}{'parser':15}" + "".join(f"{title:>10}" for title in TITLES), flush=True)
    for rows in _all_played(folders, options.jobs):
        for row in rows:
            trials.add(row)
        print("\n".join(table(rows)), flush=True)
    for name in PARSERS:
        print(f"{'all':52}{name:15}" + "".join(f"{count:>10}" for count in counts(trials.rows, name).values()))


def _all_played(folders: Sequence[Path], jobs: int) -> Iterator[list[Row]]:
    if jobs == 1:
        yield from map(played, folders)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=die_with_parent) as pool:
        yield from pool.map(played, folders)


TITLES = tuple(key.removesuffix("_turns").partition("_")[0] for key in COUNTED)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of some models."""
    for model in of_kind(rows, "model"):
        begin = f"{model['model'][:51]:52}{model['parser']:15}"
        if model["outcome"] != "accepted":
            yield f"{begin}  {model['outcome']}: {model['line']}"
            continue
        of_model = of_kind(rows, "play", model=model["model"])
        yield begin + "".join(f"{count:>10}" for count in counts(of_model, model["parser"]).values())


def counts(rows: Sequence[Row], parser: str) -> dict[str, int]:
    """What is counted in the conversations of a parser."""
    found = of_kind(rows, "play", parser=parser)
    return {key: sum(row[key] for row in found) for key in COUNTED}


def figures(rows: Sequence[Row]) -> Figures:
    """The figures of both parsers; see the module."""
    found: Figures = {}
    for parser in PARSERS:
        outcomes = Counter(row["outcome"] for row in of_kind(rows, "model", parser=parser))
        about = {
            "templates": outcomes.total(),
            "accepted": outcomes["accepted"],
            "refused": outcomes.total() - outcomes["accepted"],
            **counts(rows, parser),
        }
        about["raw_errors"] += outcomes["raw error"]
        found[parser] = {key: about[key] for key in KEYS}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.templates", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of model folders")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play at the same time (default 1)")
    run("templates", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
