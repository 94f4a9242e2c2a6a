"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: str | Path, *, folder: bool = False) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its name when the block ends without an error.

    Posteriors are written by ``write_atomically`` of ``pyrobnn.posterior.storage``, which HDF5 asks more of.

    Args:
        path: what stands there is replaced then, and not before.
        folder: the path is that of a new folder, not of an empty file.

    Raises:
        ValueError: before the block: a folder stands at ``path``, or nothing can be written beside it.
    """
    path = Path(path)
    if path.is_dir() and not folder:
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    if folder and path.exists():
        raise ValueError(f"{str(path)!r} exists already: remove it or name another")
    # the ending stays: libraries choose a format by it
    beside = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            beside.mkdir()
        else:
            beside.write_bytes(b"")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"cannot write to the folder {str(path.parent)!r} ({reason}): choose another"
        ) from error
    try:
        yield beside
        os.replace(beside, path)
    finally:
        if beside.is_dir():
            shutil.rmtree(beside)
        else:
            beside.unlink(missing_ok=True)
