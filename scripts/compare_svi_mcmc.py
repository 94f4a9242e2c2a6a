"""SVI against MCMC on clusters of noisy data: every knob of SVI moved alone, NUTS, MAP, MLE, Laplace and an ensemble.

    python scripts/compare_svi_mcmc.py --quick
    python scripts/compare_svi_mcmc.py --data study_two_clusters --noise inferred --methods svi svi-full-rank nuts
    python scripts/compare_svi_mcmc.py --config study.yaml --out results/mine --resume

Each set of data with each model of the noise is a comparison of its own in a folder of OUT, with its report, figures
and saved draws; the table of all of them is printed and written to OUT/table.csv. A study file is one of ``pyrobnn
compare --config`` in which ``data`` and ``noise`` may be lists; any option of ``pyrobnn compare`` is taken, also one
of a method (``--svi.num_steps 20000``). With ``--resume`` what is finished is not fitted again. ``--quick`` takes the
first data and noise where none are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from pyrobnn import cli, plots
from pyrobnn.cli.file import read_config, write_config
from pyrobnn.posterior.storage import read

STUDY = """
data: [study_four_clusters, study_two_clusters]
noise: [inferred, heteroskedastic]
methods:
  svi: {}
  svi-full-rank: {method: svi, guide: full_rank}
  svi-local: {method: svi, local_reparameterization: true}
  svi-kl-warmup: {method: svi, kl_weight: {class_path: Linear, init_args: {warmup: 0.1, full: 0.5}}}
  svi-batches: {method: svi, batch_size: 64}
  svi-wide-start: {method: svi, init_scale: 0.5}
  nuts: {}
  laplace: {}
  ensemble: {}
  map: {}
  mle: {}
"""
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
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a study [the one in this script]")
    parser.add_argument("--out", type=Path, default=Path("results/svi-mcmc"), metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    asked, rest = parser.parse_known_args(argv)
    try:
        study = _study(asked.config)
        cells = _cells(study, asked)
        asked.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"compare_svi_mcmc: {error}", file=sys.stderr)
        return cli.USAGE_ERROR
    rest += ["--quick"] if asked.quick else []
    status, rows = 0, []
    for data, noise in cells:
        folder = asked.out / f"{Path(data).stem}-{noise}"
        file = asked.out / f"{folder.name}.yaml"
        file.write_text(write_config(study | {"data": data, "noise": noise}), encoding="utf-8")
        print(f"\n== {data}, noise {noise}: {folder}", flush=True)
        found = cli.main(["compare", "--config", str(file), "--out", str(folder), *rest])
        if found == cli.USAGE_ERROR:
            return found
        status = max(status, found)
        rows += _rows(data, noise, folder)
        if found == cli.INTERRUPTED:
            break
        _draw(folder)
    if rows:
        table = pd.DataFrame(rows)
        table.to_csv(asked.out / "table.csv", index=False)
        print(f"\n{table.to_string(index=False, na_rep='', float_format='{:.3g}'.format)}")
        print(
            f"\nin gap: epistemic sd in the widest gap over its median at the data\ntable: {asked.out / 'table.csv'}"
        )
    return status


def _study(path: Path | None) -> dict[str, Any]:
    """The options of the study and its methods."""
    if path is None:
        return yaml.safe_load(STUDY)
    given, listed = read_config(path)
    methods = {label: {"method": name, **options} for label, (name, options) in listed.items()}
    return given | ({"methods": methods} if methods else {})


def _cells(study: Mapping[str, Any], asked: argparse.Namespace) -> list[tuple[str, str]]:
    """Every set of data with every model of the noise; of a quick run that names none the first."""
    axes = []
    for name, given in (("data", asked.data), ("noise", asked.noise)):
        value = study.get(name, {"data": "study_four_clusters", "noise": "inferred"}[name])
        values = value if isinstance(value, list) else [value]
        axes.append(given or (values[:1] if asked.quick else values))
    return [(str(data), str(noise)) for data in axes[0] for noise in axes[1]]


def _rows(data: str, noise: str, folder: Path) -> list[dict[str, Any]]:
    """A row of the table for each method that the folder's summary has."""
    summary = folder / "summary.json"
    if not summary.exists():
        return []
    methods = json.loads(summary.read_text(encoding="utf-8"))["methods"]
    return [
        {"data": data, "noise": noise, "method": label, "verdict": each["status"]}
        | {title: each["scores"].get(key) for key, title in COLUMNS.items()}
        for label, each in methods.items()
    ]


def _draw(folder: Path) -> None:
    """The figures of one comparison, for the page and for print."""
    labels = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["methods"]
    trees = {label: read(folder / f"{label}.nc") for label in labels}
    for name, draw in FIGURES.items():
        figure = draw(trees)
        figure.savefig(folder / f"{name}.png", dpi=200)
        figure.savefig(folder / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
