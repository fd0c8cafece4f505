"""Tests shell completion as bash requests it, with the real command line in a separate process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rllm_core.cli import CORE_COMMANDS
from rllm_core.cli.completion import PROGRAM, SHELLS, VARIABLE

NOISY = """
import sys, logging
print("I am imported")
print("and I complain", file=sys.stderr)
raise RuntimeError("broken")
"""


def offered(words: str, tmp_path: Path, **variables: str) -> tuple[list[tuple[str, str]], str]:
    """Returns (type, value) of each completion of the last word, and any other output."""
    environment = {**os.environ, VARIABLE: "bash_complete", "COMP_WORDS": words, **variables}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    run = subprocess.run(
        [sys.executable, "-P", "-c", "from rllm_core.cli import main; main()"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    pairs = [line.split(",", 1) for line in run.stdout.splitlines()]
    return [(kind, value) for kind, value in pairs], run.stderr


def values(words: str, tmp_path: Path) -> set[str]:
    found, said = offered(words, tmp_path)
    assert said == ""
    return {value for _, value in found}


@pytest.mark.slow
def test_commands_and_options(tmp_path: Path) -> None:
    assert {name for name in CORE_COMMANDS if " " not in name} | {"new"} <= values("rllm-core ", tmp_path)
    assert values("rllm-core plugins ", tmp_path) == {"show", "enable", "disable", "check"}
    assert values("rllm-core tr", tmp_path) == {"train"}
    assert values("rllm-core plugins dis", tmp_path) == {"disable"}
    assert values("rllm-core train --dry", tmp_path) == {"--dry-run"}
    assert values("rllm-core completion ", tmp_path) == set(SHELLS)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("rllm-core train ", "sort"),
        ("rllm-core eval so", "sort"),
        ("rllm-core train sort --backend ", "local"),
        ("rllm-core eval sort --engine ", "local"),
        ("rllm-core train sort --parser chat", "chat_template"),
        ("rllm-core plugins disable ", "workflows"),
    ],
)
def test_names_of_what_is_installed(tmp_path: Path, words: str, name: str) -> None:
    found = values(words, tmp_path)
    assert name in found
    last = words.rpartition(" ")[2]
    assert all(value.startswith(last) for value in found)


def test_a_run_file_can_be_named_too(tmp_path: Path) -> None:
    assert offered("rllm-core train ./my", tmp_path)[0] == [("file", "./my")]


@pytest.mark.slow
def test_broken_plugins_keep_quiet(tmp_path: Path) -> None:
    (tmp_path / "rllm_noisy.py").write_text(NOISY, encoding="utf-8")
    info = tmp_path / "rllm_noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rllm-noisy\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[rllm_core]\nnoisy = rllm_noisy\n", encoding="utf-8")
    found, said = offered("rllm-core train so", tmp_path, PYTHONPATH=str(tmp_path))
    assert ("plain", "sort") in found
    assert said == ""
    found, said = offered("rllm-core train so", tmp_path, PYTHONPATH=str(tmp_path), RLLM_PLUGINS_STRICT="1")
    assert (found, said) == ([("file", "so")], "")
    assert ("plain", "noisy") in offered("rllm-core plugins show no", tmp_path, PYTHONPATH=str(tmp_path))[0]


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_printed_is_a_script_of_the_shell(tmp_path: Path, shell: str) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "rllm_core", "completion", shell], capture_output=True, text=True, check=True
    )
    assert VARIABLE in run.stdout
    assert PROGRAM in run.stdout
    program = shutil.which(shell)
    if program is not None:  # bash is available everywhere
        subprocess.run([program, "-n"], input=run.stdout, text=True, check=True)
    else:
        assert shell != "bash"
