"""How the cost of one NUTS gradient grows with chains, hidden units and data: a table and a figure.

    python scripts/benchmark_growth.py --figure growth.png --numpyro-python PATH

One net (1-50-1, tanh, 400 points, 16 chains), one quantity varied at a time; the peers of benchmark_nuts.
"""

from __future__ import annotations

import argparse
import sys

from benchmark_nuts import CASES, Ours, peer_or_none, show, timed

GROWTH = {"num_chains": (1, 4, 16, 64), "hidden": (10, 25, 50, 100, 200), "num_data": (100, 400, 1600, 6400)}


def growth(options):
    """Rows of one net, one quantity varied at a time."""
    for name, values in GROWTH.items():
        for value in values:
            case = CASES["1-50-1"] | ({name: value} if name != "num_chains" else {})
            args = {"num_chains": value if name == "num_chains" else 16, "num_warmup": 20, "num_draws": 10}
            args |= {"clock": options.clock, "device": "cpu", "max_tree_depth": 6}
            peer = peer_or_none(options, case, args)
            row = timed(Ours(case, args), peer, options.repeats)
            yield {"varied": name, "value": value, **row}


def draw_growth(rows, path):
    """One panel per quantity: microseconds per gradient and chain, logarithmic."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    from pyrobnn.plots.style import style

    labels = {"num_chains": "chains", "hidden": "hidden units", "num_data": "data"}
    series = {"machine_us": "pyrobnn", "bare_gradient_us": "its bare gradient", "numpyro_us": "NumPyro"}
    with style():
        figure, axes = plt.subplots(1, len(labels), figsize=(9, 3), sharey=True, layout="constrained")
        for axis, (name, label) in zip(axes, labels.items()):
            part = [row for row in rows if row["varied"] == name]
            for key, who in series.items():
                points = [(row["value"], row[key]) for row in part if key in row]
                if points:
                    axis.loglog(*zip(*points), "o-", label=who, base=10)
            axis.set_xticks([row["value"] for row in part], [f"{row['value']}" for row in part])
            axis.minorticks_off()
            axis.set_xlabel(label)
        axes[0].set_ylabel("µs per gradient and chain")
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes[0].legend()
        figure.savefig(path)


def parse(argv=None):
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--numpyro-python", default=sys.executable)
    parser.add_argument("--figure", help="write the figure here")
    parser.add_argument("--results", help="append the rows here, one JSON object a line")
    return parser.parse_args(argv)


def main():
    """Print the rows; write the figure."""
    options = parse()
    from pyrobnn.studies.uci import append_record

    rows = []
    for row in growth(options):
        rows.append(row)
        show(row)
        if options.results:
            append_record(options.results, row)
    if options.figure:
        draw_growth(rows, options.figure)


if __name__ == "__main__":
    main()
