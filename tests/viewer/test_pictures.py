"""Draws the pictures of docs/viewer.md: into a folder of the test, or into ``RLLM_VIEWER_PICTURES``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import group_id, show
from playwright.sync_api import Page

from rllm_viewer.view.server import ViewServer

MOST_BYTES = 120_000
PICTURES: dict[str, tuple[Callable[[ViewServer], str], str]] = {
    "viewer-run": (lambda server: "#/run/0", "light"),
    "viewer-group": (lambda server: f"#/run/0/group/{group_id(server, 3)}", "light"),
    "viewer-tokens": (lambda server: f"#/run/0/group/{group_id(server, 3)}/rollout/1/tokens?measure=logprob", "dark"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture(name: str, server: ViewServer, tmp_path: Path, new_page: Callable[..., Page]) -> None:
    address, scheme = PICTURES[name]
    page = new_page(scheme=scheme)
    page.set_viewport_size({"width": 1000, "height": 860 if name == "viewer-run" else 640})
    show(page, server, address(server))
    if name == "viewer-tokens":
        page.keyboard.press("d")
    file = Path(os.environ.get("RLLM_VIEWER_PICTURES", tmp_path)) / f"{name}.png"
    page.screenshot(path=file)
    assert 5_000 < file.stat().st_size < MOST_BYTES
    assert (Path(__file__).parents[2] / "docs" / "images" / file.name).is_file()
