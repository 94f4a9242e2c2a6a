"""The command line as ``python -m pyrobnn.cli``."""

import sys

from pyrobnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
