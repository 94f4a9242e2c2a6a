"""Prior widths that a rule has set for a large net, and nobody has declared, are narrowed by Laplace's evidence."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from helpers import seeded
from models import normal_prior
from torch import nn

import pyrobnn as pb

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LABELS = pb.likelihoods.Categorical


def codes(posterior: pb.Posterior) -> set[str]:
    return {finding["code"] for finding in posterior.meta["findings"]}


def images(num_rows: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (num_rows,), generator=generator)
    patterns = torch.randn(3, 1, 8, 8, generator=generator)
    return patterns[y] + 1.5 * torch.randn(num_rows, 1, 8, 8, generator=generator), y


@functools.cache
def trained() -> nn.Sequential:
    """A convolutional net of more than 10,000 weights after a plain loop."""
    x, y = images()
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 24),
            nn.ReLU(),
            nn.Linear(24, 3),
        )
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def fitted(prior, net: nn.Module | None = None, **options) -> pb.Posterior:
    net = net or trained()
    model = pb.BNN(net, prior, LABELS())
    method = pb.Laplace(**{"subset": "last_layer", "compile": False} | options)
    return method.fit(model, *images(), init=net, num_draws=5)


@pytest.mark.parametrize(
    "options", [{}, {"subset": "all", "structure": "kron"}], ids=["last", "kron"]
)
def test_a_width_that_nobody_declared_is_narrowed_to_that_of_the_evidence(options):
    posterior = fitted(pb.priors.FanInNormal(), **options)
    tuned = fitted(pb.priors.FanInNormal(), tune="marginal_likelihood", **options)
    factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]
    assert factor > 1
    assert factor == pytest.approx(tuned.meta["tuned"]["prior_precision_factor"]["all"], rel=1e-3)
    assert "prior_narrowed" in codes(posterior)
    assert "prior_narrowed" not in codes(tuned)
    declared = fitted(pb.priors.FanInNormal(), tune=None, **options)
    gain = next(f["gain"] for f in posterior.meta["findings"] if f["code"] == "prior_narrowed")
    assert posterior.log_evidence - declared.log_evidence == pytest.approx(gain, rel=1e-2)


@pytest.mark.parametrize(
    "prior",
    [normal_prior(), pb.priors.FanInNormal(floor=1.0)],
    ids=["IIDPrior", "floor"],
)
def test_a_declared_width_is_kept(prior):
    posterior = fitted(prior)
    assert posterior.meta["tuned"] is None
    assert "prior_narrowed" not in codes(posterior)
    of_rule = fitted(pb.priors.FanInNormal(), tune=None)
    for name, values in of_rule.draws.items():
        assert torch.equal(values, posterior.draws[name])


def test_no_width_becomes_wider():
    net = copy.deepcopy(trained())
    with torch.no_grad():
        net[5].weight.mul_(30)
    wider = fitted(pb.priors.FanInNormal(), net, tune="marginal_likelihood")
    assert wider.meta["tuned"]["prior_precision_factor"]["all"] < 1
    assert fitted(pb.priors.FanInNormal(), net).meta["tuned"] is None


def test_small_nets_have_no_rule():
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    assert fitted(pb.priors.FanInNormal(), net).meta["tuned"] is None


def test_a_copy_of_the_model_knows_the_rule_and_a_file_has_the_narrower_width(tmp_path):
    model = pb.BNN(trained(), pb.priors.FanInNormal(), LABELS())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert copied.widths_by_rule
    posterior = fitted(pb.priors.FanInNormal())
    loaded = pb.Posterior.load(posterior.save(tmp_path / "posterior.nc"), model)
    x, _ = images(10)
    torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x).probs)
    for name, prior in posterior.model.priors.items():
        if name in ("net.5.weight", "net.5.bias"):
            assert float(prior.base_dist.scale.flatten()[0]) < 1
            torch.testing.assert_close(
                loaded.model.priors[name].base_dist.scale, prior.base_dist.scale
            )


def test_a_curvature_that_is_not_tuned_takes_the_default():
    assert pb.Laplace().tune == "auto"
    assert not pb.Laplace().is_tuned
    pb.Laplace(curvature="variational", tune="auto")
