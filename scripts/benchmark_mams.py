"""Would MAMS pay? Effective draws per gradient of the adjusted microcanonical sampler, beside those of NUTS and HMC.

    python scripts/benchmark_mams.py --results scripts/results/mams.jsonl

The sampler is not part of the package: it would be if it needed two thirds of NUTS' gradients on the nets. All that a
warm-up would have to find is given to it: its chains start at the last draws of NUTS, its scales are the standard
deviations of NUTS' draws, its step size is tuned to an acceptance of 0.9, and of several trajectory lengths the best
one counts, chosen after the run. So does HMC (``NUTS(trajectory=...)``, with a warm-up of its own): what the length
gains is told apart from what the dynamics gain. No sampler's warm-up is counted. Effective draws are those of the
slowest site value of a program; of a net those of the slowest function value, of 16 at rows of the data ("at the
data") and 16 at inputs three times as wide ("wide"): trajectories that are right for the one are far too long, or too
short, for the other.

Reference: Metropolis Adjusted Microcanonical Hamiltonian Monte Carlo (Robnik, Cohn-Gordon & Seljak, 2025).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import warnings
from pathlib import Path

import torch
from benchmark_metric import NUM_CHAINS, PROGRAMS, made_up
from benchmark_nuts import CASES, data, torch_program

from pyrobnn.compile import compiled
from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.hmc.hooks import slowest_ess
from pyrobnn.inference.hmc.machine import STATS, Machine
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run
from pyrobnn.inference.hmc.starts import starts
from pyrobnn.inference.nuts import DEFAULT_WARMUP, MOST_WARMUP
from pyrobnn.studies.uci import append_record, read_records

#: shares of NUTS' mean trajectory
LENGTHS = (0.1, 0.2, 0.4, 0.8)
ACCEPTANCE = 0.9


def per_gradient(held, positions, gradients):
    """Bulk ESS of the slowest value per 1000 gradients, by where the function is looked at."""
    if not held.is_bnn:
        return {"sites": round(1000 * slowest_ess(held, positions) / gradients, 4)}
    draws = held.density.constrain(positions)
    wide = 3 * torch.randn(16, *held.x.shape[1:], generator=torch.Generator().manual_seed(1))
    rows = held.x[torch.linspace(0, len(held.x) - 1, 16).long()]
    return {
        where: round(1000 * slowest_ess(dataclasses.replace(held, x=x), draws) / gradients, 4)
        for where, x in (("at the data", rows), ("wide", wide))
    }


def by_nuts(held, seed, num_draws, trajectory=None):
    """Positions (chain, draw, dim), gradients of the draws, and leapfrogs and arc length of a mean trajectory."""
    z, _ = starts(held, None, seed, NUM_CHAINS, not held.is_bnn)
    gradient, batched = batched_gradient(held.density.log_joint, z)
    slots = max(num_draws, MOST_WARMUP)
    run = Run(
        Machine(gradient, NUM_CHAINS, held.density.dim, slots, z.dtype, z.device, trajectory=trajectory),
        seed=seed,
        num_warmup=DEFAULT_WARMUP,
        most=MOST_WARMUP,
        names=None if held.is_bnn else held.density.site_of,
        mass_matrix=form_of("diag", held.is_bnn),
        compile=batched,
    )
    with torch.no_grad():
        run.begin(z)
        drawn = run.sample(num_draws)
    stats = {key: drawn.stats[..., i] for i, key in enumerate(STATS)}
    length = float((stats["step_size"] * stats["n_steps"]).mean()) * math.sqrt(held.density.dim)
    return drawn.positions, float(stats["n_steps"].sum()), float(stats["n_steps"].mean()), length


def leapfrog(gradient, dim):
    """One isokinetic step of all chains in coordinates z / scale: the velocity u (chain, dim) has length one.

    Returns:
        z, u, gradient, log density, and the gain in kinetic energy, (chain,).
    """

    def turn(u, force, step):
        size = force.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        along, delta = force / size, step * size / (dim - 1)
        cosine, decay = (u * along).sum(-1, keepdim=True), (-delta).exp()
        new = along * (1 - decay) * (1 + decay + cosine * (1 - decay)) + 2 * decay * u
        gain = delta - math.log(2) + torch.log1p(cosine + (1 - cosine) * decay**2)
        return new / new.norm(dim=-1, keepdim=True), (dim - 1) * gain[:, 0]

    def step(z, u, slope, scale, size):
        u, first = turn(u, slope * scale, size / 2)
        z = z + size * scale * u
        slope, log_density = gradient(z)
        u, second = turn(u, slope * scale, size / 2)
        return z, u, slope, log_density, (first + second).double()

    return step


def by_mams(held, z, scale, length, num_draws, seed, step=None):
    """Positions (chain, draw, dim), the gradients of their draws, and the mean acceptance, once the step is tuned."""
    torch.manual_seed(seed)
    gradient, _ = batched_gradient(held.density.log_joint, z)
    num_chains = len(z)
    slope, log_density = gradient(z)
    size, log_size, average, error = 0.1 * length, math.log(0.1 * length), 0.0, 0.0
    warmup = num_draws // 4
    kept, gradients, accepted = [], 0, 0.0
    for draw in range(warmup + num_draws):
        if draw == warmup:
            size = math.exp(average)
        u = torch.randn_like(z)
        u = u / u.norm(dim=-1, keepdim=True)
        # uniform on (0, 2 length): a fixed number of steps would meet periods of the target
        steps = max(1, math.ceil(2 * float(torch.rand(())) * length / size))
        new, new_slope, gain = z, slope, torch.zeros(num_chains, dtype=torch.float64)
        for _ in range(steps):
            new, u, new_slope, new_log_density, more = step(new, u, new_slope, scale, torch.tensor(size))
            gain = gain + more
        ratio = (
            (new_log_density.double() - log_density.double() - gain)
            .nan_to_num(nan=-math.inf)
            .exp()
            .clamp_max(1)
        )
        take = torch.rand(num_chains) < ratio
        z = torch.where(take[:, None], new, z)
        slope = torch.where(take[:, None], new_slope, slope)
        log_density = torch.where(take, new_log_density, log_density)
        if draw < warmup:  # dual averaging (Hoffman & Gelman, 2014)
            rate = 1 / (draw + 11)
            error = (1 - rate) * error + rate * (ACCEPTANCE - float(ratio.mean()))
            log_size = math.log(0.1 * length) - math.sqrt(draw + 1) / 0.05 * error
            weight = (draw + 1) ** -0.75
            average = weight * log_size + (1 - weight) * average
            size = math.exp(log_size)
            continue
        kept.append(z.clone())
        gradients += steps * num_chains
        accepted += float(ratio.mean()) / num_draws
    return torch.stack(kept, 1), gradients, accepted


def problem(name):
    """What is fitted."""
    own = {program.__name__: program for program in PROGRAMS}
    if name in own:
        return prepare(own[name], *made_up(own[name]), points="held")
    return prepare(
        torch_program(CASES[name]), *(torch.from_numpy(part) for part in data(CASES[name])), points="held"
    )


def main():
    """Print the rows; write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*CASES, "logistic"], help="some of them alone")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=500, help="of each chain of NUTS")
    parser.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read_records(options.results) if options.results and options.results.exists() else []
    done = {(row["case"], row["seed"]) for row in known}
    for name in options.cases:
        held, step = problem(name), None
        for seed in [seed for seed in range(options.seeds) if (name, seed) not in done]:
            positions, gradients, leapfrogs, arc = by_nuts(held, seed, options.draws)
            nuts = per_gradient(held, positions, gradients)
            z, scale = positions[:, -1].contiguous(), positions.flatten(0, 1).std(0)
            if step is None:
                gradient, _ = batched_gradient(held.density.log_joint, z)
                example = (z, torch.randn_like(z), torch.randn_like(z), scale, torch.tensor(0.1))
                step = compiled(leapfrog(gradient, z.shape[1]), *example)
            record = {"case": name, "seed": seed, "nuts": nuts, "mams": {}, "hmc": {}}
            for share in LENGTHS:
                with torch.no_grad():
                    moved, cost, _ = by_mams(held, z, scale, share * arc, options.draws, seed, step)
                record["mams"][share] = per_gradient(held, moved, cost)
                moved, cost, *_ = by_nuts(held, seed, options.draws, max(1, round(share * leapfrogs)))
                record["hmc"][share] = per_gradient(held, moved, cost)
                print(name, seed, nuts, share, record["mams"][share], record["hmc"][share], flush=True)
            if options.results:
                append_record(options.results, record)


if __name__ == "__main__":
    main()
