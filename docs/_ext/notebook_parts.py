"""Code and outputs of single cells of a notebook, for pages that show them: nothing is computed twice or typed."""

from __future__ import annotations

import base64
import json
from pathlib import Path


def write(notebook: Path, folder: Path) -> list[str]:
    """Writes ``<notebook>.<cell id>.code``, ``.txt`` (its outputs, in Markdown) and ``.png`` of every code cell.

    Raises:
        ValueError: a cell without an output, that is a notebook that was not executed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        if cell["execution_count"] is None:
            raise ValueError(f"{notebook.name} was not executed: cell {cell['id']}")
        name = f"{notebook.stem}.{cell['id']}"
        (folder / f"{name}.code").write_text("".join(cell["source"]) + "\n", encoding="utf-8")
        text = ""
        tables = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                (folder / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
            elif "text/html" in data:
                table = "".join(data["text/html"]).replace(
                    'border="1" class="dataframe"', 'class="docutils"'
                )
                tables.append("```{raw} html\n" + table + "\n```")
            else:
                text += "".join(output.get("text", data.get("text/plain", ""))).rstrip() + "\n"
        parts = ["```text\n" + text + "```"] * bool(text) + tables
        (folder / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        names.append(name)
    return names
