"""NUTS on many data sets of one model at once: their chains are chains of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import make_posterior, prepare
from pyrobnn.inference.hmc.machine import Machine
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.hmc.run import Run, named_stats
from pyrobnn.inference.nuts import DEFAULT_WARMUP, NUTS
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior


def fit_batch(
    method: NUTS,
    model: BNN,
    x: Tensor | Sequence[Tensor],
    ys: Sequence[Tensor],
    *,
    num_draws: int,
    seed: int = 0,
) -> list[Posterior]:
    """Posteriors of one model given several data sets of the same size, as simulation studies need them.

    Step size and mass matrix are adapted over the chains of all data sets together, then frozen: right for each, and
    best where their posteriors are alike.

    Args:
        method: engine ``"compiled"``; chains start from the prior. ``num_chains`` is per data set.
        model: a BNN.
        x: inputs (N, …) of all data sets, or those of each.
        ys: targets, each (N, out) or (N,).
        num_draws: draws per chain.
        seed: of starts and of all randomness.

    Returns:
        One posterior per element of ``ys``.

    Raises:
        ValueError: another engine, no targets, or not as many inputs as targets.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb
        >>> likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
        >>> model = pb.BNN(torch.nn.Linear(1, 1), pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> method = pb.NUTS(num_chains=2, num_warmup=20, compile=False)
        >>> up, down = fit_batch(method, model, [x, -x], [x, x], num_draws=20)
        >>> bool(up.draws["net.weight"].mean() > down.draws["net.weight"].mean())
        True
    """
    if method.engine != "compiled" or not len(ys):
        raise ValueError("fit_batch needs targets, and a NUTS with engine='compiled'")
    xs = [x] * len(ys) if isinstance(x, Tensor) else x
    problems = [prepare(model, x, y, points="held") for x, y in zip(xs, ys, strict=True)]
    density, chains = problems[0].density, method.num_chains * len(problems)
    inputs, targets = (
        torch.stack(each).repeat_interleave(method.num_chains, 0)
        for each in zip(*((problem.x, problem.y) for problem in problems))
    )

    batched = torch.func.vmap(torch.func.grad_and_value(density.log_joint))
    warmup = DEFAULT_WARMUP if method.num_warmup is None else method.num_warmup
    machine = Machine(
        lambda z: batched(z, inputs, targets),
        chains,
        density.dim,
        max(num_draws, warmup),
        model.dtype,
        density.device,
        method.max_tree_depth,
        method.trajectory,
        method.target_accept,
    )
    run = Run(
        machine,
        seed=seed,
        num_warmup=warmup,
        mass_matrix=form_of(method.mass_matrix, is_bnn=True),
        step_size=method.step_size,
        compile=method.compile,
    )
    with torch.no_grad():
        run.begin(density.sample_prior(chains, seed))
        drawn = run.sample(num_draws)
    z = drawn.positions.reshape(len(problems), method.num_chains, num_draws, -1)
    stats = drawn.stats.reshape(len(problems), method.num_chains, num_draws, -1)
    return [
        make_posterior(
            problem,
            method,
            density.constrain(z[i]),
            seed=seed,
            timings={"compile": drawn.compile_seconds},
            sample_stats=named_stats(stats[i]),
        )
        for i, problem in enumerate(problems)
    ]
