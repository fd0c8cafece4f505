"""Runs the notebooks, and converts them to pages.

``python docs/notebooks.py`` runs them again and saves their outputs; the environment needs the extra ``[dev]``. The
site's pages are made from the saved outputs (``docs/site.py``), as GitHub shows them.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "notebooks"
CELL_TIMEOUT_SECONDS = 600


class Rendered(NamedTuple):
    """A notebook as a page, and its pictures by their file names."""

    markdown: str
    pictures: dict[str, bytes]


def notebooks() -> list[Path]:
    """Returns all notebooks of the documentation."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> dict[str, Any]:
    """Runs a notebook in a new folder, and returns it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=CELL_TIMEOUT_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    result: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return result


def _is_progress(output: dict[str, Any]) -> bool:
    """Whether an output is the progress of a run, whose speed is another one each time."""
    return bool(output["output_type"] == "stream" and output["name"] == "stderr")


def rendered(path: Path) -> Rendered:
    """Converts a notebook to Markdown, with its saved outputs."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            for mime, content in _contents(output):
                if mime == "image/png":
                    name = f"{path.stem}-{len(pictures) + 1}.png"
                    pictures[name] = base64.b64decode(content)
                    parts.append(f"![Output of the cell above]({name})")
                else:
                    parts.append(f"```text\n{content.rstrip()}\n```")
    return Rendered("\n\n".join(parts) + "\n", pictures)


def _contents(output: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields type and content of what a page shows of an output: a picture, or text."""
    if output["output_type"] == "stream":
        yield "text/plain", "".join(output["text"])
    else:
        data = output["data"]
        mime = "image/png" if "image/png" in data else "text/plain"
        yield mime, "".join(data[mime])


if __name__ == "__main__":
    for notebook_path in notebooks():
        text = json.dumps(executed(notebook_path), indent=1, ensure_ascii=False)
        notebook_path.write_text(text + "\n", encoding="utf-8")
        print(notebook_path)
