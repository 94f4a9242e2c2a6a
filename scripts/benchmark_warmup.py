"""How long NUTS should warm up: gradients per chain until 400 effective draws, by chains and length of the warm-up.

    python scripts/benchmark_warmup.py --results scripts/results/warmup.jsonl

A warm-up is long enough where a longer one no longer lowers that cost, warm-up included. ESS is the slowest quantity's
(function values of a net; all sites otherwise); the cases are benchmark_nuts's and fifty correlated dimensions.
"""

from __future__ import annotations

import argparse
import itertools

from benchmark_nuts import CASES, data, show, torch_program

WANTED_ESS = 400.0


def correlated(x, y):
    """A Gaussian in 50 dimensions whose neighbours correlate by 0.9; the data are not used."""
    import pyro
    import pyro.distributions as dist
    import torch

    distance = (torch.arange(50.0)[:, None] - torch.arange(50.0)).abs()
    pyro.sample("z", dist.MultivariateNormal(torch.zeros(50), 0.9**distance))


def cost(name, num_chains, num_warmup, num_draws, seed):
    """One row: leapfrogs per chain of the warm-up, per draw, per effective draw, and until 400 effective draws."""
    import torch
    from arviz_stats.base import array_stats

    import pyrobnn as pb
    from pyrobnn.inference.fitting.problem import prepare
    from pyrobnn.inference.hmc.hooks import slowest_ess

    program = correlated if name == "correlated" else torch_program(CASES[name])
    x, y = (torch.from_numpy(part) for part in data(CASES["hierarchical" if name == "correlated" else name]))
    posterior = pb.NUTS(num_chains=num_chains, num_warmup=num_warmup).fit(
        program, x, y, num_draws=num_draws, seed=seed
    )
    stats = posterior.sample_stats
    sampling = float(stats["n_steps"].double().sum()) / num_chains
    warming = posterior.meta["num_gradients"] / num_chains - sampling
    ess = slowest_ess(prepare(program, x, y, points="held"), posterior.draws)
    lp = stats["lp"].numpy()
    return {
        "case": name,
        "chains": num_chains,
        "warmup": num_warmup,
        "seed": seed,
        "warmup_steps": warming,
        "steps_per_draw": sampling / num_draws,
        "ess": ess,
        "rhat_lp": float(array_stats.rhat(lp, chain_axis=0, draw_axis=1)),
        "step_size": float(stats["step_size"][0, -1]),
        "acceptance": float(stats["acceptance_rate"].mean()),
        "steps_to_400": warming + sampling * WANTED_ESS / ess,
    }


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["hierarchical", "correlated", "1-50-1"])
    parser.add_argument("--chains", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--warmups", nargs="+", type=int, default=[50, 100, 200, 300, 500])
    parser.add_argument("--draws", type=int, default=3200, help="over all chains, at least 100 in each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    from pyrobnn.studies.uci import append_record

    for name, chains, warmup in itertools.product(options.cases, options.chains, options.warmups):
        for seed in range(options.seeds):
            row = cost(name, chains, warmup, max(100, options.draws // chains), seed)
            show(row)
            if options.results:
                append_record(options.results, row)


if __name__ == "__main__":
    main()
