"""Part ``optimise``: the lowest value of a function by few evaluations, each where a model expects most."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from learning.fitted_nets import SINE, SMC, net, units_of
from learning.gaussian_processes import gaussian_process, improvement_by_process
from torch import Tensor

import pyrobnn as pb

if TYPE_CHECKING:
    from botorch.sampling.index_sampler import IndexSampler

#: bounds and lowest value
FUNCTIONS = {"Hartmann-6": (0.0, 1.0, -3.32237), "Ackley-10": (-5.0, 10.0, 0.0)}
OPTIMISERS = ("BNN", "BNN, Thompson", "GP", "GP, SAAS", "random")
FIRST = 10
LAST = 60

#: a proposal of the next point (1, dim) by the points (row, dim), their values (row, 1) and candidates
Proposal = Callable[[Tensor, Tensor, Tensor], Tensor]


def optimise(problem: str, method: str, seed: int) -> dict[str, Any]:
    """Regret after each evaluation."""
    lowest = FUNCTIONS[problem][2]
    value = function_of(problem)
    dim = int(problem.rpartition("-")[2])
    generator = torch.Generator().manual_seed(seed)
    propose = _proposal_of(method, dim, seed, generator)
    x = torch.quasirandom.SobolEngine(
        dim,
        scramble=True,
        seed=seed,
    ).draw(FIRST)
    y = value(x)
    for _ in range(FIRST, LAST):
        new = propose(x, y, _candidates(x[y.argmin()], generator))
        x = torch.cat([x, new])
        y = torch.cat([y, value(new)])
    return {"regret": [round(float(low) - lowest, 4) for low in y[:, 0].cummin(0).values]}


def _candidates(best: Tensor, generator: torch.Generator) -> Tensor:
    """Points at random in the unit cube, and around the best point (dim,) so far."""
    dim = len(best)
    near = (best + 0.1 * torch.randn(512, dim, generator=generator)).clamp(0.0, 1.0)
    return torch.cat([torch.rand(1024, dim, generator=generator), near])


def _proposal_of(method: str, dim: int, seed: int, generator: torch.Generator) -> Proposal:
    if method == "random":
        return lambda x, y, candidates: candidates[:1]
    if method.startswith("GP"):
        return partial(_by_process, saas=method != "GP")
    return ByNet(
        dim,
        seed=seed,
        thompson=generator if method == "BNN, Thompson" else None,
    )


def _by_process(x: Tensor, y: Tensor, candidates: Tensor, saas: bool) -> Tensor:
    """Where a Gaussian process expects most improvement."""
    model = gaussian_process(x, y, saas)
    return climb(improvement_by_process(model, float(y.min())), candidates)


class ByNet:
    """Proposals of a net that learns each new point: by expected improvement, or (Thompson) by one of its draws.

    Args:
        dim: inputs of the function.
        seed: of the fits.
        thompson: draws the draw, where the proposals are Thompson's.

    """

    def __init__(self, dim: int, *, seed: int, thompson: torch.Generator | None) -> None:
        from botorch.sampling.index_sampler import IndexSampler

        self.seed = seed
        self.thompson = thompson
        self.posterior: pb.Posterior | None = None
        self.sampler = IndexSampler(torch.Size([128]))
        # where the net's inputs have their mean and scale
        self.cube = torch.quasirandom.SobolEngine(
            dim,
            scramble=True,
            seed=0,
        ).draw(1024)

    def __call__(self, x: Tensor, y: Tensor, candidates: Tensor) -> Tensor:
        self.posterior = self._posterior(x, y)
        if self.thompson is not None:
            draw = int(torch.randint(128, (), generator=self.thompson))
            return climb(lowness_of_draw(self.posterior, draw), candidates)
        score = improvement_by_net(self.posterior, self.sampler, float(y.min()))
        return climb(score, candidates)

    def _posterior(self, x: Tensor, y: Tensor) -> pb.Posterior:
        """A fit at the start and when the points have doubled, an update by the last point otherwise."""
        if self.posterior is None or len(x) == 2 * FIRST:
            return SMC.fit(
                net(x.shape[1], 1.0, 0.1, units_of(self.cube, y), SINE),
                x,
                y,
                seed=self.seed,
            )
        return self.posterior.update(x[-1:], y[-1:], seed=self.seed)


def function_of(problem: str) -> Callable[[Tensor], Tensor]:
    """The function to minimise, of points in the unit cube; (row, 1)."""
    from botorch.test_functions import Ackley, Hartmann

    low, high, _ = FUNCTIONS[problem]
    dim = int(problem.rpartition("-")[2])
    if problem.startswith("Hartmann"):
        function = Hartmann(dim)
    else:
        function = Ackley(dim, bounds=[(low, high)] * dim)

    def value(x: Tensor) -> Tensor:
        return function(low + (high - low) * x.double()).float()[:, None]

    return value


def climb(score: Callable[[Tensor], Tensor], candidates: Tensor) -> Tensor:
    """The best candidate (1, dim) by a score, after 40 steps of Adam from the best five, within the unit cube."""
    with torch.no_grad():
        z = candidates[score(candidates).topk(5).indices]
    z.requires_grad_()
    adam = torch.optim.Adam([z], lr=0.02)
    for _ in range(40):
        adam.zero_grad()
        (-score(z).sum()).backward()
        adam.step()
        z.data.clamp_(0.0, 1.0)
    with torch.no_grad():
        return z[score(z).argmax()][None].clone()


def improvement_by_net(
    posterior: pb.Posterior, sampler: IndexSampler, best: float
) -> Callable[[Tensor], Tensor]:
    """Log expected improvement over ``best`` by the draws of the posterior that ``sampler`` takes."""
    from botorch.acquisition import GenericMCObjective, qLogExpectedImprovement

    from pyrobnn.botorch import BNNModel

    improvement = qLogExpectedImprovement(
        BNNModel(posterior),
        -best,
        sampler=sampler,
        objective=GenericMCObjective(lambda values, X=None: -values[..., 0]),
    )
    return lambda z: improvement(z.double()[:, None])


def lowness_of_draw(posterior: pb.Posterior, draw: int) -> Callable[[Tensor], Tensor]:
    """One function of the posterior, with the other sign."""
    function = pb.acquire.function(posterior, draw)
    return lambda z: -function(z)[:, 0]
