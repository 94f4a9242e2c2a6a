"""Pictures that are stored at twice the resolution are shown at half of their pixels, as notebooks show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

#: dots per inch from which a picture has twice the resolution; those for one pixel a dot have 100 to 160
RETINA = 190


def width(path: Path) -> int | None:
    """The width on the page in pixels, None for the picture's own."""
    if path.suffix != ".png" or not path.is_file():
        return None
    with Image.open(path) as picture:
        return picture.width // 2 if picture.info.get("dpi", (0,))[0] >= RETINA else None


def halve(app: Any, doctree: Any, page: str) -> None:
    """Give the pictures of a page that have no width of their own the one of :func:`width`."""
    from docutils import nodes  # of the docs extra

    for image in doctree.findall(nodes.image):
        found = width(Path(app.srcdir) / image["uri"])
        if found is not None and "width" not in image:
            image["width"] = f"{found}px"
