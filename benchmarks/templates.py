"""Correctness of both parsers of ``rllm-renderers`` on real chat templates, judged by transformers and ``tokenizers``.

    python -m benchmarks.templates FOLDER

FOLDER contains model folders: ``tokenizer.json``, ``tokenizer_config.json``, and ``chat_template.jinja`` or the
template inside ``tokenizer_config.json``. Each parser runs about sixty short conversations per model
(`benchmarks.templates_corpus`), token by token, with the parser sessions of a rollout. The last line is one JSON object
with the figures of ``chat_template`` and ``renderer``.

**The reference** (`benchmarks.templates_reference`) shares no code with the parsers: transformers renders the template,
``tokenizers`` encodes it. Text of users, tools and models is kept apart from the template's own text, so it never
becomes a control token. Sampled completions are inserted unchanged. A control token is an added token that is special,
or whose name is in angle or square brackets. Prompts are compared token by token; if text spells a control token, as
alternating text and control tokens.

**The figures** are counts over all conversations of all templates:

* ``templates``: model folders, the sum of ``accepted`` and ``refused``. A template is rejected by a
  `rllm_core.errors.UserError` with one line of text. Any other exception counts in ``refused`` and ``raw_errors``.
* ``exact_turns``: later prompts that consist of the previous prompt, the completion, and exactly the tokens the
  template adds. Those are read from its rendering of the whole conversation with placeholder answers: the text after
  the last answer, from its stop token on. Only a break is correct if that rendering changes the text before an answer,
  omits the answer or its end, or ends it with a stop token other than the sampled one. White space, and reasoning the
  template would drop from an earlier answer, do not count as changes. A prompt that equals the rendering of the whole
  parsed conversation is exact too.
* ``broken_turns``: prompts reported as a new segment that equal the rendering of the whole conversation, including
  breaks the conversation forces.
* ``wrong_turns``: all other later prompts, and first prompts that differ from the template's rendering, even if only in
  their tokens.
* ``silent_breaks``: prompts that do not start with the previous prompt and its completion, without a reported break.
* ``vanished_texts``: user texts missing from a prompt; tool and system texts missing although the template prints them
  (verbatim or as JSON, ignoring white space at the ends); and text the model wrote before its stop token that is
  missing from the parsed content, reasoning and calls.
* ``leaked_controls``: control tokens in prompts that a message spells, beyond those of the template and the sampled
  ones.
* ``malformed_accepted``: calls parsed as valid although they are broken in one place or name a tool that was not
  offered. Counted only if tools are offered.
* ``raw_errors``: exceptions from accepted parsers: any exception in a conversation the template accepts, and any except
  a ``UserError`` in one it rejects. These conversations count in no other figure.

Tools are offered only to parsers that support them. Valid calls of offered tools that were not parsed as written count
as ``unread_calls`` in the table and the raw trials.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.peer_environments import SETTINGS
from benchmarks.templates_player import COUNTED, Load, play_folder
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.sandbox.in_child import die_with_parent

PARSERS = ("chat_template", "renderer")
KEYS = ("templates", "accepted", "refused", *(key for key in COUNTED if key != "unread_calls"))


def model_folders(folder: Path | None) -> list[Path]:
    """Finds the model folders in a folder.

    Raises:
        SystemExit: If there are none.
    """
    if folder is None:
        raise SystemExit("FOLDER is missing: pass a folder of model folders, or --from-raw")
    found = sorted(path.parent for path in folder.glob("*/tokenizer.json"))
    if not found:
        raise SystemExit(f"{folder} has no model folders with a tokenizer.json; pass the folder that contains them")
    return found


def parsers() -> dict[str, Load]:
    """Returns functions that create each parser from a model folder."""
    from rllm_renderers.chat_template import ChatTemplateParser
    from rllm_renderers.renderer import RendererParser

    return {"chat_template": ChatTemplateParser.from_model, "renderer": RendererParser.from_model}


def played(folder: Path) -> list[Row]:
    """Returns all rows of one model folder."""
    return list(play_folder(folder, parsers()))


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Runs the conversations with every model folder, and prints a table of results."""
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
    """Yields the table lines of some models."""
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
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.templates", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of model folders")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes (default 1)")
    run("templates", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
