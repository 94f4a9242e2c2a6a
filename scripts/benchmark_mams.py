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

import math

import torch
from benchmark_nuts import CASES
from sampler_cases import Records, parser, problem, runs, slowest, told, values

from pyrobnn.compile import compiled
from pyrobnn.gradient import batched_gradient
from pyrobnn.inference.hmc.machine import STATS

#: shares of NUTS' mean trajectory
LENGTHS = (0.1, 0.2, 0.4, 0.8)
ACCEPTANCE = 0.9


def per_gradient(held, positions, gradients):
    """Bulk ESS of the slowest value per 1000 gradients, by where the function is looked at."""
    return {
        where: round(1000 * slowest(value) / gradients, 4) for where, value in values(held, positions).items()
    }


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


def main():
    """Print the rows; write what is asked for."""
    options = parser(__doc__, [*CASES, "logistic"], seeds=2).parse_args()
    records = Records(options.results)
    for name in options.cases:
        (held, _), step = problem(name), None
        seeds = records.missing(options.seeds, case=name)
        for seed, drawn in runs(held, seeds, options.draws, "diag"):
            gradients, stats = told(drawn)["gradients"], dict(zip(STATS, drawn.stats.movedim(-1, 0)))
            leapfrogs = float(stats["n_steps"].mean())
            arc = float((stats["step_size"] * stats["n_steps"]).mean()) * math.sqrt(held.density.dim)
            z, scale = drawn.positions[:, -1].contiguous(), drawn.positions.flatten(0, 1).std(0)
            if step is None:
                gradient, _ = batched_gradient(held.density.log_joint, z)
                example = (z, torch.randn_like(z), torch.randn_like(z), scale, torch.tensor(0.1))
                step = compiled(leapfrog(gradient, z.shape[1]), *example)
            nuts = per_gradient(held, drawn.positions, gradients)
            record = {"case": name, "seed": seed, "nuts": nuts, "mams": {}, "hmc": {}}
            for share in LENGTHS:
                with torch.no_grad():
                    moved, cost, _ = by_mams(held, z, scale, share * arc, options.draws, seed, step)
                record["mams"][share] = per_gradient(held, moved, cost)
                fixed = max(1, round(share * leapfrogs))
                (_, paths), *_ = runs(held, [seed], options.draws, "diag", trajectory=fixed)
                record["hmc"][share] = per_gradient(held, paths.positions, told(paths)["gradients"])
            records.add(record)


if __name__ == "__main__":
    main()
