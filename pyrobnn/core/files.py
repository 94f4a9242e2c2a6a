"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

#: what a seal begins with; eight hexadecimal digits of a CRC-32 follow
_SEAL = b"\npyrobnn crc32 "
_SEAL_SIZE = len(_SEAL) + 8
#: of a file that are read at once: few enough to stay in a cache
_BLOCK_BYTES = 2**20


def seal(path: Path) -> None:
    """Add a checksum of all of its bytes to the end of a file, which :func:`check_seal` compares.

    For formats whose readers pass over what stands behind their end, as HDF5's do.
    """
    checksum = _checksum(path, path.stat().st_size)
    with path.open("ab") as file:
        file.write(_SEAL + b"%08x" % checksum)


def check_seal(path: Path) -> None:
    """ValueError where a file that :func:`seal` has sealed has other bytes since; of a file without a seal nothing.

    Whoever adds to the file with HDF5 removes the seal.
    """
    size = path.stat().st_size - _SEAL_SIZE
    if size < 0:
        return
    with path.open("rb") as file:
        file.seek(size)
        found = file.read()
    if found.startswith(_SEAL) and found != _SEAL + b"%08x" % _checksum(path, size):
        raise ValueError(
            f"{str(path)!r} is damaged, its bytes are not those that were written: take another copy of the file, or "
            "fit and save again"
        )


def _checksum(path: Path, size: int) -> int:
    """The CRC-32 of the first bytes of a file."""
    checksum = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size > 0:
            count = file.readinto(block[:size])
            if not count:
                break
            checksum = zlib.crc32(block[:count], checksum)
            size -= count
    return checksum


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
