r"""What `rllm_workflows.math_answers` cannot tell, asked of math-verify: matrices, trigonometry, inequalities, ...

It imports sympy, which can take any time and memory, so this is only ever called in a child process that is killed.
Only its LaTeX grammar reads the answer: its reader of plain expressions would execute them.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

from rllm_workflows.math_answers import compare

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit: the process has one
_LATEX = [LatexExtractionConfig()]


def same(given: str, wanted: str) -> bool:
    """Whether two answers are the same."""
    verdict = compare(given, wanted)
    if verdict is not None:
        return verdict
    read = [
        parse(f"${answer}$", extraction_config=_LATEX, fallback_mode="no_fallback", parsing_timeout=None)
        for answer in (wanted, given)
    ]
    return all(read) and verify(read[0], read[1], timeout_seconds=None)
