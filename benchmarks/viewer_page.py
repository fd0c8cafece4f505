"""Times of the viewer's page in Chromium, as lines of JSON; `benchmarks.viewer` runs it in ``.venv-viewer``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any

from playwright.sync_api import Page, sync_playwright

TRIALS = 5
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 120_000
OPEN = """(address) => new Promise((done) => {
    delete document.body.dataset.opened;
    const before = performance.now();
    new MutationObserver((_, observer) => {
        if (document.body.dataset.opened === undefined) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - before)));
    }).observe(document.body, { attributes: true });
    location.hash = address;
})"""
FILTER = """(value) => new Promise((done) => {
    const select = document.getElementById("filter-solved");
    const before = performance.now();
    select.value = value;
    select.dispatchEvent(new Event("change"));
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - before)));
})"""
SCROLL = """() => new Promise((done) => {
    const frames = [];
    let last = performance.now();
    let left = 240;
    const step = () => {
        const now = performance.now();
        frames.push(now - last);
        last = now;
        scrollBy({ top: 120, behavior: "instant" });
        if (left-- > 0) requestAnimationFrame(step);
        else done(frames.slice(1));
    };
    requestAnimationFrame(step);
})"""


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def measure(page: Page, address: str) -> None:
    devtools = page.context.new_cdp_session(page)
    # In CPU time of the page's own thread, which other programs on the machine do not change.
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_ms() -> float:
        found = devtools.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in found if one["name"] == "TaskDuration") * 1e3

    before = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(".rows .row")
    say("first_rows", seconds=time.perf_counter() - before)
    rows = []
    for _ in range(WAIT_MS // 1000):
        answer = page.evaluate("async () => (await fetch('/api/run/0/groups?epoch=0&since=0')).json()")
        rows = answer["rows"]
        if answer["read"] == answer["size"]:
            break
        page.wait_for_timeout(1000)
    page.goto("about:blank")
    page.goto(f"{address}#/run/0?by=rollouts&solved=yes")
    page.wait_for_selector(".rows .row")
    page.wait_for_timeout(1000)
    for value in ("no", "yes") * TRIALS:
        say("filter", ms=page.evaluate(FILTER, value))
    for trial in range(TRIALS):
        row = rows[len(rows) // 3 + trial]["id"]
        say("group", ms=page.evaluate(OPEN, f"#/run/0/group/{row}"))
        row = rows[len(rows) // 2 + trial]["id"]
        say("episode", ms=page.evaluate(OPEN, f"#/run/0/group/{row}/rollout/1"))
        say("short_tokens", ms=page.evaluate(OPEN, f"#/run/0/group/{row}/rollout/1/tokens"))
    last = rows[-1]["id"]
    for _ in range(TRIALS):
        page.goto("about:blank")
        page.goto(f"{address}#/run/0")
        page.wait_for_selector("body[data-opened]")
        page.wait_for_timeout(500)
        spent = cpu_ms()
        shown = page.evaluate(OPEN, f"#/run/0/group/{last}/rollout/0/tokens")
        say("tokens", ms=shown, cpu_ms=cpu_ms() - spent)
        spent = cpu_ms()
        frames = sorted(page.evaluate(SCROLL))
        say(
            "frames",
            worst_ms=frames[-1],
            p95_ms=frames[int(len(frames) * 0.95)],
            over_50=sum(f > 50 for f in frames),
            cpu_ms=(cpu_ms() - spent) / len(frames),
        )


def main() -> None:
    names = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(WAIT_MS)
        measure(page, sys.argv[1])
        browser.close()


if __name__ == "__main__":
    main()
