"""A posterior as BoTorch's model: values, gradients, conditioning, an acquisition function optimised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import seeded

import pyrobnn as pb

pytest.importorskip("botorch")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def posterior():
    """Two outputs of different sizes, with units."""
    x = 4 * torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.stack([100 - (x - 2).square().sum(1), x[:, 0]], 1)
    units = pb.data.Standardizer.fit(pb.data.Dataset(x, y, "hill", "regression"))
    net = pb.networks.mlp(2, (10,), 2, seed=0)
    prior = pb.priors.FanInNormal()
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.2), standardizer=units)
    nuts = pb.NUTS(num_chains=2, num_warmup=100, max_tree_depth=5, compile=False)
    return nuts.fit(model, x, y, num_draws=50)


@pytest.mark.slow
def test_values_are_those_of_predict_and_gradients_flow(posterior):
    from pyrobnn.botorch import BNNModel

    model = BNNModel(posterior, num_draws=50)
    X = (
        4 * torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ).requires_grad_()
    found = model.posterior(X)
    assert found.values.shape == (3, 100, 4, 2) and model.num_outputs == 2
    expected = posterior.predict(X.detach()[1]).f.flatten(0, 1)
    assert torch.allclose(found.values[1], expected.to(X), rtol=1e-4)
    (slope,) = torch.autograd.grad(found.mean[..., 0].sum(), X)
    step = torch.zeros_like(X)
    step[..., 0] = 0.05
    rise = (model.posterior(X + step).mean - model.posterior(X - step).mean)[..., 0] / 0.1
    assert torch.allclose(slope[..., 0], rise, rtol=0.05, atol=0.05)


def test_what_has_no_function_there_is_refused_in_words(posterior):
    from pyrobnn.botorch import BNNModel

    with pytest.raises(ValueError, match=r"the model was fitted to \(points, 2\)"):
        BNNModel(posterior).posterior(torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="a program predicts by"):
        BNNModel(pb.Posterior(lambda x, y: None, {"w": torch.zeros(4, 20)}))


def test_an_acquisition_function_is_optimised_and_rows_are_added(posterior):
    before = np.random.get_state()
    from botorch.acquisition import GenericMCObjective, qExpectedImprovement
    from botorch.optim import optimize_acqf
    from botorch.sampling.index_sampler import IndexSampler

    from pyrobnn.botorch import BNNModel

    model = BNNModel(posterior)
    bounds = torch.tensor([[0.0, 0.0], [4.0, 4.0]], dtype=torch.float64)
    objective = GenericMCObjective(lambda values, X=None: values[..., 0])
    acquire = qExpectedImprovement(
        model, best_f=90.0, sampler=IndexSampler(torch.Size([64]), seed=0), objective=objective
    )
    with seeded():
        best, value = optimize_acqf(acquire, bounds, q=2, num_restarts=2, raw_samples=32)
    np.random.set_state(before)
    pairs = 4 * torch.rand(
        200, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    assert (
        value >= acquire(pairs).max()
    )  # a pair that gradients found is no worse than the best of 200 at random
    assert ((best >= 0) & (best <= 4)).all()
    x = torch.tensor([[2.0, 2.0]], dtype=torch.float64)
    more = model.condition_on_observations(x, torch.tensor([[100.0, 2.0]], dtype=torch.float64))
    assert more.bnn_posterior.meta["num_data"] == 21
    assert more.posterior(x).variance.shape == (1, 2)
