"""The folder in which torch keeps compiled code."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def provide_folder() -> None:
    """Set ``TORCHINDUCTOR_CACHE_DIR`` to a folder of this process where torch's is read-only, or its user has no name.

    ``torch._dynamo``, which ``torch.func.grad`` imports, makes the folder at its import.

    Warns:
        UserWarning: that compiled code is not kept for the next process.
    """
    try:
        # WORKAROUND(python<3.13): a user without a name, as in another's container, is a KeyError there; since then
        # it is an OSError, and on Windows an ImportError
        path = code_folder()
        path.mkdir(parents=True, exist_ok=True)
        wrong = None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to"
    except (OSError, KeyError, ImportError) as error:
        wrong = f"it cannot be made: {error}"
    if wrong is not None:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="torchinductor_")
        warnings.warn(
            f"torch's folder for compiled code is of no use ({wrong}): what is compiled is lost when this process "
            f"ends; set {FOLDER} to a folder that can be written to",
            UserWarning,
            stacklevel=2,
        )


def code_folder() -> Path:
    """Where torch keeps compiled code."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir(), f"torchinductor_{user}")


@functools.cache
def remove_torn() -> None:
    """Remove libraries that a killed compile has left half written a minute ago or more: torch would load them."""
    for path in code_folder().rglob("*.so"):
        with contextlib.suppress(OSError):  # of another process, which may remove it as well
            status = path.stat()
            if time.time() - status.st_mtime > 60 and status.st_size < _elf_size(path):
                path.unlink()


def _elf_size(path: Path) -> int:
    """Least size of a whole ELF file of 64 bits, by the table at its end; 64 without a header, 0 of others."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return 0 if len(head) == 64 else 64
    # e_shoff, e_shentsize, e_shnum
    table_offset = int.from_bytes(head[40:48], "little")
    entry_size = int.from_bytes(head[58:60], "little")
    num_entries = int.from_bytes(head[60:62], "little")
    return table_offset + entry_size * num_entries
