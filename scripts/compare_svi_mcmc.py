"""SVI against MCMC on clusters of noisy data: NUTS beside SVI as in the study, SVI's settings, and simpler methods.

    python scripts/compare_svi_mcmc.py --quick    # a sine with a gap: does the band open where there are no data?
    python scripts/compare_svi_mcmc.py --data study_two_clusters --noise inferred --methods svi svi-full-rank nuts
    python scripts/compare_svi_mcmc.py --data clusters --noise inferred --methods svi nuts --seeds 0 1 2
    python scripts/compare_svi_mcmc.py --config study.yaml --out results/mine

Each set of data with each model of the noise is a comparison of its own in a folder of OUT, with its report, bands and
saved draws. The table of all of them goes to OUT/table.csv, how much wider each method's band is in the widest gap to
OUT/gaps.png. A study file is one of ``pyrobnn compare --config`` in which ``data`` and ``noise`` may be lists; options
of ``pyrobnn compare`` and of a method (``--nuts.max_seconds 1500``) are taken too. After Ctrl-C or a kill give the same
command: what is finished is not fitted again. ``svi-study`` has the settings of the study that this retells.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyrobnn import cli, plots
from pyrobnn.plots.canvas import panels
from pyrobnn.plots.look import EPISTEMIC, MUTED, style
from pyrobnn.posterior import storage

#: SVI of the study: 2,000 steps with all points, means within 0.008 of zero there, at the net's own weights here
SVI_STUDY = """
  svi-study:
    method: svi
    num_steps: 2000
    lr: 0.01
    estimator: local_reparameterization
    init_scale: 1.0e-4
    guide: {family: mean_field, max_scale: 2.0, init_loc: net}
    kl_weight: {class_path: Linear, init_args: {warmup: 0.05, full: 0.05}}
    compile: false
"""
STUDY = f"""
data: [study_two_cubic_clusters, study_two_clusters, study_four_clusters, study_four_cubic_clusters]
noise: [inferred, heteroskedastic]
prior_scale: 3.0
methods:
  nuts: {{until: converged, max_tree_depth: 12, max_seconds: 150}}
{SVI_STUDY}
  svi: {{}}
  svi-full-rank: {{method: svi, guide: full_rank}}
  svi-weights: {{method: svi, estimator: weights}}
  svi-batches: {{method: svi, batch_size: 64}}
  svi-wide-start: {{method: svi, init_scale: 0.5}}
  laplace: {{}}
  ensemble: {{}}
  map: {{}}
  mle: {{}}
"""
#: one noise is true of these data, so that a method which gets the posterior can pass
QUICK = f"""
data: gap
noise: inferred
hidden: [50]
methods:
  nuts: {{until: converged, max_tree_depth: 12, max_seconds: 150}}
{SVI_STUDY}
  laplace: {{compile: false}}
"""
COLUMNS = {
    "log_prob": "log density",
    "coverage_90": "90 %",
    "gap_ratio": "in gap",
    "rhat": "R-hat",
    "ess": "ESS",
    "khat": "k-hat",
    "fit_seconds": "fit s",
}


def main(argv: Sequence[str]) -> int:
    """Run every comparison of the study; exit status as of ``pyrobnn compare``, the worst of all."""
    options, words = parse(argv)
    study = study_of(options)
    sets = options.data or pd.Series(study["data"])
    noises = options.noise or pd.Series(study["noise"])
    status = 0
    rows = []
    for data, noise, seed in product(sets, noises, options.seeds or [0]):
        cell = {"data": data, "noise": noise, "seed": seed}
        name = f"{Path(data).stem}-{noise}"
        if options.seeds:
            name += f"-{seed}"
        print(f"\n== {data}, {noise} noise, seed {seed}: {options.out / name}", flush=True)
        code = compare(study | cell, options.out / name, words)
        if code == cli.USAGE_ERROR:
            return code
        status = max(status, code)
        rows += _rows(cell, options.out / name)
        if code == cli.INTERRUPTED:
            break
    if rows:
        _tell(pd.DataFrame(rows), options.out)
    return status


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the words that ``pyrobnn compare`` takes."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        nargs="+",
        help="sets of data",
    )
    parser.add_argument(
        "--noise",
        nargs="+",
        help="models of the noise",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        help="of data that are drawn afresh, and of the fits",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="a study [the one in this script]",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/svi-mcmc"),
        metavar="DIR",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one set of data, three methods, two minutes",
    )
    return parser.parse_known_args(argv)


def study_of(options: argparse.Namespace) -> dict[str, Any]:
    """The study of a file, else the one in this script."""
    if options.config:
        return yaml.safe_load(options.config.read_text("utf-8"))
    return yaml.safe_load(QUICK if options.quick else STUDY)


def compare(study: Mapping[str, Any], folder: Path, words: Sequence[str]) -> int:
    """``pyrobnn compare`` of one set of data with one model of the noise, from a study file in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "study.yaml"
    text = yaml.safe_dump(
        study,
        sort_keys=False,
        allow_unicode=True,
    )
    file.write_text(text, encoding="utf-8")
    return cli.main(["compare", "--config", str(file), "--out", str(folder), "--resume", *words])


def _rows(cell: Mapping[str, str | int], folder: Path) -> list[dict[str, Any]]:
    """A row of the table for each method that the folder's summary has; its bands are drawn."""
    summary = folder / "summary.json"
    methods = json.loads(summary.read_text("utf-8"))["methods"] if summary.exists() else {}
    trees = {label: storage.read(folder / f"{label}.nc") for label in methods}
    if trees:
        plots.predictive_bands(trees).savefig(folder / "bands.png", dpi=200)
    rows = []
    for label, method in methods.items():
        row = {
            **cell,
            "method": label,
            "verdict": method["status"],
        }
        row |= {title: method["scores"].get(key) for key, title in COLUMNS.items()}
        row["converged"] = _converged(method["verdict"]["checks"])
        rows.append(row)
    return rows


def _converged(checks: Sequence[Mapping[str, str]]) -> bool | None:
    """Whether chains have converged, by the checks of their R-hat, number and length; None of other draws."""
    statuses = [
        check["status"]
        for check in checks
        if check["name"] in ("rhat_function", "ess_function", "ess")
    ]
    return all(status == "pass" for status in statuses) if statuses else None


def _tell(table: pd.DataFrame, out: Path) -> None:
    """Print and write the table, means with standard errors where there are several seeds, and draw the gaps."""
    table.to_csv(out / "table.csv", index=False)
    shown = table.drop(columns=["converged", "seed"])
    if table["seed"].nunique() > 1:
        grouped = table.groupby(["data", "noise", "method"], sort=False)
        numbers = [title for title in COLUMNS.values() if table[title].notna().any()]
        mean = grouped[numbers].mean()
        error = grouped[numbers].sem()
        shown = (mean.map("{:.3g}".format) + error.map(" ± {:.1g}".format)).where(mean.notna(), "")
        passes = grouped["verdict"].apply(
            lambda column: f"{(column == 'pass').sum()} of {len(column)}"
        )
        shown = shown.assign(passed=passes).reset_index()
    print(f"\n{shown.to_string(index=False, na_rep='', float_format='{:.3g}'.format)}")
    print(
        f"\nin gap: epistemic sd in the widest gap over its median at the data\ntable: {out / 'table.csv'}"
    )
    for row in table[table["converged"] == False].itertuples():  # noqa: E712 (None: no chains)
        print(
            f"not converged, so not to be relied on: {row.method}, {row.data}, {row.noise}, seed {row.seed}"
        )
    if table["in gap"].notna().any():
        gaps(table).savefig(out / "gaps.png", dpi=200)


def gaps(table: pd.DataFrame) -> Figure:
    """Epistemic sd in the widest gap over that at the data: a panel for each data and noise, hollow: not converged."""
    cells = list(table.dropna(subset="in gap").groupby(["data", "noise"], sort=False))
    num_methods = max(rows["method"].nunique() for _, rows in cells)
    with style():
        size = (3.6, 1.0 + 0.18 * num_methods)
        figure, axes = panels(
            len(cells),
            max_columns=2,
            size=size,
            sharex=True,
        )
        for ((data, noise), rows), ax in zip(cells, axes[:, 0], strict=True):
            _draw_ratios(ax, rows)
            ax.set(
                title=f"{data.replace('_', ' ')}, {noise} noise",
                ylim=(num_methods - 0.5, -0.5),
            )
        return figure


def _draw_ratios(ax: Axes, table: pd.DataFrame) -> None:
    """A mark for each method, with the standard error over several seeds, and a line where both sds are equal."""
    for method, runs in table.groupby("method", sort=False):
        face = "white" if (runs["converged"] == False).any() else EPISTEMIC  # noqa: E712
        ratios = runs["in gap"]
        ax.errorbar(
            ratios.mean(),
            method,
            xerr=ratios.sem() if len(runs) > 1 else 0.0,
            fmt="o",
            ms=5,
            color=EPISTEMIC,
            mfc=face,
        )
    ax.axvline(
        1.0,
        color=MUTED,
        lw=0.8,
        ls=(0, (4, 2)),
    )
    ax.set(
        xscale="log",
        xlabel="epistemic sd, gap / data (hollow: not converged)",
    )
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
