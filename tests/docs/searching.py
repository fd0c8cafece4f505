"""Ranks the pages of the built site as its search box does, which runs lunr and the theme's own weights in the browser.

``docs/browser.py`` compares the two.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from functools import cache
from math import log, sqrt
from pathlib import Path
from typing import Any

_SATURATION = 1.2  # lunr's default; the theme sets its other one, for the length of the text, to 0
_FIELDS = ("title", "text")


class Index:
    """Terms of every section of the site.

    Args:
        site: Folder of the built site.
    """

    def __init__(self, site: Path) -> None:
        text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
        index: dict[str, Any] = json.loads(text.partition(" = ")[2])
        [worker] = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
        [stop] = re.findall(r"generateStopWordFilter\(\[(.*?)\]", worker.read_text(encoding="utf-8"))
        self._separator = re.compile(index["config"]["separator"])
        self._stop = set(json.loads(f"[{stop}]"))
        self._weights = {field: index["config"]["fields"][field]["boost"] for field in _FIELDS}
        self.sections: list[dict[str, Any]] = index["docs"]
        self._counts = [{field: Counter(self._words(entry[field])) for field in _FIELDS} for entry in self.sections]
        self._spread: dict[str, int] = defaultdict(int)
        for counts in self._counts:
            for field in _FIELDS:
                for word in counts[field]:
                    self._spread[word] += 1

    def search(self, query: str) -> list[str]:
        """Returns the pages with a match, best first."""
        starts = query.lower().split()
        wanted = Counter(word for start in starts for word in self._spread if word.startswith(start))
        magnitude = sqrt(sum(count**2 for count in wanted.values()))
        best: dict[str, float] = {}
        for entry, counts in zip(self.sections, self._counts, strict=True):
            there = {word for field in _FIELDS for word in counts[field] if word in wanted}
            if not there:
                continue
            score = 0.0
            for field in _FIELDS:
                for word in there & counts[field].keys():
                    count = counts[field][word]
                    often = (_SATURATION + 1) * count / (_SATURATION + count)
                    score += wanted[word] * self._rarity(word) * often * self._weights[field] * entry.get("boost", 1)
            page, _, section = entry["location"].partition("#")
            found = {start for start in starts if any(word.startswith(start) for word in there)}
            share = len(found) / len(found | set(starts) - self._stop)
            score *= (1 + ((not section) + share) ** 2) / magnitude
            best[page] = max(best.get(page, 0.0), score)
        return sorted(best, key=lambda page: -best[page])

    def _words(self, html: str) -> list[str]:
        found = (word for text in re.split(r"<[^>]+>", html.lower()) for word in self._separator.split(text))
        return [word for word in found if word and word not in self._stop]

    def _rarity(self, word: str) -> float:
        return log(1 + abs((len(self.sections) - self._spread[word] + 0.5) / (self._spread[word] + 0.5)))


@cache
def index(site: Path) -> Index:
    """Returns the index of a site, which is read once."""
    return Index(site)
