"""Speed against the peers, all sections: NUTS, SVI, Laplace. `make benchmark` runs this.

    python scripts/benchmark_speed.py                          # every section
    python scripts/benchmark_speed.py --sections nuts svi       # some
    python scripts/benchmark_speed.py --peers-python PATH       # NumPyro and laplace-torch from another environment

Each section is a script of its own with more options: benchmark_nuts, benchmark_svi, benchmark_laplace.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: section -> script, the option that names the Python of the peers
SECTIONS = {
    "nuts": ("benchmark_nuts.py", "--numpyro-python"),
    "svi": ("benchmark_svi.py", "--numpyro-python"),
    "laplace": ("benchmark_laplace.py", "--reference-python"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--peers-python", default=sys.executable)
    args = parser.parse_args()
    failed = 0
    for section in args.sections:
        script, option = SECTIONS[section]
        print(f"== {section}", flush=True)
        command = [sys.executable, str(Path(__file__).with_name(script)), option, args.peers_python]
        failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
