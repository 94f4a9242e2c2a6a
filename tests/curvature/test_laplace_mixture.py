"""A mixture of Laplaces: masses of modes that are known exactly, and mirror images that count once."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb


class Square(torch.nn.Module):
    """f(x) = w² x: modes at both roots."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.w**2


def two_roots(centre: float, structure: str = "full") -> tuple[pb.Posterior, torch.Tensor, torch.Tensor]:
    """The mixture under the prior N(centre, 1), and the exact posterior on a grid."""
    x = torch.ones(40, 1)
    y = x + 0.2 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    prior = dist.Normal(centre, 1.0)
    model = pb.BNN(Square(), pb.priors.IIDPrior(prior), pb.likelihoods.HomoskedasticGaussian(0.2))
    method = pb.LaplaceMixture(num_modes=4, structure=structure, num_steps=300, compile=False)
    w = torch.linspace(-2, 2, 20_001, dtype=torch.float64)
    log_p = prior.log_prob(w) + dist.Normal(w[:, None] ** 2, 0.2).log_prob(y.double().T).sum(1)
    return method.fit(model, x, y, num_draws=2000, seed=1), w, log_p


@pytest.mark.parametrize("centre", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_modes_have_their_exact_masses(centre):
    posterior, w, log_p = two_roots(centre)
    exact = log_p.softmax(0)
    right = float(exact[w > 0].sum())
    draws = posterior.draws["net.w"].flatten()
    if centre == 0.0:  # mirror images, one function: either stands for both
        assert posterior.meta["mode_weights"] == [1.0] and posterior.meta["num_starts"] == 4
        assert right == pytest.approx(0.5, abs=1e-6)
        return
    assert posterior.meta["mode_weights"] == pytest.approx([right, 1 - right], abs=2e-3)
    sd = (right * (1 - right) / len(draws)) ** 0.5
    assert float((draws > 0).float().mean()) == pytest.approx(right, abs=4 * sd)
    evidence = float(log_p.logsumexp(0)) + float((w[1] - w[0]).log())
    assert posterior.log_evidence == pytest.approx(evidence, abs=0.02)
    # the density and the moments are those of both modes
    grid = w[::10, None].float()
    density = posterior.approximation.log_prob({"net.w": grid}).exp()
    assert float(density.sum() * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-3)
    prediction = posterior.predict(torch.tensor([[1.0], [2.0]]))
    assert prediction.mean[:, 0].tolist() == pytest.approx(
        [float(exact @ w**2), 2 * float(exact @ w**2)], rel=0.01
    )
    torch.testing.assert_close(prediction.f.mean((0, 1)), prediction.mean, rtol=0.02, atol=0.0)


def test_mirror_images_of_a_net_count_once_and_a_program_is_refused():
    x = torch.linspace(-2, 2, 30)[:, None]
    with seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh(), torch.nn.Linear(1, 1, bias=False)
        )
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 2.0)), pb.likelihoods.HomoskedasticGaussian(0.05))
    method = pb.LaplaceMixture(num_modes=2, num_steps=60, compile=False)
    signs = {model.reinitialized(seed).net[0].weight.sign().item() for seed in range(2)}
    posterior = method.fit(model, x, 1.5 * torch.tanh(x), num_draws=50)
    assert signs == {-1.0, 1.0} and posterior.meta["mode_weights"] == [1.0]
    one = pb.Laplace(num_steps=60, compile=False).fit(model, x, 1.5 * torch.tanh(x), num_draws=50)
    assert posterior.log_evidence == pytest.approx(one.log_evidence + math.log(2), abs=0.05)
    with pytest.raises(pb.Refused, match="use SMC"):
        method.fit(lambda x, y: pyro.sample("z", dist.Normal(0.0, 1.0)), x, x)
