"""Tests statements of the pages: links resolve, commands parse, run files load, Python runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from forked import Forks
from generate import first_party_plugins
from pages import PAGES, ROOT, Page, write_files

from rllm_core import hookimpl
from rllm_core.assembly.resolution import load_run_config
from rllm_core.cli import Session, cli
from rllm_core.providers import AdvantageEstimatorProvider, CorrectionProvider

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
README = Page(ROOT / "README.md")
WORKFLOWS = ("sort", "guess", "calculator", "countdown", "math")
RESOLVED = ("train", "eval")


@every_page
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = Page((page.path.parent / path).resolve() if path else page.path)
        assert target.path.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in target.anchors, f"{page.name} links to {link}; {target.name} has {sorted(target.anchors)}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page.name in reached or page.path.suffix != ".md":
            continue
        reached.add(page.name)
        links = (link.partition("#")[0] for link in page.links if not link.startswith("https://"))
        waiting += [Page((page.path.parent / link).resolve()) for link in links if link]
    docs = {page.name for page in PAGES if page.name.startswith("docs/")}
    assert docs - reached <= {"docs/index.md"}
    index = Page(ROOT / "docs" / "index.md")
    pages = (link.partition("#")[0] for link in index.links if not link.startswith(("../", "images/")))
    linked = {f"docs/{link}" for link in pages if link}
    assert linked <= docs
    assert linked >= {name for name in docs if name.count("/") == 1} - {"docs/index.md"}, "those of folders have a page"


@every_page
def test_no_page_names_a_machine_or_a_registry(page: Page) -> None:
    found = re.search(
        r"(?<![\w.])/(?:home|root|tmp|work|Users|opt|mnt|var)/|\b\d+\.\d+\.\d+\.\d+\b"
        r"|pypi|pythonhosted|index-url|find-links(?! dist)",
        page.text,
        re.I,
    )
    assert not found, f"{page.name} mentions {found[0]!r}"


COMMANDS = sorted({command for page in PAGES for command in page.commands})
NAMED = sorted({command for page in PAGES for command in page.named_commands} - set(COMMANDS))


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Parses a command completely without running it; returns its parameters."""
    parsed: list[dict[str, Any]] = []
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: parsed.append(context.params))

    session = Session()
    session.plugins = first_party_plugins()  # plugins that are not installed here have commands, too

    def parse(command: str, *, may_leave_out_arguments: bool = False) -> dict[str, Any]:
        result = CliRunner().invoke(cli, shlex.split(command)[1:], obj=session)
        missing = r"Error: Missing command\.\n$"
        if may_leave_out_arguments:
            missing += r"|Error: Missing argument "
        assert result.exit_code == 0 or re.search(missing, result.output), result.output
        return parsed[-1] if parsed else {}

    return parse


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, parse: Callable[..., dict[str, Any]]) -> None:
    parse(command)


@pytest.mark.parametrize("command", NAMED)
def test_commands_that_are_named_parse(command: str, parse: Callable[..., dict[str, Any]]) -> None:
    parse(command, may_leave_out_arguments=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if {*c.split()} & {*WORKFLOWS} and c.split()[1] in RESOLVED])
def test_what_is_trained_resolves(command: str, parse: Callable[..., dict[str, Any]]) -> None:
    options = parse(command)
    load_run_config(
        options["target"],
        first_party_plugins(),
        overrides=options["overrides"],
        backend=options["backend"],
        parser=options["parser"],
    )


class Ranks:
    """The hooks of ``docs/writing-an-algorithm.md``, whose package is only installed where the page is followed."""

    @hookimpl
    def advantage_estimators(self) -> list[AdvantageEstimatorProvider]:
        return [AdvantageEstimatorProvider(name="ranks", load="rllm_ranks.estimator:Ranks", summary="Of the page.")]

    @hookimpl
    def corrections(self) -> list[CorrectionProvider]:
        return [CorrectionProvider(name="near_mask", load="rllm_ranks.correction:NearMask", summary="Of the page.")]


@pytest.mark.parametrize(
    "text",
    [
        b.text
        for page in PAGES
        for b in page.blocks
        if b.language == "toml"
        and re.search(r"^workflow =", b.text, re.M)
        and page.path.parent.name != "hooks"
        and ".venv-verifiers" not in b.text
    ],
)
def test_run_files_load(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    plugins = first_party_plugins()
    plugins.register(Ranks(), "ranks")
    load_run_config(str(path), plugins)


# test_hooks.py lets the examples of hooks observe a run, test_using_the_model.py exports a model first, test_my_code.py
# and test_agents.py train with the files of their pages; tests/environments has those of verifiers and gymnasium.
ELSEWHERE = {
    "docs/agents.md",
    *(page.name for page in PAGES if page.name.startswith("docs/agents/")),
    "docs/environments/gymnasium.md",
    "docs/environments/verifiers.md",
    "docs/using-the-model.md",
    "docs/my-code.md",
    *(page.name for page in PAGES if page.name.startswith("docs/hooks/")),
}
WITH_PYTHON = [p for p in PAGES if any(b.language == "python" for b in p.blocks) and p.name not in ELSEWHERE]


# A run of 50 steps shows no more of its lines than one of 4.
SHORTER = ('"training.steps": 50', '"training.steps": 4')


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_runs(page: Page, forking: Forks, tmp_path: Path) -> None:
    for contract in (page for page in PAGES if page.name.startswith("docs/contracts/")):
        write_files(contract, tmp_path)  # together they form one package
    modules = write_files(page, tmp_path)
    fragments = [block.text for block in page.blocks if block.language == "python" and not block.file]
    script = tmp_path / "fragments_of_the_page.py"
    script.write_text("\n\n".join(fragments).replace(*SHORTER), encoding="utf-8")
    program = tmp_path / "program_of_the_page.py"
    # A module that a block only mentions does not exist; a module that is imported must.
    program.write_text(
        "import runpy, warnings\nwarnings.simplefilter('error')\n"
        + "".join(f"import {module}\n" for module in modules)
        + f"runpy.run_path({str(script)!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = forking.start(
        [],
        program=str(program),
        output=tmp_path / "output",
        folder=tmp_path,
        path=[str(tmp_path)],
        environment={**os.environ, "PYTHONPATH": path},  # of its child processes
    )
    assert process.wait() == 0, process.err


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([\w-]+)", page.text, re.M)}
    assert named <= targets
