"""SVI against MCMC on clusters of noisy data: whether NUTS converges, and how far the uncertainty opens in a gap.

    python scripts/svi_against_mcmc/run.py chains    # NUTS on all eight cases until it has converged
    python scripts/svi_against_mcmc/run.py gaps    # NUTS and mean-field SVI on fresh draws of the clusters
    python scripts/svi_against_mcmc/run.py study --depth 13 --seconds 3000    # draws for notebook 03

A case is one of four sets of 400 points with one of two models of the noise; the net is 1-50-1, tanh. Records are
appended to ``records.jsonl`` as they are made, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyro.distributions as dist
import torch

import pyrobnn as pb
from pyrobnn.data import Dataset, synthetic
from pyrobnn.diagnostics import Evidence
from pyrobnn.diagnostics.gap import widest_gap

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import Record, append_record, read_records  # noqa: E402

RESULTS = Path(__file__).with_name("records.jsonl")
DRAWS = Path(__file__).with_name("four_clusters.nc")
DATA = ("four_clusters", "four_cubic_clusters", "two_clusters", "two_cubic_clusters")
NOISES = ("inferred", "heteroskedastic")
#: s, and the scale of the biases, of the prior N(0, s² / fan-in)
PRIOR = (3.0, 1.0)
DEPTH = 12
WARMUP = 200
ACCEPT = 0.9
#: seed of the 400 fresh points at which predictions are scored
UNSEEN = 1000


def model_of(
    data: Dataset,
    noise: str,
    scale: float,
    bias_scale: float,
) -> pb.BNN:
    """The net of the study under a fan-in normal prior."""
    likelihood: pb.likelihoods.Likelihood
    if noise == "heteroskedastic":
        num_outputs = 2
        likelihood = pb.likelihoods.HeteroskedasticGaussian()
    else:
        num_outputs = 1
        likelihood = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    net = pb.networks.mlp(1, (50,), num_outputs, seed=0)
    prior = pb.priors.FanInNormal(scale, bias_scale)
    return pb.BNN(
        net,
        prior,
        likelihood,
        standardizer=pb.data.Standardizer.fit(data),
    )


def fresh(name: str, seed: int) -> Dataset:
    """Another draw of a study's clusters, 400 points."""
    f = synthetic._cubic if "cubic" in name else torch.cos
    return synthetic._clustered(name, f, 400, seed, synthetic._shapes()["two" in name])


def chains(name: str, noise: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """NUTS on the study's own points, with its verdict."""
    key = {"part": "chains", "data": name, "noise": noise}
    key |= {"scale": options.prior[0], "bias_scale": options.prior[1]}
    if not options.known(key):
        yield key | _judged(
            options.nuts,
            name,
            pb.data.study(name),
            noise,
            options,
            seed=1,
        )


def gaps(name: str, noise: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """NUTS and SVI on fresh draws of the data."""
    methods = {
        "nuts": options.nuts,
        "svi": pb.SVI(
            num_steps=5000, kl_weight=pb.inference.vi.kl_schedules.Linear(warmup=0.1, full=0.5)
        ),
    }
    for seed in options.seeds:
        for method, config in methods.items():
            key = {
                "part": "gaps",
                "data": name,
                "noise": noise,
                "seed": seed,
                "method": method,
            }
            key |= {"scale": options.prior[0], "bias_scale": options.prior[1]}
            if not options.known(key):
                yield key | _judged(
                    config,
                    name,
                    fresh(name, seed),
                    noise,
                    options,
                    seed=seed,
                )


def study(name: str, noise: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """NUTS on the study's four clusters with noise from a second output; 50 draws of each chain are kept."""
    if (name, noise) == ("four_clusters", "heteroskedastic"):
        key = {"part": "study", "data": name, "noise": noise}
        yield key | _judged(
            options.nuts,
            name,
            pb.data.study(name),
            noise,
            options,
            seed=1,
            draws=DRAWS,
        )


def _judged(
    method: pb.NUTS | pb.SVI,
    name: str,
    data: Dataset,
    noise: str,
    options: argparse.Namespace,
    seed: int,
    draws: Path | None = None,
) -> dict[str, Any]:
    started = time.process_time()
    checkpoint = {}
    if options.keep is not None and isinstance(method, pb.NUTS):
        checkpoint = {"checkpoint": options.keep / f"{name}-{noise}-{seed}.checkpoint"}
    model = model_of(data, noise, *options.prior)
    posterior = method.fit(
        model,
        data.x,
        data.y,
        seed=seed,
        **checkpoint,
    )
    seconds = time.process_time() - started
    if draws is not None:
        posterior.thin(50).save(draws)
    tree = posterior.to_datatree(
        data.x,
        data.y,
        true_function=data.true_function,
    )
    verdict = pb.diagnose(tree)
    values = {check.name: check.value for check in verdict.checks}
    gap = widest_gap(Evidence(tree))
    inside = posterior.predict(data.x)
    unseen = fresh(name, UNSEEN)
    record: dict[str, Any] = {
        "status": verdict.status,
        "not passed": [f"{c.name} {c.status}" for c in verdict.checks if c.status != "pass"],
        "gap_ratio": None if gap is None or gap.ratio is None else round(gap.ratio, 3),
        "sd at data": round(float(inside.epistemic_var.sqrt().median()), 5),
        "noise at data": round(float(inside.aleatoric_var.mean().sqrt()), 5),
        "log density": round(float(posterior.predict(unseen.x).log_prob(unseen.y).mean()), 4),
        "elbo": None if posterior.log_evidence is None else round(posterior.log_evidence, 2),
        "cpu seconds": round(seconds, 1),
    }
    for name in ("rhat_function", "ess_function", "khat"):
        if name in values:
            record[name] = values[name]
    if isinstance(method, pb.NUTS):
        record |= _of_chains(method, posterior)
    return record


def _of_chains(method: pb.NUTS, posterior: pb.Posterior) -> dict[str, Any]:
    """How long the trajectories were, and how the run ended."""
    stats = posterior.sample_stats
    return {
        "draws": posterior.num_chains * posterior.num_draws,
        "cut": round(float((stats["tree_depth"] >= method.max_tree_depth).float().mean()), 4),
        "leapfrogs": round(float(stats["n_steps"].float().mean()), 1),
        "divergences": int(stats["diverging"].sum()),
        "stopped": posterior.meta["stopped"],
        "accept": method.target_accept,
        "depth": method.max_tree_depth,
    }


PARTS = {function.__name__: function for function in (chains, gaps, study)}


def chain_table(records: Sequence[Record]) -> str:
    """NUTS on the study's points: whether it has converged, what it cost, and what its verdict says."""
    lines = [
        "| data | noise | R-hat of f | ESS of f | draws | leapfrogs a draw | cut at depth | divergences | CPU s "
        "| gap ratio | verdict | its reasons |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [r for r in records if r["part"] == "chains"]
    for r in sorted(rows, key=lambda r: (r["data"], r["noise"])):
        checks = [check.rsplit(" ", 1) for check in r["not passed"] if "fit_warnings" not in check]
        reasons = ", ".join(f"`{name}`" for name, status in checks if status in ("warn", "fail"))
        ratio = "" if r["gap_ratio"] is None else f"{r['gap_ratio']:.1f}"
        lines.append(
            f"| {r['data']} | {r['noise']} | {r['rhat_function']:.3f} | {r['ess_function']:.0f} | {r['draws']} "
            f"| {r['leapfrogs']:.0f} | {r['cut']:.1%} | {r['divergences']} | {r['cpu seconds']:.0f} | {ratio} "
            f"| {r['status']} | {reasons} |"
        )
    return "\n".join(lines)


def gap_table(records: Sequence[Record]) -> str:
    """Epistemic sd in the widest gap over that at the data, NUTS beside SVI: means over fresh data and their errors."""
    lines = [
        "| data | noise | data sets | gap / data, NUTS | gap / data, SVI | NUTS / SVI, in the gap "
        "| NUTS / SVI, at the data | largest R-hat of f |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [record for record in records if record["part"] == "gaps"]
    for name, noise in itertools.product(DATA, NOISES):
        pairs = _pairs([r for r in rows if (r["data"], r["noise"]) == (name, noise)])
        if len(pairs) < 2:
            continue
        at_data = [nuts["sd at data"] / svi["sd at data"] for nuts, svi in pairs]
        of_nuts = [nuts["gap_ratio"] for nuts, _ in pairs]
        of_svi = [svi["gap_ratio"] for _, svi in pairs]
        in_gap = [
            ratio * nuts / svi for ratio, nuts, svi in zip(at_data, of_nuts, of_svi, strict=True)
        ]
        cells = " | ".join(map(_mean_and_error, (of_nuts, of_svi, in_gap, at_data)))
        worst = max(nuts["rhat_function"] for nuts, _ in pairs)
        lines.append(f"| {name} | {noise} | {len(pairs)} | {cells} | {worst:.3f} |")
    return "\n".join(lines)


def _pairs(rows: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The records of NUTS and of SVI on the same draw of the data."""
    of_nuts = {row["seed"]: row for row in rows if row["method"] == "nuts"}
    of_svi = {row["seed"]: row for row in rows if row["method"] == "svi"}
    return [(of_nuts[seed], of_svi[seed]) for seed in of_nuts if seed in of_svi]


def _mean_and_error(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}"


def main() -> None:
    """Run the parts that are asked for; print and append their records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="+",
        choices=PARTS,
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=DATA,
        choices=DATA,
    )
    parser.add_argument(
        "--noise",
        nargs="+",
        default=NOISES,
        choices=NOISES,
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=range(10),
        help="of the fresh data",
    )
    parser.add_argument(
        "--prior",
        type=float,
        nargs=2,
        default=PRIOR,
        metavar=("S", "BIAS"),
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="the most that a run of NUTS takes",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=DEPTH,
        help="of NUTS' trees, at most",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=WARMUP,
        help="transitions, at first",
    )
    parser.add_argument(
        "--accept",
        type=float,
        default=ACCEPT,
        help="acceptance rate that NUTS aims at",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="for NUTS' checkpoints: a run goes on after a kill",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
    )
    options = parser.parse_args()
    options.nuts = pb.NUTS(
        num_warmup=options.warmup,
        max_tree_depth=options.depth,
        target_accept=options.accept,
        until="converged",
        max_seconds=options.seconds,
    )
    done = read_records(options.results)
    options.known = lambda key: any(key.items() <= record.items() for record in done)
    warnings.simplefilter("ignore")
    for name_of_part, name, noise in itertools.product(options.parts, options.data, options.noise):
        for record in PARTS[name_of_part](name, noise, options):
            print(
                *(f"{key}={value}" for key, value in record.items()),
                sep="  ",
                flush=True,
            )
            append_record(options.results, record)


if __name__ == "__main__":
    main()
