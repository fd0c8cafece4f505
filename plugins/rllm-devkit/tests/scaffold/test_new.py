"""Tests of ``rllm-core new``: files, names and rejected input."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core.cli import main
from rllm_devkit.templates import KINDS, PackageNames, template

ROOT = Path(__file__).parents[4]
LONGEST = "abcdefgh-abcdefgh-abcdefgh-abcd1"

# Files besides those that every package has.
MORE = {
    "backend": ["rllm_word_count/parser.py"],
    "engine": ["rllm_word_count/parser.py"],
    "reward": ["tests/examples.jsonl"],
}
ALONE = ["workflow", "reward", "scorer", "sampler", "estimator", "loss", "correction"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture
def new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``new("workflow", "word-count")`` in an empty folder; returns exit code, standard output and error."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["new", *arguments])
        printed = capsys.readouterr()
        return int(leaving.value.code or 0), printed.out, printed.err

    return run


@every_kind
def test_what_is_written(new: Callable[..., tuple[int, str, str]], kind: str) -> None:
    code, printed, _ = new(kind, "word_count")
    assert code == 0
    folder = Path("rllm-word-count")
    made = files(folder)
    assert set(made) == {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "rllm_word_count/__init__.py",
        f"rllm_word_count/{kind}.py",
        "rllm_word_count/py.typed",
        f"tests/test_{kind}.py",
        *MORE.get(kind, ()),
    }
    assert [line[2:] for line in printed.splitlines()[1 : len(made) + 1]] == sorted(made)
    assert not [path for path, text in made.items() if "placeholder" in (path + text).lower()]
    assert made["LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")


@every_kind
def test_the_project_file(new: Callable[..., tuple[int, str, str]], kind: str) -> None:
    new("workflow", "first")
    new(kind, "word-count")
    first, made = (
        tomllib.loads(Path(name, "pyproject.toml").read_text()) for name in ("rllm-first", "rllm-word-count")
    )
    project = made["project"]
    assert project["name"] == "rllm-word-count"
    assert project["entry-points"] == {"rllm_core": {"word-count": "rllm_word_count"}}
    assert any(requirement.startswith("rllm-core") for requirement in project["dependencies"])
    assert all(">=" in requirement for requirement in project["dependencies"])

    def renamed(tables: Any) -> str:
        own = {"description": "", "dependencies": []}
        text = json.dumps({**tables, "project": {**tables["project"], **own}})
        return text.replace("word-count", "first").replace("word_count", "first")

    assert renamed(made) == renamed(first), "the templates differ in more than they need"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ab", LONGEST])
def test_what_is_written_is_formatted_and_clean(
    new: Callable[..., tuple[int, str, str]], name: str, tmp_path: Path
) -> None:
    """No name makes a line too long or lets the formatter join lines."""
    for kind in KINDS:
        assert new(kind, name, "--into", str(tmp_path / kind))[0] == 0
        for settings in (["--config", str(ROOT / "pyproject.toml")], []):
            for check in (["check"], ["format", "--check"]):
                ruff = [sys.executable, "-m", "ruff", *check, *settings, "--no-cache", "."]
                result = subprocess.run(ruff, cwd=tmp_path / kind, capture_output=True, text=True, check=False)
                assert result.returncode == 0, result.stdout


def test_names() -> None:
    names = PackageNames("word_count-2")
    assert (names.distribution, names.module, names.class_prefix) == (
        "rllm-word-count-2",
        "rllm_word_count_2",
        "WordCount2",
    )


def test_as_json(new: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    folder = tmp_path / "deep down" / "it's"
    code, printed, _ = new("loss", "mine", "--into", str(folder), "--json")
    assert code == 0
    said = json.loads(printed)
    assert (said["kind"], said["name"], said["folder"]) == ("loss", "mine", str(folder))
    assert said["files"] == sorted(files(folder))
    install, check, use = said["next"]
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {install}"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["pip", "install", "-e", f"{folder}[dev]"]
    assert check.startswith("pytest ")
    assert "algorithm.loss=mine" in use


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "lowercase letters"),
        ("9lives", "start with a letter"),
        ("Words", "lowercase letters"),
        ("größe", "lowercase letters"),
        ("../words", "lowercase letters"),
        ("a/b", "lowercase letters"),
        ("a b", "lowercase letters"),
        ("a.b", "lowercase letters"),
        ("words\n", "lowercase letters"),
        ("word--count", "single - or _"),
        ("words-", "single - or _"),
        ("x" * 33, "at most 32 characters"),
        ("x" * 300, "at most 32 characters"),
        ("rllm-words", "must not start with 'rllm-'"),
        ("rllm_words", "must not start with 'rllm_'"),
        ("class", "Python keyword"),
        ("core", "rllm-core itself"),
        ("local", "rllm-local"),
        ("verl", "rllm-verl"),
        ("devkit", "rllm-devkit"),
        ("workflows", "rllm-workflows"),
        ("sort", "the workflow of rllm-workflows"),
        ("chat-template", "'chat_template' is the parser of rllm-renderers"),
        ("grpo", "the advantage estimator of rllm-core"),
        ("training", "a key of the run file"),
        ("plugins", "a key of the run file"),
    ],
)
def test_names_that_are_refused(new: Callable[..., tuple[int, str, str]], name: str, expected: str) -> None:
    code, printed, said = new("workflow", "--", name)
    assert (code, printed) == (2, "")
    assert said.startswith("error: name ")
    assert expected in said
    assert len(said) < 300
    assert said.count("\n") == 1
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("kind", "name", "hidden"), [("parser", "base", "BaseParser"), ("loss", "policy", "PolicyLoss")]
)
def test_no_class_hides_one_of_the_core(
    new: Callable[..., tuple[int, str, str]], kind: str, name: str, hidden: str
) -> None:
    code, _, said = new(kind, name)
    assert code == 2
    assert f"class {hidden}" in said
    assert not list(Path.cwd().iterdir())


def test_a_folder_with_something_in_it_stays_as_it_is(new: Callable[..., tuple[int, str, str]]) -> None:
    folder = Path("rllm-words")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for arguments in (["words"], ["words", "--into", "rllm-words"], ["words", "--into", "rllm-words/notes.txt"]):
        code, printed, said = new("tracker", *arguments)
        assert (code, printed) == (2, "")
        assert "is not an empty folder" in said
    assert files(Path()) == {"rllm-words/notes.txt": "mine"}
    assert new("tracker", "words", "--into", "rllm-words/empty")[0] == 0


@pytest.mark.parametrize("kind", ALONE)
def test_a_single_file(new: Callable[..., tuple[int, str, str]], kind: str) -> None:
    code, printed, said = new(kind, "games/word_count.py")
    assert (code, said) == (0, "")
    made = files(Path())
    assert list(made) == ["games/word_count.py"]
    assert made["games/word_count.py"] == PackageNames("word_count").fill(template(kind)[f"rllm_placeholder/{kind}.py"])
    target = "score" if kind == "reward" else f"WordCount{kind.capitalize()}"
    assert f"./games/word_count.py:{target}" in printed.splitlines()[-1]
    assert f" {target}(" in made["games/word_count.py"]
    for check in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "."]
        result = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


def test_a_single_file_as_json(new: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "it's" / "mine.py"
    said = json.loads(new("loss", str(path), "--json")[1])
    [use] = said.pop("next")
    assert said == {"kind": "loss", "name": "mine", "folder": str(path.parent), "files": ["mine.py"]}
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {use}"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == f"algorithm.loss={path}:MineLoss"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["backend", "mine.py"], "kind backend needs a package; give a name without .py"),
        (["observer", "mine.py"], "One file is enough for: workflow, reward, estimator, loss, correction"),
        (["reward", "mine.py", "--into", "here"], "FOLDER/NAME.py"),
        (["reward", "my-score.py"], "use my_score.py"),
        (["reward", "Score.py"], "lowercase letters"),
        (["reward", ".py"], "lowercase letters"),
        (["workflow", "sort.py"], "the workflow of rllm-workflows"),
        (["loss", "policy.py"], "class PolicyLoss would shadow"),
    ],
)
def test_single_files_that_are_refused(
    new: Callable[..., tuple[int, str, str]], arguments: list[str], expected: str
) -> None:
    code, printed, said = new(*arguments)
    assert (code, printed) == (2, "")
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_a_file_that_exists_stays_as_it_is(new: Callable[..., tuple[int, str, str]]) -> None:
    Path("mine.py").write_text("mine")
    code, printed, said = new("reward", "mine.py")
    assert (code, printed) == (2, "")
    assert "mine.py exists" in said
    assert files(Path()) == {"mine.py": "mine"}
    assert "cannot be written" in new("reward", "mine.py/other.py")[2]


@every_kind
def test_nothing_needs_the_devkit_at_run_time(kind: str) -> None:
    for path, text in template(kind).items():
        if not path.startswith("tests/"):
            assert "rllm_devkit" not in text
    project = tomllib.loads(template(kind)["pyproject.toml"])["project"]
    assert not [requirement for requirement in project["dependencies"] if "devkit" in requirement]
    assert "rllm-devkit>=0.1" in project["optional-dependencies"]["dev"]


def test_a_kind_that_does_not_exist(new: Callable[..., tuple[int, str, str]]) -> None:
    code, _, said = new("optimizer", "mine")
    assert code == 2
    assert "'workflow'" in said
