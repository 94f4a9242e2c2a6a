"""The law of ``padding_idx``: the padding row of an embedding stays as it is and has no prior, under every method."""

from __future__ import annotations

import copy
import pickle
import warnings

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from test_contract import METHODS, num_draws, one_of_each_kind
from torch import nn

import pyrobnn as pb


class Bag(nn.Module):
    """The sum of the words' vectors, of which the padding adds nothing."""

    def __init__(self, padding_idx: int = 0):
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=padding_idx)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.words(x.long()).sum(1))


def bag(seed: int = 0, padding_idx: int = 0) -> Bag:
    with seeded(seed):
        return Bag(padding_idx)


WORDS = torch.randint(1, 5, (40, 6), generator=torch.Generator().manual_seed(0))
WORDS[:, 4:] = 0
TARGETS = WORDS[:, :4].float().mean(1, keepdim=True)


def model(prior: pb.priors.Prior | None = None, net: nn.Module | None = None) -> pb.BNN:
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.3)
    return pb.BNN(net or bag(), prior or pb.priors.FanInNormal(), likelihood)


#: of the net's own dropout layers there are none
OTHERS = [name for name in METHODS if name != "MCDropout"]


@pytest.mark.parametrize("name", one_of_each_kind(OTHERS))
def test_the_padding_row_stays_zero_and_no_gradient_is_missed(name):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        posterior = METHODS[name].fit(model(), WORDS, TARGETS, seed=1, **num_draws(name))
    draws = posterior.draws["net.words.weight"]
    assert draws.shape[2:] == (5, 3)
    assert bool((draws[..., 0, :] == 0).all())
    assert bool((draws[..., 1:, :] != 0).all())
    assert not [w for w in seen if "is not its derivative" in str(w.message)]
    predicted = posterior.predict(WORDS).mean
    # without the padding the same words have the same mean
    torch.testing.assert_close(posterior.predict(WORDS[:, :4]).mean, predicted)


@pytest.mark.parametrize(
    "structure",
    ["diag", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "kron"))],
)
def test_laplace_has_no_variance_there(structure):
    laplace = pb.Laplace(structure=structure, tune="marginal_likelihood", compile=False)
    posterior = laplace.fit(model(), WORDS, TARGETS, num_draws=20)
    draws = posterior.draws["net.words.weight"]
    assert bool((draws[..., 0, :] == 0).all()) and bool((draws[..., 1:, :].std(1) > 0).all())


def test_the_density_is_that_of_the_other_rows():
    problem = model()
    prior = problem.priors["net.words.weight"]
    with seeded(0):
        value = prior.sample()
    scale = 3**-0.5  # of three columns
    expected = dist.Normal(0.0, scale).log_prob(value[1:]).sum()
    torch.testing.assert_close(prior.log_prob(value), expected)
    assert problem.priors["net.words.weight"].event_shape == (5, 3)


def test_a_row_that_was_given_is_kept():
    net = bag(padding_idx=-1)
    with torch.no_grad():
        net.words.weight[-1] = 7.0
    words = torch.where(WORDS == 0, 4, WORDS - 1)
    posterior = pb.MAP(num_steps=20, compile=False).fit(model(net=net), words, TARGETS)
    assert bool((posterior.draws["net.words.weight"][0, 0, 4] == 7.0).all())


def test_weights_that_another_layer_has_too_are_trained_whole():
    class Tied(Bag):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.words.weight

    with seeded(0):
        net = Tied()
    priors = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical()).priors
    with seeded(0):
        value = priors["net.words.weight"].sample()
    assert bool((value[0] != 0).all())


@pytest.mark.parametrize(
    "prior",
    [
        pb.priors.ScaleMixture(),
        pb.priors.IIDPrior(dist.StudentT(3.0)),
        pb.priors.DictPrior(
            {name: dist.Normal(0.0, 1.0) for name in ("words.weight", "head.weight", "head.bias")}
        ),
    ],
    ids=["mixture", "student", "dict"],
)
def test_other_priors(prior):
    fitted = pb.SVI(num_steps=30, compile=False).fit(model(prior), WORDS, TARGETS, num_draws=5)
    assert bool((fitted.draws["net.words.weight"][..., 0, :] == 0).all())


def test_it_is_copied_pickled_saved_and_gone_on_from(tmp_path):
    fitted = pb.SVI(num_steps=30, compile=False).fit(model(), WORDS, TARGETS, num_draws=5)
    path = tmp_path / "bag.nc"
    fitted.save(path)
    for again in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert torch.equal(again.predict(WORDS).mean, fitted.predict(WORDS).mean)
    loaded = pb.Posterior.load(path, model())
    assert torch.equal(loaded.predict(WORDS).mean, fitted.predict(WORDS).mean)
    further = pb.MAP(num_steps=5, compile=False).fit(model(), WORDS, TARGETS, init=fitted)
    assert bool((further.draws["net.words.weight"][..., 0, :] == 0).all())
