"""Speed against the peers, all sections: NUTS, its growth, SVI, Laplace. `make benchmark` runs this.

    python scripts/benchmark_speed.py                          # every section
    python scripts/benchmark_speed.py --sections nuts svi       # some
    python scripts/benchmark_speed.py --peers-python PATH       # NumPyro and laplace-torch from another environment

Each section is a script of its own with more options: benchmark_nuts, _growth, _svi, _laplace.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: section -> script, the options that name the Python of the peers and the file of the results, and that file
SECTIONS = {
    "nuts": ("benchmark_nuts.py", "--numpyro-python", "--results", "nuts.jsonl"),
    "growth": ("benchmark_growth.py", "--numpyro-python", "--results", "growth.jsonl"),
    "svi": ("benchmark_svi.py", "--numpyro-python", "--results", "svi.jsonl"),
    "laplace": ("benchmark_laplace.py", "--reference-python", "--out", "laplace.json"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--results", help="folder for the rows of each section, as JSON: the README's tables")
    args = parser.parse_args()
    failed = 0
    for section in args.sections:
        script, peers, results, file = SECTIONS[section]
        print(f"== {section}", flush=True)
        command = [sys.executable, str(Path(__file__).with_name(script)), peers, args.peers_python]
        if args.results:
            command += [results, str(Path(args.results) / file)]
        failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
