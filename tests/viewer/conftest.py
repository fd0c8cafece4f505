"""A browser for all tests, and a page that fails its test if it prints an error or asks another machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import browser
import demo_runs
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from rllm_viewer.view.server import ViewServer, opened

WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
SIZES = {"desktop": (1200, 800), "phone": (400, 800)}


@contextmanager
def served(*runs: Path) -> Iterator[ViewServer]:
    server = opened(runs, 0, None)
    for run in server.answers.runs:
        run.index.update()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = browser.found()
    assert program is not None, "there is no Chromium; run: make test-viewer"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=browser.FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of most tests."""
    return demo_runs.demo(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ViewServer]:
    other = demo_runs.demo(folder.parent / "other", steps=6)
    with served(folder, other) as started:
        yield started


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages, each in a context of its own."""
    faults: list[str] = []
    with ExitStack() as contexts:

        def make(
            *, size: str = "desktop", scheme: str = "light", bypasses: bool = False, expected: str = "nothing"
        ) -> Page:
            width, height = SIZES[size]
            context: BrowserContext = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=bypasses
            )
            contexts.callback(context.close)
            context.set_default_timeout(WAIT_MS)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = context.new_page()
            page.on(
                "console",
                lambda message: (
                    message.type in ("error", "warning")
                    and expected not in message.text
                    and faults.append(message.text)
                ),
            )
            page.on("pageerror", lambda error: faults.append(f"{error}"))
            page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
            page.on(
                "request",
                lambda request: (
                    request.url.startswith(("http://127.0.0.1:", "data:", "file:", "blob:"))
                    or faults.append(f"asks for {request.url}")
                ),
            )
            return page

        yield make
    assert faults == []


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page()


def show(page: Page, server: ViewServer, address: str = "#/") -> None:
    """Opens a view, and waits until it is there."""
    page.goto("about:blank")
    page.goto(f"{server.address}{address}")
    page.wait_for_selector("body[data-opened]")


def wait_for_view(page: Page, address: str) -> None:
    """Waits until the page shows a view; ``address`` is the start of its hash."""
    page.wait_for_selector(f'body[data-opened^="{address}"]')


def group_id(server: ViewServer, number: int | None, *, run: int = 0, last: bool = False) -> int:
    """Returns the id of the group with this number; of a validation, if it is None."""
    found = [row.id for row in server.answers.runs[run].index.rows() if row.group == number]
    return found[-1 if last else 0]
