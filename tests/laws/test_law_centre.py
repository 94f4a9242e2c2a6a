"""The law of the centre: Laplace's Gaussian is at a mode, and its evidence the mode's, or a finding says how far.

Fresh small nets of every noise, searched with the default options.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrobnn as pb
from pyrobnn import likelihoods as L
from pyrobnn.inference.curvature.approach import AT_MODE, Rounds
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.optim.minimize import Result
from pyrobnn.inference.optim.occam import log_evidences
from pyrobnn.inference.optim.path_ends import Ends
from pyrobnn.inference.optim.paths import Search
from pyrobnn.posterior import Posterior

#: nats between the evidence of a fit and that at the mode
TOLERANCE = 0.5


class Case(NamedTuple):
    """A net and what it is fitted to."""

    likelihood: Callable[[], L.Likelihood]
    hidden: tuple[int, ...]
    num_inputs: int
    num_rows: int
    curve: Callable[[Tensor], Tensor]
    spread: float = 0.1
    activation: str = "tanh"

    def problem(self) -> tuple[pb.BNN, Tensor, Tensor]:
        """Model, x and y; the curve's sign gives the class, its exponential the rate."""
        likelihood = self.likelihood()
        generator = torch.Generator().manual_seed(self.num_rows)
        x = (
            4.0
            * torch.rand(
                self.num_rows,
                self.num_inputs,
                generator=generator,
            )
            - 2.0
        )
        noise = torch.randn(
            self.num_rows,
            1,
            generator=generator,
        )
        y = self.curve(x) + self.spread * noise
        num_outputs = 1
        if isinstance(likelihood, L.Categorical):
            y = (y[:, 0] > -0.5).long() + (y[:, 0] > 0.5).long()
            num_outputs = 3
        elif isinstance(likelihood, L.Poisson):
            y = torch.poisson(self.curve(x).exp(), generator=generator)
        elif isinstance(likelihood, L.HeteroskedasticGaussian):
            y = self.curve(x) + (0.05 + 0.15 * (x[:, :1] > 0)) * noise
            num_outputs = 2
        net = pb.networks.mlp(
            self.num_inputs,
            self.hidden,
            num_outputs,
            activation=self.activation,
            seed=self.num_rows,
        )
        prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
        return pb.BNN(net, prior, likelihood), x, y


def inferred() -> L.Likelihood:
    return L.HomoskedasticGaussian(dist.HalfNormal(1.0))


def learned() -> L.Likelihood:
    return L.HomoskedasticGaussian("learned")


def first(x: Tensor) -> Tensor:
    return x[:, :1]


def last(x: Tensor) -> Tensor:
    return x[:, -1:]


CASES = {
    "waves": Case(inferred, (14,), 1, 57, lambda x: torch.sin(4.0 * x) + 0.3 * x),
    "product": Case(inferred, (16,), 2, 133, lambda x: first(x) * torch.cos(2.0 * last(x))),
    "deep": Case(
        inferred,
        (10, 10),
        2,
        151,
        lambda x: torch.sin(2.0 * first(x) + last(x).square()),
        activation="silu",
    ),
    "bumps": Case(inferred, (20,), 1, 83, lambda x: (-4.0 * x.square()).exp() + torch.sin(x)),
    "learned waves": Case(learned, (12,), 1, 77, lambda x: torch.sin(5.0 * x)),
    "learned plane": Case(learned, (8,), 3, 91, lambda x: first(x) - last(x).square(), 0.3),
    "widening": Case(L.HeteroskedasticGaussian, (12,), 1, 97, lambda x: torch.cos(3.0 * x)),
    "wide sum": Case(
        L.HeteroskedasticGaussian, (14,), 2, 121, lambda x: torch.sin(3.0 * first(x)) + last(x)
    ),
    "classes": Case(L.Categorical, (10,), 2, 89, lambda x: first(x) * last(x)),
    "counts": Case(L.Poisson, (12,), 1, 67, lambda x: 1.0 + torch.sin(3.0 * x)),
}
FAST = ("product", "learned plane")


def at_the_mode(
    model: pb.BNN,
    x: Tensor,
    y: Tensor,
    draws: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The mode near a draw, by steps of Newton's method in float64 that follow the exact Hessian in any direction."""
    problem = prepare(
        model,
        x,
        y,
        points="free",
    )
    density = problem.density.double()

    def loss(z: Tensor) -> Tensor:
        return -density.log_joint(z)

    slope = torch.func.grad_and_value(loss)
    hessian = torch.func.jacrev(torch.func.grad(loss))
    z = problem.density.unconstrain(draws).double()
    damping = 1e-2
    gradient, value = slope(z)
    for _ in range(100):
        curvatures, basis = torch.linalg.eigh(hessian(z))
        along = basis.mT @ gradient
        if float((along.square() / curvatures.abs().clamp_min(1e-6)).sum()) < 1e-6:
            break
        for _ in range(12):
            trial = z - basis @ (along / (curvatures.abs() + damping))
            trial_gradient, trial_value = slope(trial)
            if trial_value < value:
                z, gradient, value = trial, trial_gradient, trial_value
                damping = damping / 5
                break
            damping = damping * 8
    values = density.constrain(z)
    return {name: values[name].to(draws[name]).detach() for name in draws}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_the_centre_is_a_mode_or_a_finding_says_how_far_from_one(name):
    model, x, y = CASES[name].problem()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pb.Laplace(compile=False).fit(
            model,
            x,
            y,
            num_draws=2,
        )
    codes = {finding["code"] for finding in posterior.meta["findings"]}
    decrement = 0.5 * posterior.meta["newton_distance"] ** 2
    assert decrement <= AT_MODE or "not_a_mode" in codes
    q = posterior.approximation
    points = {site: posterior.draws[site][0, 0] for site in posterior.meta["point_sites"]}
    centre = q.layout.constrain(q.loc) | points
    mode = at_the_mode(model, x, y, centre)
    init = Posterior(model, {site: value[None, None] for site, value in mode.items()})
    there = pb.Laplace(compile=False).fit(
        model,
        x,
        y,
        init=init,
        num_draws=2,
    )
    near = abs(posterior.log_evidence - there.log_evidence) < TOLERANCE
    assert near or "not_a_mode" in codes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "learned plane" else pytest.mark.slow)
        for name, case in CASES.items()
        if case.likelihood not in (L.Categorical, L.Poisson)
    ],
)
def test_the_mode_has_the_best_evidence_that_its_search_has_met(name, monkeypatch):
    """Ends are compared where they come to rest: on the way there the evidence of one may fall by ten nats."""
    model, x, y = CASES[name].problem()
    met: list[float] = []
    chosen = Search._chosen

    def noted(search: Search, ends: Ends, single: bool) -> Result:
        met.append(float(search.worths(ends.runs).nan_to_num(nan=-torch.inf).max()))
        return chosen(search, ends, single)

    monkeypatch.setattr(Search, "_chosen", noted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pb.Laplace(compile=False).fit(model, x, y, num_draws=2)
        centre = {site: value[:1, :1] for site, value in posterior.draws.items()}
        q = posterior.approximation
        centre |= {site: v[None, None] for site, v in q.layout.constrain(q.loc).items()}
    problem = prepare(model, x, y, points="free")
    values = {site: value[0, 0] for site, value in centre.items()}
    z = problem.density.unconstrain(values)
    assert float(log_evidences(problem, z[None])[0]) > met[-1] - 3.0


def test_where_the_rounds_run_out_the_verdict_warns(monkeypatch):
    model, x, y = CASES["waves"].problem()
    monkeypatch.setattr("pyrobnn.inference.laplace.POLISH_STEPS", 0)
    monkeypatch.setattr("pyrobnn.inference.curvature.approach._SHARE", 1.0)
    monkeypatch.setattr("pyrobnn.inference.curvature.approach._MOST_ROUNDS", 1)
    search = pb.MAP(
        num_steps=100,
        polish_steps=0,
        compile=False,
    )
    with pytest.warns(UserWarning, match="the centre is not a mode"):
        posterior = pb.Laplace(map=search, compile=False).fit(
            model,
            x,
            y,
            num_draws=50,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = pb.diagnose(posterior.to_datatree(x, y))
    assert verdict.draws in ("warn", "fail")


def test_rounds_are_as_many_as_a_share_of_the_search_pays_for():
    cheap = Rounds.affordable(1.0, 2400)
    dear = Rounds.affordable(200.0, 2400)
    assert cheap.number > 20 and cheap.num_steps < dear.num_steps
    assert 1 <= dear.number <= 2 and not Rounds.affordable(2000.0, 2400).number


def curved_wells(x: None = None, y: None = None) -> None:
    """Two modes at z₀ = ±2 in a valley z₁ = z₀², and a saddle at the origin between them."""
    z = pyro.sample("z", dist.Normal(torch.zeros(3), 10.0).to_event(1))
    walls = 20.0 * (z[1] - z[0].square()).square() + 0.5 * z[2].square()
    pyro.factor("wells", -5.0 * (z[0].square() / 4.0 - 1.0).square() - walls)


def from_point(program: Callable[..., None], *z: float) -> Posterior:
    """Laplace's fit whose search begins at this point."""
    init = Posterior(program, {"z": torch.tensor(z)[None, None]})
    search = pb.MAP(num_steps=200, compile=False)
    return pb.Laplace(map=search).fit(program, init=init, num_draws=4)


def test_a_saddle_is_left_for_a_mode():
    posterior = from_point(curved_wells, 0.0, 0.0, 0.0)
    centre = posterior.approximation.loc
    assert abs(float(centre[0])) == pytest.approx(2.0, abs=0.05)
    assert float(centre[1]) == pytest.approx(float(centre[0]) ** 2, abs=0.05)
    saddle = posterior.meta["saddle"]
    assert saddle["lowest_curvature"] < 0.0 and saddle["at_mode"]
    assert saddle["gain"] == pytest.approx(5.0, abs=0.2)
    codes = {finding["code"] for finding in posterior.meta["findings"]}
    assert not codes & {"not_a_mode", "hessian_indefinite"}


def test_a_look_that_finds_no_saddle_changes_nothing(monkeypatch):
    fits = [from_point(curved_wells, 1.9, 3.6, 0.1)]
    assert fits[0].meta["saddle"]["gain"] == 0.0
    monkeypatch.setattr("pyrobnn.inference.curvature.approach.MAX_COORDINATES", 0)
    fits.append(from_point(curved_wells, 1.9, 3.6, 0.1))
    assert fits[1].meta["saddle"] is None
    assert torch.equal(fits[0].draws["z"], fits[1].draws["z"])
    assert fits[0].log_evidence == fits[1].log_evidence


def test_a_way_that_is_cut_short_is_told(monkeypatch):
    monkeypatch.setattr("pyrobnn.inference.optim.saddle._STEPS_IN_ROUND", 3)
    monkeypatch.setattr("pyrobnn.inference.optim.saddle._SHARE", 0.006)
    with pytest.warns(UserWarning, match="the search ended at a saddle"):
        posterior = from_point(curved_wells, 0.0, 0.0, 0.0)
    assert not posterior.meta["saddle"]["at_mode"]
    codes = [finding["code"] for finding in posterior.meta["findings"]]
    assert "not_a_mode" in codes


def double_tanh() -> tuple[pb.BNN, Tensor, Tensor]:
    """A net of one unit whose weights are zero at a saddle between two mirror images."""
    x = torch.linspace(-2.0, 2.0, 40)[:, None]
    net = pb.networks.mlp(1, (1,), seed=0)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    return pb.BNN(net, prior, L.HomoskedasticGaussian(0.3)), x, torch.tanh(x)


def test_a_point_leaves_a_saddle_too():
    model, x, y = double_tanh()
    zero = {
        name: torch.zeros_like(value)[None, None] for name, value in model.initial_values().items()
    }
    posterior = pb.MAP(num_steps=200, compile=False).fit(model, x, y, init=Posterior(model, zero))
    assert posterior.meta["saddle"]["gain"] > 10.0 and posterior.meta["saddle"]["at_mode"]
    weights = posterior.draws["net.0.weight"].flatten() * posterior.draws["net.2.weight"].flatten()
    assert float(weights) > 0.5
