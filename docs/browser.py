"""Looks at every page of the built site in Chromium: ``make docs-browser``. Run by hand.

Needs playwright in the running Python, which no test environment has, and a Chromium:

    python -m venv /tmp/browser && /tmp/browser/bin/pip install playwright
    make docs-browser BROWSER_PYTHON=/tmp/browser/bin/python CHROMIUM=/usr/bin/chromium

Exits with 1 if a page scrolls sideways, contacts another machine, misses a file or an image, or prints an error, or if
the search box ranks pages differently from ``tests/docs/searching.py``. ``--shots`` also writes screenshots.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page, Response, sync_playwright

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
SIZES = {"desktop": (1280, 900), "phone": (400, 800)}
SCHEMES = {"light": "default", "dark": "slate"}
QUERIES = ("install", "LoRA", "KL", "out of memory", "Python", "own reward", "staleness", "checkpoint", "multi turn")
_FAULTS = """() => {
    const root = document.documentElement, faults = [];
    window.scrollTo(10000, 0);
    if (root.scrollWidth > root.clientWidth || window.scrollX > 0)
        faults.push(`scrolls sideways: ${root.scrollWidth} pixels in ${root.clientWidth}`);
    for (const image of document.images)
        if (!image.complete || !image.naturalWidth) faults.push(`shows no image ${image.src}`);
    const open = [...document.querySelectorAll(".md-nav--primary .md-nav__item--nested")].filter(
        (item) => item.querySelector(":scope > input:checked") && !item.classList.contains("md-nav__item--active"));
    for (const item of open) faults.push(`opens the navigation at ${item.innerText.split("\\n")[0]}`);
    return faults;
}"""


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def look(browser: Browser, address: str, shots: Path | None) -> Iterator[str]:
    """Yields the faults of every page, in every size and color scheme."""
    names = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    for size, (width, height) in SIZES.items():
        for scheme, shown in SCHEMES.items():
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page, faults = context.new_page(), []
            listen(page, address, faults)
            for name in names:
                if name == "404.html":
                    continue
                page.goto(address + name, wait_until="load")
                faults += page.evaluate(_FAULTS)
                if page.evaluate("document.body.dataset.mdColorScheme") != shown:
                    faults.append("has the wrong colors")
                if shots:
                    file = f"{name.removesuffix('.html').replace('/', '_')}-{size}-{scheme}.png"
                    page.screenshot(path=shots / file, full_page=True)
                yield from (f"{name} ({size}, {scheme}): {fault}" for fault in faults)
                faults.clear()
            context.close()


def listen(page: Page, address: str, faults: list[str]) -> None:
    """Adds errors of a page, and requests to elsewhere, to ``faults``."""

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            faults.append(f"prints {message.text}")

    def response(answer: Response) -> None:
        if answer.status >= 400:
            faults.append(f"gets {answer.status} for {answer.url}")

    page.on("console", console)
    page.on("response", response)
    page.on("pageerror", lambda error: faults.append(f"raises {error}"))
    local = (address, "data:", "blob:")
    page.on("request", lambda request: request.url.startswith(local) or faults.append(f"asks for {request.url}"))


def search(browser: Browser, address: str) -> Iterator[str]:
    """Yields a fault for each query whose first three results differ from the tested ranking."""
    sys.path.append(str(ROOT / "tests" / "docs"))
    from searching import index

    page = browser.new_page()
    for query in QUERIES:
        page.goto(address + "index.html", wait_until="networkidle")
        page.click("input.md-search__input")
        page.keyboard.type(query, delay=20)
        page.wait_for_timeout(1000)  # the box waits for the end of typing
        links = "items => items.slice(0, 3).map(item => new URL(item.querySelector('a').href).pathname.slice(1))"
        found = page.eval_on_selector_all(".md-search-result__item", links)
        if found != index(SITE).search(query)[:3]:
            yield f"search for {query!r}: {found}, and the tests expect {index(SITE).search(query)[:3]}"


def main() -> None:
    """Prints the faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", type=Path, help="program; defaults to playwright's own")
    parser.add_argument("--shots", type=Path, help="folder for screenshots")
    chosen = parser.parse_args()
    if chosen.shots:
        chosen.shots.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    count = 0
    with sync_playwright() as playwright:
        # A sandbox of Chromium does not work for root, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=chosen.chromium, args=["--no-sandbox"])
        for find in (look(browser, address, chosen.shots), search(browser, address)):
            for fault in find:
                print(fault, flush=True)
                count += 1
        browser.close()
    print(f"{count} faults")
    raise SystemExit(count > 0)


if __name__ == "__main__":
    main()
