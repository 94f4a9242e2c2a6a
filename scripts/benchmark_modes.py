"""Why chains of NUTS disagree on a net whose noise is small, and what brings them together.

    python scripts/benchmark_modes.py --root FOLDER                 # goes on where the results file ends
    python scripts/benchmark_modes.py --root FOLDER --datasets yacht --splits 0 --ways "a low-rank metric"
    python scripts/benchmark_modes.py --table-only

The model and the sampler are those of the UCI rules, 200 draws of each of four chains after a warm-up of 300; every
way changes one thing of it. Chains in different modes differ in their function and hardly in their log density;
chains that have not arrived differ in their log density, by more than one of them varies by, and it rises. The function
is looked at on the test inputs. Seconds are CPU seconds of one thread, compilation included; gradients are those of all
chains. FOLDER holds the UCI sets.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "modes.jsonl"
DRAWS, POINTS = 200, 40
RULE, LOWERED = "as the rule has it", "noise lowered in steps, then inferred"
#: what each way changes: options of NUTS; "noise"; "activation"; "ladder", noises at each of which a run starts where
#: the last one ended; "smc", the particles at whose draws the chains start
WAYS = {
    RULE: {},
    LOWERED: {"ladder": (0.3, 0.1, 0.03, 0.01)},
    **{f"noise held at {noise:g}": {"noise": noise} for noise in (0.1, 0.03, 0.01)},
    "noise held at 0.01, trees of depth 11": {"noise": 0.01, "max_tree_depth": 11},
    "starts from SMC": {"smc": 200},
    "a warm-up of 1,500": {"num_warmup": 1500},
    "tanh for ReLU": {"activation": "tanh"},
    "starts around the mode": {"init": "map"},
    "a low-rank metric": {"mass_matrix": "low_rank"},
}


def run_task(task):
    """The record of a way on a split."""
    import torch

    from pyrobnn.studies.uci import fits

    torch.set_num_threads(1)
    return fits.measured(
        {name: task[name] for name in ("dataset", "split", "way")},
        lambda: judged(**task),
        {"seed": task["split"]},
    )


def judged(dataset, split, way, root):
    """Fit one way, and say where its chains are."""
    import math
    import time
    from dataclasses import replace

    from pyro.distributions import LogNormal

    from pyrobnn.data import uci
    from pyrobnn.data.uci_sets import NUM_HIDDEN
    from pyrobnn.inference.smc import SMC
    from pyrobnn.networks import mlp
    from pyrobnn.studies.uci import RULES, fits
    from pyrobnn.studies.uci.rules import Candidate

    changes = dict(WAYS[way])
    noise, ladder, activation, particles = (
        changes.pop(key, None) for key in ("noise", "ladder", "activation", "smc")
    )
    train, test = uci(fits.DATASETS[dataset], split, root)
    method, first, spent = replace(RULES["nuts"].method, **changes), None, 0

    def model(noise):
        made = Candidate(method, 1.0, noise).model(train, split)
        if activation:
            made.net = mlp(train.x.shape[1], (NUM_HIDDEN,), activation=activation, seed=split)
        return made

    def fitted(by, noise, num_draws=None, init=None):
        return by.fit(model(noise), train.x, train.y, num_draws=num_draws, seed=split, init=init)

    rungs = []
    for each in ladder or ():
        # held to a hundredth, so that the noise is a site as it is in the last run
        begun = time.process_time()
        first = fitted(replace(method, num_warmup=200), LogNormal(math.log(each), 0.01), DRAWS, first)
        spent += first.meta["num_gradients"]
        seconds = round(time.process_time() - begun, 1)
        rungs.append(told(first, train, test) | {"held": each, "cpu_seconds": seconds})
    if particles:
        first = fitted(SMC(num_particles=particles), "inferred")
        spent += first.meta["num_gradients"]
    posterior = fitted(method, noise or "inferred", DRAWS, first)
    found = told(posterior, train, test) | {"rungs": rungs, "rounding": rounding(posterior, train)}
    found["gradients"] += spent
    if particles:
        found["smc"] = {
            "gradients": first.meta["num_gradients"],
            "log_evidence": first.log_evidence,
            "log_evidence_error": first.meta["log_evidence_error"],
            "noise": means(first.draws["likelihood.scale"]),
            "lp": means(first.sample_stats["lp"], 1),
            "function": fits.diagnosis(first, first.predict(test.x).f),
            "warnings": first.meta["warnings"],
        }
    return found


def told(posterior, train, test):
    """What is recorded of a run: scores, convergence, where the chains are, squared errors over those of the noise."""
    from pyrobnn.studies.uci import fits
    from pyrobnn.studies.uci.rules import held_out_scores

    prediction, at_data = posterior.predict(test.x), posterior.predict(train.x)
    error = (at_data.loc - train.y) / at_data.scale
    return {
        "scores": held_out_scores(prediction, test),
        "function": fits.diagnosis(posterior, prediction.f),
        "gradients": posterior.meta["num_gradients"],
        "errors": means(error.square().mean(-2), 3),
        **chains(posterior),
    }


def means(draws, digits=5):
    """The mean of every chain of scalar draws (chain, draw, …), rounded."""
    return [round(float(mean), digits) for mean in draws.double().flatten(1).mean(1)]


def chains(posterior):
    """Log density, noise and energy of each chain: its second half, and what it rose by since the first."""
    stats, half = posterior.sample_stats, posterior.num_draws // 2
    lp, energy = stats["lp"].double(), stats["energy"].double()
    found = {
        "lp": means(lp[:, half:], 1),
        "rise": round(float((lp[:, half:].mean(1) - lp[:, :half].mean(1)).mean()), 1),
        "spread": round(float(lp[:, half:].var(1).mean().sqrt()), 1),
        "bfmi": round(float((energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)).min()), 3),
        "step_size": float(stats["step_size"][:, -1].double().median()),
        "cut": round(
            float((stats["tree_depth"] >= posterior.meta["settings"]["max_tree_depth"]).double().mean()), 3
        ),
        "divergences": stats["diverging"].sum(1).tolist(),
        "acceptance": means(stats["acceptance_rate"], 2),
    }
    noise = posterior.draws.get("likelihood.scale")
    return found if noise is None else found | {"noise": means(noise[:, half:])}


def rounding(posterior, train):
    """The sd of what float32 rounds of the log density, in nats, over some draws: a constant is no error."""
    import torch

    from pyrobnn.density import Density
    from pyrobnn.inference.fitting.float64 import log_joint_float64
    from pyrobnn.model import check_data

    model = posterior.model
    density = Density(model, check_data(model, train.x, train.y, torch.device("cpu")), points="held")
    z = density.unconstrain(posterior.draws).flatten(0, 1)
    z, exact = z[:: max(1, len(z) // POINTS)], log_joint_float64(density)
    error = torch.stack([density.log_joint(each).double() - exact(each.double()) for each in z])
    return round(float(error.std()), 5)


def table(records):
    """A row for each way on a split, and for the runs that it goes through; the latest record of each counts."""
    lines = [
        "| data, split | way | R-hat of the function, median | largest | noise of the chains | their log densities "
        "| one varies by | rise | squared errors over noise variance | cut | divergences | gradients, millions | CPU s "
        "| test log density |",
        "|---" * 14 + "|",
    ]
    latest = {(record["dataset"], record["split"], record["way"]): record for record in records}
    for dataset, split in sorted({key[:2] for key in latest}, reverse=True):
        for way in WAYS:
            if record := latest.get((dataset, split, way)):
                place = f"{dataset}, {split}"
                lines += [
                    f"| {place} | on this way: held at {rung['held']:g} | {cells(rung)} |"
                    for rung in record["rungs"]
                ]
                lines.append(f"| {place} | {way} | {cells(record)} |")
    return "\n".join(lines)


def cells(row):
    """The columns of a run; log densities and rise are those of the second half of the draws."""
    function, noise = row["function"], row.get("noise")
    found = [
        f"{function['rhat_f_median']:.3f}",
        f"{function['rhat_f_max']:.2f}",
        "held" if noise is None else between(noise, ".2g"),
        between(row["lp"], ".0f"),
        f"{row['spread']:.0f}",
        f"{row['rise']:.0f}",
        between(row["errors"], ".2f"),
        f"{row['cut']:.0%}",
        str(sum(row["divergences"])),
        f"{row['gradients'] / 1e6:.2f}",
        f"{row['cpu_seconds']:.0f}",
        f"{row['scores']['log_density']:.2f}",
    ]
    return " | ".join(found)


def between(values, form):
    """The least and the largest of the chains, or what both are."""
    least, most = (format(end(values), form) for end in (min, max))
    return least if least == most else f"{least} to {most}"


def main(argv=None):
    """Run what is pending, one fit at a time, then print the table."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--root", type=Path, help="folder of the UCI sets")
    found.add_argument("--datasets", nargs="+", default=["yacht", "energy"])
    found.add_argument("--splits", nargs="+", type=int, default=[0])
    found.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="some of them alone"
    )
    found.add_argument("--results", type=Path, default=RESULTS, help="the results file")
    found.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    options = found.parse_args(argv)
    from pyrobnn.studies.uci import append_record, read_records

    done = {(record["dataset"], record["split"], record["way"]) for record in read_records(options.results)}
    for dataset in options.datasets:
        for split in options.splits:
            for way in options.ways:
                if (dataset, split, way) in done or options.table_only:
                    continue
                os.environ["OMP_NUM_THREADS"] = "1"  # before the child loads torch
                task = {"dataset": dataset, "split": split, "way": way, "root": options.root}
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    record = pool.submit(run_task, task).result()
                append_record(options.results, record)
                print(f"{dataset} {split}, {way}: {record['cpu_seconds']:.0f} CPU s", flush=True)
    print(table(read_records(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
