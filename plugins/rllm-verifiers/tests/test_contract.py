"""The contract of workflows, the catalog, and the audit."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from players import TASKSETS, workflow
from rllm_verifiers import audits, catalog

from rllm_devkit.checks.workflows import check_workflow


async def test_it_keeps_the_contract() -> None:
    await keeps("last_letter", tasks_per_split=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last_letter", "higher"])
async def test_it_keeps_the_contract_in_more_tasks(name: str) -> None:
    await keeps(name, tasks_per_split=3)


async def keeps(name: str, tasks_per_split: int) -> None:
    """Checks the contract of workflows, with answers that some tasks are solved by."""
    import verifiers.v1  # noqa: F401 - takes seconds, which would count as blocking the event loop

    results = await check_workflow(
        lambda: workflow(name, train_size=20),
        answers=["5", "9", "a"],
        max_block_seconds=20,
        tasks_per_split=tasks_per_split,
    )
    assert [(result.name, result.detail) for result in results if result.outcome == "failed"] == []
    assert sum(result.outcome == "passed" for result in results) >= 5


def test_listing_imports_no_verifiers() -> None:
    code = (
        "import sys, rllm_verifiers, rllm_verifiers.workflow, rllm_verifiers.catalog; rllm_verifiers.workflows();"
        "rllm_verifiers.workflow.VerifiersWorkflow.describe('textarena'); rllm_verifiers.catalog.variants();"
        "assert 'verifiers.v1' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_variants_are_the_installed_tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"harbor", "textarena"} <= set(catalog.variants())
    for name, requires, text in (
        ("letters-env", "verifiers>=0.4", (TASKSETS / "last_letter.py").read_text()),
        ("other-env", "verifiers-of-something", "__all__ = ['OtherTaskset']"),
        ("tool-env", "verifiers", "x = 1"),
    ):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        (info / "RECORD").write_text(f"{module}.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("letters-env") == "1.0"
    found = set(catalog.variants())
    assert "letters_env" in found
    assert not found & {"other_env", "tool_env"}


def test_the_audit_plays_and_names_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(TASKSETS / "higher.py"), "no-such-package", "textarena"]
    found = dict(audits.audit(names))
    assert found[names[0]]["played"]
    assert found[names[0]]["players"] == 2
    assert "install it" in found["no-such-package"]["refused"]
    assert not found["textarena"]["played"]
    assert found["textarena"]["refused"]
