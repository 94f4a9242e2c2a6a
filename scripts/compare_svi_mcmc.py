"""The study this project grew from: SVI against MCMC on the four clusters of noisy cos data.

    python scripts/compare_svi_mcmc.py --quick

Any option of ``pyrobnn compare`` may be given; the data are the clusters unless told otherwise. At the end it prints
how much wider each method is in the widest gap than inside the clusters, which is the question of the study.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pyrobnn import cli
from pyrobnn.diagnostics.points import widest_gap
from pyrobnn.posterior.storage import read

DEFAULTS = ["--data", "clusters", "--methods", "svi", "nuts", "map", "mle", "--out", "results/clusters"]


def main(argv: Sequence[str]) -> int:
    """Run the comparison with the study's defaults; options in ``argv`` win."""
    arguments = ["compare", *DEFAULTS, *argv]
    status = cli.main(arguments)
    out = Path(arguments[len(arguments) - 1 - arguments[::-1].index("--out") + 1])
    for path in sorted(out.glob("*.nc")):
        gap = widest_gap(read(path))
        if gap is not None and gap.ratio is not None:
            print(
                f"{path.stem}: epistemic sd in the widest gap is {gap.ratio:.1f} × its median inside the clusters"
            )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
