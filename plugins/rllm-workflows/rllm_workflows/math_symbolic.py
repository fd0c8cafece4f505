r"""Compares answers with math-verify that `rllm_workflows.math_answers` cannot: matrices, trigonometry, inequalities.

math-verify uses sympy, whose time and memory are unbounded, so call this only in a child process with limits. Answers
go only through its LaTeX grammar, because its parser for plain expressions would execute them.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

from rllm_workflows.math_answers import compare

logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that it has no time limit, but the process has one.
_LATEX = [LatexExtractionConfig()]


def same(given: str, wanted: str) -> bool:
    """Returns whether two answers are equal."""
    verdict = compare(given, wanted)
    if verdict is not None:
        return verdict
    read = [
        parse(f"${answer}$", extraction_config=_LATEX, fallback_mode="no_fallback", parsing_timeout=None)
        for answer in (wanted, given)
    ]
    return all(read) and verify(read[0], read[1], timeout_seconds=None)
