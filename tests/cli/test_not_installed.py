"""Tests that the listings end with our plugins that are not installed, and how to install them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rllm_core.cli import Session, cli
from rllm_core.plugins import missing
from rllm_core.providers import ParserProvider, TrackerProvider, WorkflowProvider


def listed(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments), obj=Session(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        (ParserProvider, "chat_template"): "rllm-renderers",  # is installed here
        (ParserProvider, "imagined"): "rllm-imagined",
        (TrackerProvider, "notebook"): "rllm-imagined",
        (WorkflowProvider, "chess"): "rllm-chess",
    }
    monkeypatch.setattr(missing, "first_party", lambda: known)


@pytest.mark.usefixtures("imagined")
def test_a_listing_ends_with_what_is_not_installed() -> None:
    parsers = listed("parsers").splitlines()
    assert parsers[-1].strip() == "pip install rllm-imagined  # imagined"
    assert not [line for line in parsers if "pip install rllm-renderers" in line]
    assert listed("workflows").splitlines()[-1].strip() == "pip install rllm-chess  # chess"
    assert [line.strip() for line in listed("plugins").splitlines()[-2:]] == [
        "pip install rllm-imagined  # parser imagined, tracker notebook",
        "pip install rllm-chess  # workflow chess",
    ]


@pytest.mark.usefixtures("imagined")
def test_json_stays_a_list_of_what_is_installed() -> None:
    assert "rllm-imagined" not in {row["package"] for row in json.loads(listed("parsers", "--json"))}


def test_nothing_is_said_if_all_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "first_party", dict)
    assert "not installed" not in listed("parsers")
