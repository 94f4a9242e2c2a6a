"""A folder for compiled code where torch's own cannot be made: without one torch cannot even differentiate."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import warnings
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


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
