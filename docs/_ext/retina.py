"""Pictures of twice the resolution are stored in few colours and shown at half of their pixels, as notebooks show them.

As a program it puts the pictures that it is given into a palette, where they are not in one yet.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image

#: dots per inch from which a picture has twice the resolution; those for one pixel a dot have 100 to 160
RETINA = 190
#: pixels on the page from which a phone cannot show a picture whole with letters that can be read
WIDE = 640


def in_palette(png: bytes) -> bytes:
    """The PNG in the 256 colours that come closest, a third of the size; its dots per inch are kept."""
    image = Image.open(io.BytesIO(png))
    stored = io.BytesIO()
    if image.mode == "P":
        return png
    fewer = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    fewer.save(stored, "png", optimize=True, dpi=image.info["dpi"])
    return stored.getvalue()


def width(path: Path) -> int | None:
    """The width on the page in pixels, None for the picture's own."""
    if path.suffix != ".png" or not path.is_file():
        return None
    with Image.open(path) as picture:
        return picture.width // 2 if picture.info.get("dpi", (0,))[0] >= RETINA else None


def halve(app: Any, doctree: Any, page: str) -> None:
    """Give the pictures of a page that have no width of their own the one of :func:`width`; style wide ones as such."""
    from docutils import nodes  # of the docs extra

    for image in doctree.findall(nodes.image):
        found = width(Path(app.srcdir) / image["uri"])
        if found is not None and "width" not in image:
            image["width"] = f"{found}px"
            image["classes"] += ["wide"] if found >= WIDE else []


if __name__ == "__main__":
    for name in map(Path, sys.argv[1:]):
        name.write_bytes(in_palette(name.read_bytes()))
