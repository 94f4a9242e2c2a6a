"""SVI against MCMC on clusters of noisy data: every knob of SVI moved alone, NUTS, MAP, MLE, Laplace and an ensemble.

    python scripts/compare_svi_mcmc.py --quick
    python scripts/compare_svi_mcmc.py --data study_two_clusters --noise inferred --methods svi svi-full-rank nuts
    python scripts/compare_svi_mcmc.py --data clusters --noise inferred --methods svi nuts --seeds 0 1 2 3 4 5 6 7 8 9
    python scripts/compare_svi_mcmc.py --config study.yaml --out results/mine

Each set of data with each model of the noise is a comparison of its own in a folder of OUT, with its report, figures
and saved draws. The table of all of them is printed and written to OUT/table.csv, the picture of how far each method's
doubt opens in the widest gap to OUT/gaps.png and .svg; several seeds give means with standard errors. What OUT already
holds of the same settings and data is not fitted again, and NUTS goes on from its checkpoint: after Ctrl-C or a kill,
give the same command. A study file is one of ``pyrobnn compare --config`` in which ``data`` and ``noise`` may be
lists; any option of ``pyrobnn compare`` is taken, also one of a method (``--svi.num_steps 20000``). ``--quick`` takes
the first data and noise where none are named, moves no knob and shortens the fits: two minutes.

The knobs of SVI are moved on ``study_two_clusters``, with both models of the noise; ``--every-knob`` moves them on all
data, ``--methods`` runs the methods it names wherever it is given. NUTS stops when it has converged or after 150
seconds; ``--nuts.max_seconds 1500`` gives it more. What has not converged is listed under the table, and hollow in the
picture.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from pyrobnn import cli, plots
from pyrobnn.cli.options import listed_methods, read, read_file
from pyrobnn.posterior import storage

STUDY = """
data: [study_two_cubic_clusters, study_two_clusters, study_four_clusters, study_four_cubic_clusters]
noise: [inferred, heteroskedastic]
prior_scale: 3.0
methods:
  svi: {}
  nuts: {until: converged, max_tree_depth: 12, max_seconds: 150}
  laplace: {}
  ensemble: {}
  map: {}
  mle: {}
knobs:
  svi-full-rank: {method: svi, guide: full_rank}
  svi-weights: {method: svi, estimator: weights}
  svi-kl-warmup: {method: svi, kl_weight: {class_path: Linear, init_args: {warmup: 0.1, full: 0.5}}}
  svi-batches: {method: svi, batch_size: 64}
  svi-wide-start: {method: svi, init_scale: 0.5}
"""
#: where the knobs are moved
KNOBS_AT = "study_two_clusters"
COLUMNS = {
    "log_prob": "log density",
    "rmse": "RMSE",
    "coverage_90": "90 %",
    "gap_ratio": "in gap",
    "rhat": "R-hat",
    "ess": "ESS",
    "khat": "k-hat",
    "fit_seconds": "fit s",
}
FIGURES = {"bands": plots.predictive_bands, "loss": plots.loss}


def main(argv: Sequence[str]) -> int:
    """Run every comparison of the study; exit status as of ``pyrobnn compare``, the worst of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", nargs="+", help="sets of data")
    parser.add_argument("--noise", nargs="+", help="models of the noise")
    parser.add_argument("--seeds", nargs="+", type=int, help="of data that are drawn afresh, and of the fits")
    parser.add_argument("--methods", nargs="+", metavar="M", help="of the study, or as of pyrobnn compare")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a study [the one in this script]")
    parser.add_argument("--out", type=Path, default=Path("results/svi-mcmc"), metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every-knob", action="store_true", help=f"on all data, not on {KNOBS_AT} alone")
    asked, rest = parser.parse_known_args(argv)
    rest += ["--methods", *asked.methods] if asked.methods else []
    try:
        study = _study(asked.config)
        study = _shortened(study) if asked.quick else study
        runs = {_folder(asked.out, cell): _run(study, cell, asked, rest) for cell in _cells(study, asked)}
        asked.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, TypeError, OSError) as error:
        print(f"compare_svi_mcmc: {error}", file=sys.stderr)
        return cli.USAGE_ERROR
    status, rows = 0, []
    for folder, run in runs.items():
        named = ", ".join(f"{name} {value}" for name, value in run.cell.items())
        print(f"\n== {named}: {folder}", flush=True)
        file = asked.out / f"{folder.name}.yaml"
        file.write_text(yaml.safe_dump(run.study, allow_unicode=True), encoding="utf-8")
        words = ["--config", str(file), "--out", str(folder), "--resume", *rest]
        command = shlex.join(["python", "scripts/compare_svi_mcmc.py", *argv])
        found = cli.main(["compare", *words], command=command, left_out=run.left_out)
        if found == cli.USAGE_ERROR:
            return found
        status = max(status, found)
        rows += _rows(run.cell, folder)
        if found == cli.INTERRUPTED:
            break
        _draw(folder)
    if rows:
        _tell(pd.DataFrame(rows), asked.out)
    return status


@dataclass(frozen=True)
class Run:
    """One comparison: data and noise (and seed), its study file, and what it omits with the reason."""

    cell: dict[str, Any]
    study: dict[str, Any]
    left_out: dict[str, str]


def _run(study: Mapping[str, Any], cell: dict[str, Any], asked: argparse.Namespace, rest: list[str]) -> Run:
    """What is fitted in one comparison, every option of it checked."""
    plain, left_out = _planned(study, cell, asked)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.yaml"
        file.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")
        read(["--config", str(file), *rest], "compare")
    return Run(cell, plain, left_out)


def _planned(
    study: Mapping[str, Any], cell: Mapping[str, Any], asked: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    """The study file of one comparison, with the knobs where they are moved or named; what is left out, and why."""
    plain = {name: value for name, value in study.items() if name != "knobs"} | cell
    knobs = study.get("knobs", {})
    if not knobs:
        return plain, {}
    if asked.methods or asked.every_knob or (cell["data"] == KNOBS_AT and not asked.quick):
        return plain | {"methods": plain["methods"] | knobs}, {}
    where = "a quick run moves none" if asked.quick else f"they are moved on {KNOBS_AT} alone"
    why = f"knobs of SVI: {where}; --every-knob moves them here, --methods names some"
    return plain, {", ".join(knobs): why}


def _methods(folder: Path) -> dict[str, Any]:
    """What the folder's summary says of each method; nothing where there is none."""
    summary = folder / "summary.json"
    return json.loads(summary.read_text(encoding="utf-8"))["methods"] if summary.exists() else {}


def _folder(out: Path, cell: Mapping[str, Any]) -> Path:
    return out / "-".join([Path(cell["data"]).stem, *(str(value) for value in list(cell.values())[1:])])


def _tell(table: pd.DataFrame, out: Path) -> None:
    """Print and write the table, means with standard errors where there are several seeds, and draw the gaps."""
    table.to_csv(out / "table.csv", index=False)
    chains = table.dropna(subset="converged")
    shown = table.drop(columns="converged")
    if "seed" in table and table["seed"].nunique() > 1:
        grouped = table.groupby(["data", "noise", "method"], sort=False)
        numbers = [title for title in COLUMNS.values() if title in table]
        mean, error = grouped[numbers].mean(), grouped[numbers].sem()
        shown = (mean.map("{:.3g}".format) + error.map(" ± {:.1g}".format)).where(mean.notna(), "")
        shown.insert(
            0, "passed", grouped["verdict"].apply(lambda each: f"{(each == 'pass').sum()} of {len(each)}")
        )
        shown = shown.reset_index()
    print(f"\n{shown.to_string(index=False, na_rep='', float_format='{:.3g}'.format)}")
    print(f"\nin gap: epistemic sd in the widest gap over its median at the data\ntable: {out / 'table.csv'}")
    if len(chains):
        short = chains[~chains["converged"].astype(bool)]
        rows = short[["method", "data", "noise"]].itertuples(index=False)
        listed = "; ".join(" ".join(map(str, row)) for row in rows)
        said = f"; not converged, so not to be relied on: {listed}" if listed else ""
        print(f"chains that have converged: {len(chains) - len(short)} of {len(chains)}{said}")
    if table["in gap"].notna().any():
        figure = gaps(table)
        figure.savefig(out / "gaps.png", dpi=200)
        figure.savefig(out / "gaps.svg")


def gaps(table: pd.DataFrame) -> Figure:
    """How far each method's doubt opens in the widest gap: a panel for each data and noise, mean and error of seeds.

    Hollow where chains have not converged.
    """
    claimed = table.dropna(subset="in gap")
    cells = list(claimed.groupby(["data", "noise"], sort=False))
    most, hollow = claimed.groupby(["data", "noise"])["method"].nunique().max(), None
    low, high = min(0.4, 0.8 * claimed["in gap"].min()), max(2.5, 1.25 * claimed["in gap"].max())
    ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    with plots.style.style():
        size = (3.6, 0.8 + 0.18 * most)
        figure, axes = plots.style.panels(len(cells), max_columns=2, size=size, sharex=True)
        for ((data, noise), rows), ax in zip(cells, axes[:, 0], strict=True):
            order = list(dict.fromkeys(rows["method"]))
            for place, method in enumerate(order):
                ratios = rows.loc[rows["method"] == method, "in gap"]
                short = bool((rows.loc[ratios.index, "converged"] == False).any())  # noqa: E712 (None is none)
                error = ratios.sem() if len(ratios) > 1 else 0.0
                face, color = "white" if short else None, plots.style.EPISTEMIC
                mark = ax.errorbar(ratios.mean(), place, xerr=error, fmt="o", ms=5, color=color, mfc=face)
                hollow = mark if short else hollow
            ax.axvline(1.0, color=plots.style.MUTED, lw=0.8, ls=(0, (4, 2)))
            ax.set(xscale="log", xlim=(low, high))
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
            ax.set(yticks=range(len(order)), yticklabels=order, ylim=(len(order) - 0.5, -0.5))
            ax.set_title(f"{data.removeprefix('study_').replace('_', ' ')}, {noise} noise", fontsize=8)
            ax.set_xlabel("epistemic sd, gap / data")
        if hollow is not None:
            figure.legend([hollow], ["chains that have not converged"], loc="outside lower center")
        return figure


def _study(path: Path | None) -> dict[str, Any]:
    """The options of the study and its methods."""
    if path is None:
        return yaml.safe_load(STUDY)
    given = read_file(path)
    listed = listed_methods(given.pop("methods", None))
    methods = {label: {"method": name, **options} for label, (name, options) in listed.items()}
    return given | ({"methods": methods} if methods else {})


def _shortened(study: Mapping[str, Any]) -> dict[str, Any]:
    """A study of two minutes: short fits, and NUTS waits for convergence no longer than that leaves."""
    methods = {
        label: options | ({"max_seconds": 45} if options.get("until") else {})
        for label, options in study["methods"].items()
    }
    return dict(study) | {"quick": True, "methods": methods}


def _cells(study: Mapping[str, Any], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Every set of data with every model of the noise, and seed; of a quick run that names none the first."""
    axes = []
    for name, given in (("data", asked.data), ("noise", asked.noise)):
        value = study.get(name, {"data": "study_four_clusters", "noise": "inferred"}[name])
        values = value if isinstance(value, list) else [value]
        axes.append(given or (values[:1] if asked.quick else values))
    seeds = [{"seed": seed} for seed in asked.seeds or ()] or [{}]
    return [{"data": str(d), "noise": str(n), **seed} for n in axes[1] for d in axes[0] for seed in seeds]


def _rows(cell: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A row of the table for each method that the folder's summary has."""
    return [
        {**cell, "method": label, "verdict": each["status"]}
        | {title: each["scores"].get(key) for key, title in COLUMNS.items()}
        | {"converged": _converged(each["verdict"]["checks"])}
        for label, each in _methods(folder).items()
    ]


def _converged(checks: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether chains have converged, by the checks of their R-hat, number and length; None of other draws."""
    found = [check["status"] for check in checks if check["name"] in ("rhat_function", "ess_function", "ess")]
    return all(status == "pass" for status in found) if found else None


def _draw(folder: Path) -> None:
    """The figures of one comparison, for the page and for print."""
    trees = {label: storage.read(folder / f"{label}.nc") for label in _methods(folder)}
    for name, draw in FIGURES.items():
        figure = draw(trees)
        figure.savefig(folder / f"{name}.png", dpi=200)
        figure.savefig(folder / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
