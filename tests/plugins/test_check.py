"""Tests ``rllm-core plugins check``: every plugin gets a verdict, and compliant ones pass."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm_core.plugins import probe
from rllm_devkit.checks import plugin as check

Run = Callable[..., subprocess.CompletedProcess[str]]

KEYS = ["plugin", "package", "version", "value", "outcome", "contract", "packaging", "passed", "failed", "skipped",
        "warnings", "groups"]  # fmt: skip

pytestmark = pytest.mark.slow


def checked(
    rllm_core: Run, name: str, *options: str, packages: tuple[str, ...] = (), beside: tuple[str, ...] | None = ()
) -> tuple[int, dict[str, Any]]:
    """Checks a plugin beside the devkit and some others, which it probes, too; or beside all that are installed."""
    only = {} if beside is None else {"RLLM_PLUGINS": ",".join((name.rpartition("/")[2], "devkit", *beside))}
    run = rllm_core("plugins", "check", name, "--json", *options, packages=packages, **only)
    assert run.returncode in (0, 1), run.stderr
    assert "Traceback" not in run.stderr
    document = json.loads(run.stdout)
    assert list(document) == KEYS
    assert run.returncode == (document["outcome"] == "failed")
    outcomes = [check["outcome"] for group in document["groups"] for check in group["checks"]]
    assert [outcomes.count(name) for name in ("passed", "failed", "skipped", "warning")] == [
        document[name] for name in ("passed", "failed", "skipped", "warnings")
    ]
    assert (document["contract"] == "failed") == (document["failed"] > 0)
    assert (document["packaging"] == "warnings") == (document["warnings"] > 0)
    if "--strict" not in options:
        assert document["outcome"] == document["contract"]
    return run.returncode, document


def found(document: dict[str, Any], kind: str = "plugin") -> dict[str, dict[str, str]]:
    return {check["name"]: check for group in document["groups"] if group["kind"] == kind for check in group["checks"]}


@pytest.mark.parametrize(
    ("name", "package", "words"),
    [
        ("broken", "rllm-broken", "RuntimeError: the flux capacitor is empty"),
        ("exits", "rllm-exit", "SystemExit: goodbye"),
        ("exits-hard", "rllm-exit", "its import ended the process (exit code 7)"),
        (
            "endless",
            "rllm-endless",
            "its import did not end within 10 s; it was in <module> (rllm_endless/__init__.py:",
        ),
        ("missing", "rllm-missing", "pip install 'rllm-fixture-not-there>=2.1'"),
        ("outdated", "rllm-outdated", "cannot import name 'not_yet_invented'"),
        ("misspelt", "rllm-misspelt", "did you mean 'backends'?"),
        ("garbage", "rllm-garbage", "which is not a BackendProvider record"),
        ("taker", "rllm-taker", "its command 'train' has the name of a built-in command"),
        ("foreign-api", "rllm-foreign-api", "written for version 2.0 of the plugin API"),
        (
            "endless-hook",
            "rllm-hostile",
            "its import did not end within 10 s; it was in workflows (rllm_hostile/endless_hook.py:",
        ),
        ("exits-in-hook", "rllm-hostile", "SystemExit: from a hook"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_gets_a_verdict(rllm_core: Run, name: str, package: str, words: str) -> None:
    seconds = 10 if "did not end" in words else 120
    code, document = checked(rllm_core, name, f"--deadline-seconds={seconds}", packages=(package,))
    assert code == 1
    assert [group["kind"] for group in document["groups"]] == ["packaging", "plugin"], "nothing of it is checked"
    assert found(document)["import"]["outcome"] == "failed"
    assert words in found(document)["import"]["detail"]
    assert found(document, "packaging")["version"]["outcome"] == "passed", "its metadata can be read all the same"


def test_an_error_of_any_length_is_shown_in_part(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "huge-error", packages=("rllm-hostile",))
    detail = found(document)["import"]["detail"]
    assert detail.startswith("rllm_hostile/huge_error.py:3: RuntimeError: xxx")
    assert len(detail) <= check.MAX_DETAIL_CHARACTERS


def test_text_of_others_controls_no_terminal(rllm_core: Run) -> None:
    run = rllm_core("plugins", "check", "colourful-error", packages=("rllm-hostile",))
    assert run.returncode == 1
    assert "RuntimeError" in run.stdout
    assert all(character.isprintable() or character == "\n" for character in run.stdout)


def test_a_plugin_that_prints_does_not_spoil_the_document(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "chatty", packages=("rllm-chatty",))
    assert found(document)["import"]["outcome"] == "passed"
    detail = found(document, "workflow")["built"]["detail"]
    assert detail.endswith("): rllm_chatty:Chat must be a subclass of rllm_core.workflow.Workflow")
    assert "devkit" not in detail


def test_a_heavy_import_is_named(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "heavy", packages=("rllm-heavy",))
    assert found(document)["light"] == {
        "name": "light",
        "outcome": "failed",
        "detail": "imports torch when it is loaded",
    }


def test_the_place_of_a_hang_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process writes its stack line by line, and the plugin is seldom on the first one."""
    begins = 'Thread 0x1 (most recent call first):\n  File "threading.py", line 327 in wait\n'
    whole = begins + '  File "stack.py", line 5 in <module>\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    output = tmp_path / "output"

    def answer(number: int) -> None:
        output.write_text(begins)
        threading.Timer(0.2, output.write_text, [whole]).start()

    monkeypatch.setattr(probe, "LATEST_ANSWER_SECONDS", 600.0)
    monkeypatch.setattr(probe, "place_in", lambda text: text)
    child: Any = SimpleNamespace(send_signal=answer)
    assert probe._stuck_at(child, output) == whole


def test_a_provider_that_hangs_is_ended_with_all_it_has_started(rllm_core_process: Run) -> None:
    _, document = checked(rllm_core_process, "hanging", "--deadline-seconds=15", packages=("rllm-hanging",))
    [result] = found(document, "backend").values()
    assert result["outcome"] == "failed"
    assert (
        "the check of backend 'hanging' did not end within 15 s; it was in <module> (rllm_hanging/stack.py:5)"
        in result["detail"]
    )


def test_a_provider_that_ends_its_process_is_one_of_several(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "bad-backends", packages=("rllm-backends",))
    results = {group["name"]: group for group in document["groups"] if group["kind"] == "backend"}
    assert (
        results["exits"]["checks"][0]["detail"] == "the check of backend 'exits' ended the process (exit code 9): bye"
    )
    assert "must be a subclass of rllm_core.backend.BackendProtocol" in results["no-backend"]["checks"][0]["detail"]
    assert "No module named 'rllm_backends.no_such_module'" in results["unloadable"]["checks"][0]["detail"]


def test_metadata_that_is_missing_is_told_key_by_key(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "foreign-api", packages=("rllm-foreign-api",))
    packaging = found(document, "packaging")
    problems = {name: result["detail"] for name, result in packaging.items() if result["outcome"] == "warning"}
    assert problems.keys() == {"readme", "licence", "python", "types", "requirements"}
    assert [name for name, result in found(document).items() if result["outcome"] == "failed"] == ["import"]
    assert problems["requirements"] == "rllm-core is not among the dependencies"
    assert problems["types"].startswith("rllm_foreign_api has no py.typed")


def test_a_workflow_that_a_stranger_has_published_passes(rllm_core: Run) -> None:
    code, document = checked(rllm_core, "relay", packages=("rllm-relay",))
    assert code == 0, document
    assert found(document, "packaging")["api version"]["detail"] == "1.0"
    assert document["packaging"] == "passed"
    assert found(document, "workflow")["closing"]["outcome"] == "passed"
    assert found(document, "reward function")["built"]["outcome"] == "passed"


def test_what_else_is_installed_does_not_matter(rllm_core: Run) -> None:
    others = ("rllm-endless", "rllm-broken", "rllm-hanging")
    packages = ("rllm-relay", *others)
    code, document = checked(rllm_core, "relay", "--deadline-seconds=300", packages=packages, beside=None)
    assert code == 0, document


def test_two_plugins_of_one_name_are_told_apart(rllm_core: Run) -> None:
    twins = ("rllm-twin-a", "rllm-twin-b")
    run = rllm_core("plugins", "check", "twin", packages=twins)
    assert run.returncode == 2
    assert "both provide a plugin 'twin'" in run.stderr
    _, document = checked(rllm_core, "rllm-twin-a/twin", "--no-plugins=rllm-twin-b/twin", packages=twins)
    assert found(document)["import"]["outcome"] == "passed"
    assert document["package"] == "rllm-twin-a"


def test_a_name_that_is_ours_is_told(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "takes-core", "--deadline-seconds=120", packages=("rllm-hostile",))
    assert "advantage estimator 'grpo' is provided by rllm-core" in found(document)["providers"]["detail"]
    packaging = found(document, "packaging")
    assert packaging["summary"]["detail"] == "pyproject.toml has no description"
    assert packaging["api version"]["detail"].endswith('RLLM_CORE_API = "1.0" in rllm_hostile.takes_core')


def test_what_is_wrong_with_a_package_fails_only_where_that_is_asked_for(rllm_core: Run) -> None:
    """The package has no API version, README or license, but its reward function works."""
    code, document = checked(rllm_core, "careless", packages=("rllm-careless",))
    assert code == 0, document
    assert (document["contract"], document["packaging"]) == ("passed", "warnings")
    noted = {name for name, result in found(document, "packaging").items() if result["outcome"] == "warning"}
    assert noted == {"readme", "licence", "python", "types", "requirements", "api version"}
    [packaging, *_] = document["groups"]
    assert (packaging["kind"], packaging["outcome"]) == ("packaging", "warning")
    code, document = checked(rllm_core, "careless", "--strict", packages=("rllm-careless",))
    assert code == 1
    assert (document["outcome"], document["contract"], document["packaging"]) == ("failed", "passed", "warnings")
    text = rllm_core("plugins", "check", "careless", packages=("rllm-careless",))
    assert text.returncode == 0
    last = text.stdout.splitlines()[-1]
    assert last.startswith("rllm-careless 0.1, plugin 'careless': contract passed (")
    assert last.endswith(" 0 failed, 3 skipped); packaging: 6 warnings")  # its reward function needs tasks


def test_wrong_usage_is_one_line(rllm_core: Run) -> None:
    for arguments, words in (
        (("no-such-plugin",), "no plugin named 'no-such-plugin'"),
        (("core",), "the core's own providers are not a plugin"),
        (("workflows", "-o", "gues.low=1"), "did you mean 'guess'?"),
        (("workflows", "-o", "nonsense"), "nonsense"),
    ):
        run = rllm_core("plugins", "check", *arguments)
        assert run.returncode == 2, run.stdout
        assert run.stderr.startswith("error: ")
        assert words in run.stderr
        assert run.stderr.count("\n") == 1


def test_a_disabled_plugin_is_not_imported(rllm_core: Run) -> None:
    _, document = checked(rllm_core, "broken", "--no-plugins=broken", packages=("rllm-broken",))
    assert found(document)["import"]["detail"] == "--no-plugins was given"


def test_the_published_workflows_pass(rllm_core: Run, tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{number} + 1?", "answer": str(number + 1)}) for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "talks.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 8))
    options = ("guess.high=3", "dataset.train_file=rows.jsonl", "sft.train=talks.jsonl")
    words = (word for option in options for word in ("-o", option))
    run = rllm_core("plugins", "check", "workflows", *words, RLLM_PLUGINS="workflows,devkit")
    assert run.returncode == 0, run.stdout
    last = run.stdout.splitlines()[-1]
    assert last.startswith("rllm-workflows 0.1.0, plugin 'workflows': contract passed (")
    assert last.endswith("; packaging: passed")
    assert "hostile answers" in run.stdout


def test_the_devkit_passes_its_own_checks(rllm_core: Run) -> None:
    """The process that runs the command has loaded it already; a new one must still import it."""
    code, document = checked(rllm_core, "devkit", "--strict")
    assert code == 0, document
    assert found(document)["hooks"]["detail"] == "cli_commands"
    assert {group["name"] for group in document["groups"] if group["kind"] == "command"} == {
        "new",
        "parser check",
        "plugins check",
    }


def test_the_published_parsers_pass_with_a_model(rllm_core: Run) -> None:
    from rllm_local.starter import starter_model

    _, without = checked(rllm_core, "renderers")
    results = found(without, "parser").values()
    assert {result["outcome"] for result in results} == {"failed"}, "nothing was checked"
    assert all(result["detail"].startswith("it needs a model: pass --model PATH") for result in results)
    code, document = checked(rllm_core, "renderers", "--model", str(starter_model()))
    assert code == 0, document
    parsers = {group["name"]: group for group in document["groups"] if group["kind"] == "parser"}
    assert parsers["chat_template"]["outcome"] == "passed"


def test_the_embedded_backend_passes(rllm_core: Run) -> None:
    from rllm_local.starter import starter_model

    code, document = checked(rllm_core, "local", "--model", str(starter_model()), beside=("renderers",))
    assert code == 0, document
    assert found(document, "backend")["engine: seeds"]["outcome"] == "passed"
    assert found(document, "backend")["checkpoint"]["outcome"] == "passed"
