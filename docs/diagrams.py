"""Draws the diagrams of the pages into ``images/``: ``make docs-reference``.

Boxes and arrows are placed on a square grid, so no drawing program is needed. The files use no external font, script or
image, and follow the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "images"
UNIT = 12  # pixels per grid step
STYLE = """
    svg { --paper: #ffffff; --ink: #1f2328; --faint: #6e7781; --box: #eef2f7; --strong: #d7e3fb; --edge: #57606a }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #1e2129; --ink: #e6e9f0; --faint: #9aa4b2; --box: #2b303c; --strong: #2c4270; --edge: #9aa4b2 }
    }
    text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: var(--ink) }
    .faint { fill: var(--faint); font-size: 12px }
    .mono { font-family: ui-monospace, monospace; font-size: 12px }
    rect { fill: var(--box); stroke: var(--edge) }
    .paper { fill: var(--paper); stroke: none }
    .strong { fill: var(--strong) }
    .empty { fill: none; stroke-dasharray: 4 3 }
    path { fill: none; stroke: var(--edge); stroke-width: 1.4 }
    .tip { fill: var(--edge); stroke: none }
"""


class Drawing:
    """A diagram, built from boxes, words and arrows.

    Args:
        title: Text for screen readers.
        width: Width, in grid steps.
        height: Height, in grid steps.
    """

    def __init__(self, title: str, width: float, height: float) -> None:
        self._title = title
        self._size = (width * UNIT, height * UNIT)
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *lines: str, style: str = "") -> None:
        """Adds a rectangle with a title line; further lines are faint."""
        place = f'x="{x * UNIT:g}" y="{y * UNIT:g}" width="{width * UNIT:g}" height="{height * UNIT:g}"'
        self._parts.append(f'<rect class="{style}" {place} rx="5"/>')
        top = y + height / 2 - (len(lines) - 1) * 0.65
        for number, line in enumerate(lines):
            self.words(x + width / 2, top + 1.3 * number, line, style="faint" if number else "", anchor="middle")

    def words(self, x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> None:
        """Adds a line of text, centered on ``y``."""
        place = f'x="{x * UNIT:g}" y="{y * UNIT + 4:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{style}" {place}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Adds a line through the points, with a tip at the last."""
        path = " L ".join(f"{x * UNIT:g} {y * UNIT:g}" for x, y in points)
        self._parts.append(f'<path d="M {path}"/>')
        (x0, y0), (x1, y1) = points[-2:]
        length = max(abs(x1 - x0), abs(y1 - y0))
        dx, dy = (x1 - x0) / length * 0.6, (y1 - y0) / length * 0.6
        corners = [(x1, y1), (x1 - dx - dy / 2, y1 - dy - dx / 2), (x1 - dx + dy / 2, y1 - dy + dx / 2)]
        tip = " ".join(f"{x * UNIT:g},{y * UNIT:g}" for x, y in corners)
        self._parts.append(f'<polygon class="tip" points="{tip}"/>')

    def arc(self, begin: tuple[float, float], end: tuple[float, float], *, bend: float, weight: float) -> None:
        """Adds a curve that leaves and arrives horizontally, with a tip at the end. A negative bend is to the left."""
        x0, y0, x1, y1 = (value * UNIT for value in (*begin, *end))
        far, size = x0 + bend * UNIT, 2.5 + weight
        base = x1 + math.copysign(1.8 * size, bend)
        curve = f"M {x0:g} {y0:g} C {far:g} {y0:g} {far:g} {y1:g} {base:g} {y1:g}"
        self._parts.append(f'<path d="{curve}" style="stroke-width: {weight:g}; opacity: 0.7"/>')
        corners = f"{x1:g},{y1:g} {base:g},{y1 - size:g} {base:g},{y1 + size:g}"
        self._parts.append(f'<polygon class="tip" points="{corners}"/>')

    def row(self, x: float, y: float, cells: Sequence[tuple[str, str]], *, width: float) -> None:
        """Adds boxes side by side, each with its style."""
        for number, (text, style) in enumerate(cells):
            self.box(x + number * width, y, width, 2, text, style=style)

    def svg(self) -> str:
        """The diagram as an SVG document."""
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        paper = '<rect class="paper" width="100%" height="100%" rx="8"/>'
        body = "\n".join(f"  {part}" for part in (paper, *self._parts))
        return f"{head}\n  <title>{escape(self._title)}</title>\n  <style>{STYLE}  </style>\n{body}\n</svg>\n"


def loop() -> Drawing:
    """The loop from a task to new weights."""
    it = Drawing("The loop: a task becomes an episode, groups, advantages, samples, and new weights", 70, 25)
    steps = [
        ("task", "id, JSON data"),
        ("workflow", "runs the task"),
        ("episode", "trajectories, reward"),
        ("group", "rollouts of one task"),
    ]
    for number, lines in enumerate(steps):
        it.box(1 + 17.5 * number, 2, 14, 4, *lines, style="strong" if number == 1 else "")
        if number:
            it.arrow((17.5 * number - 2.5, 4), (17.5 * number + 1, 4))
    it.box(18.5, 11, 14, 4, "rollout engine", "tokens in, tokens out", style="strong")
    it.arrow((23, 6), (23, 11))
    it.arrow((28, 11), (28, 6))
    it.words(22.4, 8.5, "prompt", style="faint", anchor="end")
    it.words(28.6, 8, "completion, log-probabilities,", style="faint")
    it.words(28.6, 9.3, "weight version", style="faint")
    it.box(53.5, 11, 14, 4, "advantages", "within the group")
    it.arrow((60.5, 6), (60.5, 11))
    it.box(53.5, 19, 14, 4, "training samples", "tokens, mask, advantages")
    it.arrow((60.5, 15), (60.5, 19))
    it.box(18.5, 19, 14, 4, "backend", "gradients, optimizer", style="strong")
    it.arrow((53.5, 21), (32.5, 21))
    it.arrow((25.5, 19), (25.5, 15))
    it.words(26.2, 17, "on_policy_updated(version): new weights", style="faint")
    return it


def segments() -> Drawing:
    """The trained tokens of a conversation, and its segment breaks."""
    it = Drawing("Tokens and segments: sampled tokens are trained, and an edited history starts a new segment", 70, 22)
    it.words(1, 1.6, "Two turns in one token sequence: one segment, one training sample", style="")
    first = [("prompt", ""), ("completion", "strong"), ("tool result", ""), ("completion", "strong")]
    it.row(1, 3, first, width=13)
    it.words(1, 6.2, "turn 1: prompt + completion", style="faint")
    it.words(27, 6.2, "turn 2: its prompt starts with all of turn 1, token for token", style="faint")
    it.words(1, 9.6, "An edited history: a segment break, with its reason, and two samples", style="")
    it.row(1, 11, [("prompt", ""), ("completion", "strong")], width=13)
    it.words(28, 12, "segment 0", style="faint")
    it.row(1, 14, [("another prompt", ""), ("completion", "strong")], width=13)
    it.words(28, 15, "segment 1, break_reason = history_edited", style="faint")
    it.box(1, 18.6, 3, 2, style="strong")
    it.words(5, 19.6, "sampled: trained, with the engine's log-probabilities", style="faint")
    it.box(40, 18.6, 3, 2)
    it.words(44, 19.6, "not sampled: masked in the loss", style="faint")
    return it


def staleness() -> Drawing:
    """Synchronous and asynchronous training side by side."""
    it = Drawing("Synchronous and asynchronous training: taking turns, or generating ahead", 70, 23)
    it.words(1, 1.6, "staleness_threshold = 0: a window's groups are sampled by the weights they train")
    for number in range(3):
        x = 10 + 20 * number
        it.box(x, 3, 11, 2, f"generate {number + 1}", style="strong")
        it.box(x + 11, 5.5, 8, 2, f"train {number + 1}")
        it.arrow((x + 19, 6.5), (x + 19.6, 6.5), (x + 19.6, 5.2))
    it.words(1, 4, "engine", style="faint")
    it.words(1, 6.5, "trainer", style="faint")
    it.words(1, 11.6, "staleness_threshold = 1, partial_rollout = true: generation is up to one window ahead")
    for number in range(5):
        it.box(10 + 11 * number, 13, 11, 2, f"generate {number + 1}", style="strong")
        if number < 4:
            it.box(21 + 11 * number, 15.5, 8, 2, f"train {number + 1}")
            it.arrow((29 + 11 * number, 16.5), (30 + 11 * number, 16.5), (30 + 11 * number, 15.2))
    it.words(1, 14, "engine", style="faint")
    it.words(1, 16.5, "trainer", style="faint")
    it.words(
        10,
        19.6,
        "An arrow is a weight sync. Rollouts running at that moment take their next tokens from the new weights.",
        style="faint",
    )
    it.words(
        10,
        21,
        "Every step records its weight version; a group's version is the oldest among its steps.",
        style="faint",
    )
    return it


def placement() -> Drawing:
    """What eight devices do over time when they are shared, and when they are divided."""
    it = Drawing("Colocated and separated placement: eight GPUs that take turns, and four that generate ahead", 70, 28)
    it.words(1, 1.6, "colocated: trainers and servers share every device and take turns")
    for number in range(4):
        x = 13 + 14 * number
        it.box(x, 3, 8, 7, f"generate {number + 1}", style="strong")
        it.box(x + 8, 3, 6, 7, f"train {number + 1}")
    it.words(1, 6.5, "GPUs 0 to 7", style="faint")
    it.words(1, 13.6, "separated: each device has one job; generation runs ahead of training")
    for number in range(5):
        x = 13 + 11 * number
        it.box(x, 15, 11, 3.5, f"generate {number + 1}", style="strong")
        if number < 4:
            it.box(x + 11, 20, 9, 3.5, f"train {number + 1}")
            it.arrow((x + 20, 21.75), (x + 21, 21.75), (x + 21, 18.7))
    it.box(13, 20, 11, 3.5, "idle", style="empty")
    it.words(1, 16.1, "GPUs 0 to 3", style="faint")
    it.words(1, 17.5, "(servers)", style="faint")
    it.words(1, 21.1, "GPUs 4 to 7", style="faint")
    it.words(1, 22.5, "(trainers)", style="faint")
    words = "Time runs to the right. An arrow is a weight sync to the servers; colocated devices sync in place."
    it.words(13, 26, words, style="faint")
    return it


def age() -> Drawing:
    """The staleness of three groups: when they were sampled, and when they were trained."""
    it = Drawing("The staleness of a group: the weight version it trains, minus the oldest that sampled it", 70, 23)
    it.words(1, 3, "weights", style="faint")
    it.row(13, 2, [(f"version {3 + number}", "") for number in range(4)], width=14)
    groups = [
        ("group A", [(28, 8, "sampled")], 38, "staleness 4 - 4 = 0"),
        ("group B", [(15, 8, "sampled")], 46, "staleness 5 - 3 = 2"),
        ("group C", [(34, 7, "turn 1"), (41, 7, "turn 2")], 57, "staleness 6 - 4 = 2"),
    ]
    for number, (name, sampled, trained, result) in enumerate(groups):
        y = 6.5 + 4.5 * number
        it.words(1, y + 1, name, style="faint")
        for x, width, text in sampled:
            it.box(x, y, width, 2, text, style="strong")
        it.arrow((x + width, y + 1), (trained, y + 1))
        it.box(trained, y, 6, 2, "trained")
        it.words(trained + 3, y + 3, result, style="faint", anchor="middle")
    it.words(1, 20.6, "Group B waited in the buffer. Group C continued over a weight sync", style="faint")
    it.words(1, 22, "(partial_rollout), and its oldest step counts.", style="faint")
    return it


def books() -> Drawing:
    """Rollout accounting: the four outcomes."""
    it = Drawing("Rollout accounting: every dispatched rollout has exactly one of four outcomes", 70, 21)
    it.box(1, 8, 13, 4, "dispatched", "every rollout, once", style="strong")
    it.box(20, 8, 13, 4, "in flight", "or waiting in the buffer", style="empty")
    it.arrow((14, 10), (20, 10))
    outcomes = [
        ("trained", "part of an optimizer step that returned"),
        ("filtered", "uniform_reward, incomplete_group, ..."),
        ("failed", "timeout, engine_error, error"),
        ("cancelled", "interrupted, run_failed, restart"),
    ]
    for number, (name, why) in enumerate(outcomes):
        y = 1 + 4.8 * number
        it.box(40, y, 29, 3.6, name, why)
        it.arrow((33, 10), (36.5, 10), (36.5, y + 1.8), (40, y + 1.8))
    it.words(1, 19.6, "dispatched = trained + filtered + failed + cancelled", style="mono")
    return it


def loading() -> Drawing:
    """Loading a plugin, from package metadata to a class."""
    it = Drawing("Loading plugins: metadata, the entry module of enabled plugins, and the selected class", 70, 20)
    stages = [
        ("metadata", "entry points rllm_core", "rllm-core plugins", "nothing is imported"),
        ("entry module", "rllm_x: hooks, records", "rllm-core workflows", "only enabled plugins"),
        ("the class", "rllm_x.workflow:Mine", "rllm-core train mine", "only the selected class"),
    ]
    for number, (name, what, command, cost) in enumerate(stages):
        x = 1 + 24 * number
        it.box(x, 3, 20, 4, name, what, style="strong" if number == 2 else "")
        it.words(x + 10, 8.6, command, style="mono", anchor="middle")
        it.words(x + 10, 10, cost, style="faint", anchor="middle")
        if number:
            it.arrow((x - 4, 5), (x, 5))
    outcomes = [
        ("disabled", "RLLM_PLUGINS, plugins.toml"),
        ("broken, conflict", "one line; others still work"),
        ("selected and broken", "an error with cause and command"),
    ]
    for number, lines in enumerate(outcomes):
        x = 1 + 24 * number
        it.arrow((x + 10, 11), (x + 10, 14))
        it.box(x, 14, 20, 4, *lines, style="empty")
    return it


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "loop": loop,
    "segments": segments,
    "lead": staleness,
    "placement": placement,
    "age": age,
    "books": books,
    "loading": loading,
}
