"""Make the reference posteriors of `pb.references`: long runs of NUTS, and of sequential Monte Carlo to check them by.

    python scripts/make_references.py gap_5 iris_5      # these; without names all
    python scripts/make_references.py --table            # of what is stored

Every run is kept under --runs and not made again, so that it can be stopped and gone on with: NUTS by runs of 16 chains
until the function at every probe has 10,000 effective draws, SMC by runs of 8 islands until the evidence is known to
0.1 nats, or the runs are spent. A net whose R-hat or effective draws fall short is not stored; an evidence that is
known less well is stored with the error that was reached.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import pyrobnn as pb
from pyrobnn.data import Dataset
from pyrobnn.density.density import Density
from pyrobnn.model import BNN, check_data
from pyrobnn.posterior.datatree import probes
from pyrobnn.references.problems import problems
from pyrobnn.references.reference import DENSITY, MOMENTS, Reference, quantities, read, summarise

STORED = Path(pb.references.__file__).parent / "stored"
MIN_ESS, MAX_RHAT, MAX_ERROR = 1e4, 1.01, 0.1
CHAINS, WARMUP, ISLANDS = 16, 300, 8
KEPT_CHAINS, KEPT_DRAWS = 4, 100


@dataclass(frozen=True)
class Effort:
    """Settings of the samplers: draws of each chain, particles of an SMC run, and the most runs of each."""

    num_draws: int = 1000
    target_accept: float = 0.8
    nuts_runs: int = 3
    num_particles: int = 1600
    smc_runs: int = 6


EFFORT = {
    "gap_1": Effort(num_draws=2500),
    "gap_5": Effort(num_draws=1250, num_particles=4000, smc_runs=1),
    "iris_5": Effort(num_draws=1250),
    "gap_50": Effort(target_accept=0.95),
    "gap_3x50": Effort(num_particles=800, smc_runs=2),
    "polynomial_hetero_10": Effort(target_accept=0.95),
    "diabetes_hetero_5": Effort(target_accept=0.95),
}


def fitted(name: str, method: Any, file: Path, seed: int, num_draws: int) -> pb.Posterior:
    """A run of a method, made where the file is not there yet."""
    problem = problems()[name]
    model, (train, _) = problem.model(), problem.data()
    if not file.exists():
        started = time.process_time()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            posterior = method.fit(model, train.x, train.y, num_draws=num_draws, seed=seed)
        posterior.save(file)
        print(f"{file.name}: {time.process_time() - started:.0f} CPU s", flush=True)
        for each in told:
            print(f"  {each.message}", flush=True)
    return pb.Posterior.load(file, model)


def runs_of_nuts(name: str, folder: Path) -> tuple[np.ndarray, list[str], list[str], dict[str, Any]]:
    """Draws (chain, draw, quantity) of runs until they are enough, names and kinds of the quantities, the effort."""
    effort, train = EFFORT.get(name, Effort()), problems()[name].data()[0]
    method = pb.NUTS(num_chains=CHAINS, num_warmup=WARMUP, target_accept=effort.target_accept)
    found, gradients, divergences = [], 0, 0
    for seed in range(1, effort.nuts_runs + 1):
        posterior = fitted(name, method, folder / f"{name}-nuts-{seed}.nc", seed, effort.num_draws)
        drawn = quantities(posterior, train, *probes(train.x))
        found.append(drawn.draws)
        gradients += posterior.meta["num_gradients"]
        divergences += int(posterior.sample_stats["diverging"].sum())
        summary = summarise(np.concatenate(found))
        ess, rhat = _of_function(summary, drawn.kinds)
        print(f"{name}: {len(found)} runs, ESS {ess:.0f}, R-hat {rhat:.4f}, {divergences} divergences", flush=True)
        if ess >= MIN_ESS and rhat <= MAX_RHAT:
            break
    record = {
        "num_chains": CHAINS * len(found),
        "num_draws": effort.num_draws,
        "num_warmup": posterior.meta["num_warmup"],
        "target_accept": effort.target_accept,
        "num_gradients": gradients,
        "divergences": divergences,
    }
    return np.concatenate(found), list(drawn.names), list(drawn.kinds), record


def _of_function(summary: xr.Dataset, kinds: tuple[str, ...] | list[str]) -> tuple[float, float]:
    """Smallest bulk ESS of the function's values and of the noise; largest R-hat of all quantities."""
    function = [kind != DENSITY for kind in kinds]
    return float(summary["ess_bulk"].values[function].min()), float(summary["rhat"].max())


def runs_of_smc(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Of all islands of runs until the evidence is known: log evidence (island,), draws (island, draw, quantity)."""
    effort, train = EFFORT.get(name, Effort()), problems()[name].data()[0]
    method = pb.SMC(num_particles=effort.num_particles, num_islands=ISLANDS)
    islands, draws, gradients = [], [], 0
    for seed in range(1, effort.smc_runs + 1):
        num_draws = effort.num_particles // ISLANDS
        posterior = fitted(name, method, folder / f"{name}-smc-{seed}.nc", seed, num_draws)
        draws.append(quantities(posterior, train, *probes(train.x)).draws)
        islands += posterior.meta["log_evidence_by_island"]
        gradients += posterior.meta["num_gradients"]
        value, error = evidence(np.array(islands))
        print(f"{name}: {seed} runs, log evidence {value:.3f} ± {error:.3f}", flush=True)
        if error <= MAX_ERROR and seed > 1:
            break
    record = {"num_particles": effort.num_particles, "num_islands": len(islands), "num_gradients": gradients}
    return np.array(islands), np.concatenate(draws), record


def evidence(islands: np.ndarray) -> tuple[float, float]:
    """Log of the islands' mean evidence, and its standard error, nats."""
    weight = np.exp(islands - islands.max())
    error = weight.std(ddof=1) / np.sqrt(len(islands)) / weight.mean()
    return float(np.log(weight.mean()) + islands.max()), float(error)


def differences(nuts: np.ndarray, summary: xr.Dataset, smc: np.ndarray, islands: np.ndarray) -> dict[str, float]:
    """Means and sds of both samplers, SMC's minus NUTS's, in the standard error of both.

    The islands are independent, and each counts by its evidence: their spread is the error of their mean.
    """
    weight = np.exp(islands - islands.max())[:, None]
    weight = weight / weight.sum()
    count, mean, found = len(islands), summary["mean"].values, {}
    square, variance = (smc - mean) ** 2, summary["sd"].values ** 2
    for moment, each, true, error in (
        ("mean", smc.mean(1), mean, summary["mean_error"].values),
        ("sd", square.mean(1), variance, 2 * summary["sd"].values * summary["sd_error"].values),
    ):
        ours = (weight * each).sum(0)
        own = np.sqrt((weight**2 * (each - ours) ** 2).sum(0) * count / (count - 1))
        z = (ours - true) / np.hypot(own, error)
        found |= {f"{moment}_z_rms": float(np.sqrt((z**2).mean())), f"{moment}_z_max": float(np.abs(z).max())}
        scale = np.sqrt(variance) if moment == "mean" else 2 * variance
        found[f"{moment}_largest"] = float(np.abs((ours - true) / scale).max())
    return found


def made(name: str, folder: Path) -> Reference | None:
    """The reference; None where NUTS has not converged or has too few effective draws."""
    problem = problems()[name]
    (train, held_out), (probe_x, kinds) = problem.data(), probes(problem.data()[0].x)
    nuts, quantity_names, quantity_kinds, nuts_record = runs_of_nuts(name, folder)
    summary = summarise(nuts)
    ess, rhat = _of_function(summary, quantity_kinds)
    if ess < MIN_ESS or rhat > MAX_RHAT:
        print(f"{name} is left out: ESS {ess:.0f}, R-hat {rhat:.4f}")
        return None
    islands, smc, smc_record = runs_of_smc(name, folder)
    value, error = evidence(islands)
    chains = np.linspace(0, len(nuts) - 1, KEPT_CHAINS).round().astype(int)
    draws = np.linspace(0, nuts.shape[1] - 1, KEPT_DRAWS).round().astype(int)
    record = {
        "nuts": nuts_record,
        "smc": smc_record,
        "smc_minus_nuts": differences(nuts, summary, smc, islands),
        "log_density": log_density_of(problem.model(), train),
        "torch": str(torch.__version__),
    }
    return Reference(
        name,
        problem.about,
        train,
        held_out,
        probe_x,
        tuple(kinds),
        summary.assign_coords(quantity=quantity_names, kind=("quantity", quantity_kinds)),
        nuts[chains][:, draws],
        value,
        error,
        record,
    )


def table(folder: Path = STORED) -> str:
    """What is stored, one line each."""
    lines = [
        "| reference | net | data | weights | R-hat | effective draws | log evidence, nats "
        "| means: rms z, largest | sds: rms z, largest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in problems():
        if not (folder / f"{name}.npz").exists():
            continue
        found = read(folder / f"{name}.npz", name)
        ess, rhat = _of_function(found.summary, [str(kind) for kind in found.summary["kind"].values])
        z = found.record["smc_minus_nuts"]
        cells = [
            f"`{name}`",
            found.about,
            f"{len(found.data.x)} × {found.data.x.shape[1]}",
            found.model().num_weights,
            f"{rhat:.3f}",
            f"{ess:.0f}",
            f"{found.log_evidence:.2f} ± {found.log_evidence_error:.2f}",
            *(f"{z[f'{moment}_z_rms']:.1f}, {z[f'{moment}_z_max']:.1f}" for moment in ("mean", "sd")),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write(reference: Reference, path: Path) -> None:
    """The numbers of a reference as a compressed file, in float32; its model and data are code."""
    record = dict(reference.record) | {
        "log_evidence": reference.log_evidence,
        "log_evidence_error": reference.log_evidence_error,
    }
    summary = reference.summary
    arrays: dict[str, Any] = {
        "record": np.array(json.dumps(record)),
        "probe_x": reference.probe_x.numpy(),
        "probe_kind": np.array(reference.probe_kinds),
        "quantity": summary["quantity"].values,
        "kind": summary["kind"].values,
        "draws": reference.draws.astype(np.float32),
    }
    arrays |= {key: summary[key].values.astype(np.float32) for key in (*MOMENTS, "quantiles")}
    np.savez_compressed(path, **arrays)


def log_density_of(model: BNN, data: Dataset) -> float:
    """Log joint density at one fixed place in unconstrained space, nats: that of the same model and data alone."""
    density = Density(model, check_data(model, data.x, data.y, model.device))
    place = 0.5 * torch.cos(torch.arange(density.dim, dtype=density.dtype))
    return float(density.log_joint(place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(problems())}")
    parser.add_argument("--runs", type=Path, default=Path("runs/references"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--table", action="store_true", help="print what is stored, and make nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(problems())
    if unknown:
        parser.error(f"unknown reference {', '.join(sorted(unknown))}: choose from {', '.join(problems())}")
    for folder in (arguments.runs, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in () if arguments.table else arguments.names or problems():
        reference = made(name, arguments.runs)
        if reference is not None:
            write(reference, arguments.out / f"{name}.npz")
    print(table(arguments.out))


if __name__ == "__main__":
    main()
