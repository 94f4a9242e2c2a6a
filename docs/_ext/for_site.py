"""Pages that are read on a code host too: what such a reader finds by a link, the site has on the page itself.

    <!-- code host -->
    The list is in [CHANGELOG.md](../CHANGELOG.md).
    <!-- site: ../CHANGELOG.md -->

On the site the file takes the place of these lines; ``FILE | START | END`` is the part of it between two texts. Links
and pictures of the file keep their targets. Lines of the comment itself take their place where it has them:

    <!-- code host -->
    [The script](script.py)
    <!-- site:
    ```{literalinclude} script.py
    ```
    -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
#: what a reader of the code host sees, and the file that the site has in its place
MARKED = re.compile(
    r"<!-- code host -->\n.*?<!-- site:"
    r"(?: (?P<file>\S+)(?: \| (?P<start>.*?) \| (?P<end>.*?))? -->|\n(?P<lines>.*?)-->)\n",
    re.DOTALL,
)


def on_site(text: str, folder: Path) -> str:
    """The text of a page in a folder as the site has it."""
    return MARKED.sub(
        lambda marked: marked["lines"] if marked["file"] is None else _part(marked, folder), text
    )


def _part(marked: re.Match[str], folder: Path) -> str:
    """The file that a mark names, or the part of it."""
    path = (folder / marked["file"]).resolve()
    text = path.read_text(encoding="utf-8")
    if marked["start"] is not None:
        before, start, after = text.partition(marked["start"])
        part, end, _ = after.partition(marked["end"])
        if not start or not end:
            raise ValueError(
                f"{path.name} has no part from {marked['start']!r} to {marked['end']!r}"
            )
        text = part.strip("\n") + "\n"
    return _addresses_from_docs(text) if path.parent == ROOT else text


def _addresses_from_docs(text: str) -> str:
    """A text of the top folder with the addresses that its links and pictures have from a page in ``docs``."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\(scripts/(\w+)/claim\.md\)", r"](claims/\1.md)", text)


def replace(app: Any, name: str, source: list[str]) -> None:
    """Sphinx's event of a page that was read."""
    source[0] = on_site(source[0], (DOCS / name).parent)
