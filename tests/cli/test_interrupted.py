"""Tests Ctrl-C outside of a training run, which saves a checkpoint of its own."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from rllm_core.cli import cli
from rllm_core.cli.groups import LazyGroup


@pytest.mark.parametrize("arguments", [["train", "sort"], ["plugins", "show", "sort"]])
def test_ctrl_c_in_any_command_has_its_exit_code(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its modules are imported and its run file is read: the documented code is 130, not 1 (failed)."""

    def get_command(self: LazyGroup, ctx: click.Context, name: str) -> click.Command:
        raise KeyboardInterrupt

    monkeypatch.setattr(LazyGroup, "get_command", get_command)
    ended = CliRunner().invoke(cli, arguments)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "interrupted by SIGINT\n")
