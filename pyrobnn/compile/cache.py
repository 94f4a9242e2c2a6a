"""The folder for compiled code: one where torch's own cannot be made, and no torn files in it."""

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

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
#: seconds after which nobody writes a library any more
_WRITTEN = 60.0


def provide_folder() -> None:
    """Set ``TORCHINDUCTOR_CACHE_DIR`` to a folder of this process where torch's is read-only, or its user has no name.

    ``torch._dynamo``, which ``torch.func.grad`` imports, makes the folder at its import; where that fails once, what is
    said the second time is of another matter.

    Warns:
        UserWarning: that compiled code is not kept for the next process.
    """
    try:
        # a user without a name, as in another's container: KeyError, since Python 3.13 OSError, on Windows ImportError
        path = Path(os.environ.get(VARIABLE) or _default())
        path.mkdir(parents=True, exist_ok=True)
        wrong = None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to"
    except (OSError, KeyError, ImportError) as error:
        wrong = f"it cannot be made: {error}"
    if wrong is None:
        return
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="torchinductor_")
    warnings.warn(
        f"torch's folder for compiled code is of no use ({wrong}): what is compiled is lost when this process ends; "
        f"set {VARIABLE} to a folder that can be written to",
        UserWarning,
        stacklevel=2,
    )


def _default() -> str:
    """Where torch keeps it."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


@functools.cache
def remove_torn() -> None:
    """Remove libraries that a killed compile has left half written: torch would load them for ever and fail."""
    for path in Path(os.environ.get(VARIABLE) or _default()).rglob("*.so"):
        with contextlib.suppress(OSError):  # of another process, which may remove it as well
            status = path.stat()
            if time.time() - status.st_mtime > _WRITTEN and status.st_size < _elf_size(path):
                path.unlink()


def _elf_size(path: Path) -> int:
    """Least size of the whole of an ELF file of 64 bits, by the table at its end; 64 without a header, 0 of others."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64:
        return 64
    if head[:6] != b"\x7fELF\x02\x01":
        return 0
    table, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return table + size * count
