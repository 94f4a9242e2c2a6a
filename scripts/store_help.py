"""Write what ``pyrobnn compare --help`` and ``pyrobnn fit --help`` show, which is stored with the package.

    python scripts/store_help.py

Their options are read from every method, for which torch and Pyro have to be imported; the stored text is shown at
once. A test fails where it is no longer the parser's.
"""

from __future__ import annotations

import os

from pyrobnn.cli import STORED_HELP
from pyrobnn.cli.config import help_of


def main() -> None:
    """Write both."""
    os.environ["COLUMNS"] = "80"
    for command, path in STORED_HELP.items():
        path.write_text(help_of(command), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
