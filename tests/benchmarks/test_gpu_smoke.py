"""The smoke test for GPUs, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu_smoke
from benchmarks.gpu_models import SHAPES, describe, make_tokenizer
from benchmarks.gpu_smoke import PARTS, Part, chosen, last_error, smoke


def script(tmp_path: Path, name: str, source: str, seconds: int = 60) -> Part:
    """A part that runs a program of the test."""
    path = tmp_path / f"{name}.py"
    path.write_text(source, encoding="utf-8")

    class Program(Part):
        def command(self, *, dry_run: bool) -> list[str]:
            return [sys.executable, str(path)]

    return Program(name, 1, seconds, ("any",), "")


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_does_not_hide_the_next(tmp_path: Path) -> None:
    failing = "print('E  AssertionError: 3 != 4')\nprint('1 failed in 2 s')\nraise SystemExit(1)\n"
    hanging = "import time\nprint('started', flush=True)\ntime.sleep(1000)\n"
    parts = [
        script(tmp_path, "fails", failing),
        script(tmp_path, "hangs", hanging, seconds=5),
        script(tmp_path, "passes", "print('1 passed in 2 s')\n"),
        script(tmp_path, "without_gpu", "print('SKIPPED [1] needs 8 GPUs, and 0 are here')\n"),
    ]
    said: list[str] = []
    folder = tmp_path / "out"
    folder.mkdir()
    verdicts = smoke(parts, folder, minutes=5, dry_run=False, say=said.append)
    assert [verdict.outcome for verdict in verdicts] == ["FAIL", "TIMEOUT", "PASS", "SKIPPED"]
    assert said[0].endswith("fails: AssertionError: 3 != 4")
    assert "needs 8 GPUs" in said[3]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert [part["name"] for part in summary["parts"]] == ["fails", "hangs", "passes", "without_gpu"]
    with tarfile.open(gpu_smoke.pack(folder)) as archive:
        assert "out/fails/output.txt" in archive.getnames()


def test_without_time_parts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    [verdict] = smoke(PARTS[:1], tmp_path / "out", minutes=0, dry_run=False, say=lambda line: None)
    assert verdict.outcome == "SKIPPED"


def test_one_gpu_and_eight_get_their_parts() -> None:
    one, eight = ([part.name for part in chosen(devices)] for devices in (1, 8))
    assert one[:2] == ["imports", "sleep"]
    assert eight[0] == "imports"
    assert eight[-1] == "megatron"
    assert set(one) & set(eight) == {"imports"}
    assert {part.name for part in PARTS} == set(one) | set(eight)


def test_the_cause_of_a_failure_is_found_in_an_output() -> None:
    assert last_error("a\nE   RuntimeError: boom\nshort summary\nFAILED x\n") == "RuntimeError: boom"
    assert last_error("only\nthis\n") == "this"
    assert last_error("") == "no output"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_a_tokenizer_for_all_of_its_ids(name: str, tmp_path: Path) -> None:
    describe(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    tokenizer = make_tokenizer(config["vocab_size"])
    assert len(tokenizer) == config["vocab_size"]
    text = "sort: dbca é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([config["vocab_size"] - 1])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>assistant\n")


COLLECT_ALL = """
import json, sys
import pytest

for arguments in json.loads(sys.argv[1]):
    print("collected", *arguments)
    assert pytest.main(arguments) == 0
"""


@pytest.mark.slow
def test_a_dry_run_imports_and_collects_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file in a process of its own, as in a part; parts of one file only choose other tests of it."""
    parts = list({part.tests[:1]: part for part in reversed(PARTS)}.values())
    monkeypatch.setattr(gpu_smoke, "chosen", lambda devices: parts)
    output = tmp_path / "out"
    code = gpu_smoke.main(["--dry-run", "--output", str(output), "--minutes", "60"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for part in parts:
        text = (output / part.name / "output.txt").read_text(encoding="utf-8")
        assert "::test_" in text or not part.tests, text


@pytest.mark.slow
def test_every_part_has_tests() -> None:
    """Collects them in one process, with the arguments of the process that each of them would be."""
    commands = [part.command(dry_run=True) for part in PARTS if part.tests]
    assert all(command[:3] == [sys.executable, "-m", "pytest"] for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", COLLECT_ALL, json.dumps([command[3:] for command in commands])],
        cwd=gpu_smoke.ROOT, env=os.environ | {"PYTHONPATH": gpu_smoke._python_path()}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    collected = done.stdout.split("collected -p")[1:]
    assert len(collected) == len(commands)
    assert all("::test_" in of_a_part for of_a_part in collected), done.stdout
