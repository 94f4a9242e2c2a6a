"""DataTrees whose posterior is known exactly, for tests of diagnostics: a line with Gaussian noise; classes."""

from __future__ import annotations

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from helpers import seeded
from scipy import stats
from scipy.special import logsumexp, softmax

import pyrobnn as pb
from pyrobnn.core.groups import (
    CONSTANT_DATA,
    FUNCTION,
    HELD_OUT,
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    OBSERVED_DATA,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)
from pyrobnn.posterior import Posterior

SAMPLE = SAMPLE_DIMS
TRUTH = np.array([0.4, 1.1])


def line_data(num=120, seed=0, noise=0.5, slope_of_noise=0.0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, num)
    scale = noise * np.exp(slope_of_noise * x)
    return x, TRUTH[0] + TRUTH[1] * x + scale * rng.normal(size=num), scale


def posterior_of(x, y, noise, prior_scale):
    """Exact posterior mean and covariance of intercept and slope."""
    design = np.stack([np.ones_like(x), x], axis=1)
    precision = design.T @ design / noise**2 + np.eye(2) / prior_scale**2
    covariance = np.linalg.inv(precision)
    return covariance @ design.T @ y / noise**2, covariance


def line_tree(
    weights, x, y, noise, *, prior_scale=10.0, attrs=None, sample_stats=None, seed=1, held_out=None
):
    """A tree as the library writes it, for the line w0 + w1 x with known Gaussian noise; weights (chain, draw, 2)."""
    rng = np.random.default_rng(seed)
    chains, draws = weights.shape[:2]
    probe_x = np.concatenate([np.linspace(-2, 2, 8), [0.1, 1.3], [3.0, -3.0]])
    kind = np.array(["train"] * 8 + ["between"] * 2 + ["outside"] * 2)
    line = lambda at: weights[..., :1] + weights[..., 1:] * at  # noqa: E731
    pointwise = stats.norm.logpdf(y, line(x), noise)
    log_prior = stats.norm.logpdf(weights, 0.0, prior_scale).sum(-1)
    new = np.random.default_rng(77)
    xt = np.sort(new.uniform(-2, 2, 200)) if held_out is None else held_out[0]
    yt = (
        TRUTH[0] + TRUTH[1] * xt + 0.5 * new.normal(size=xt.size)
        if held_out is None
        else held_out[1]
    )
    ft = line(xt)
    log_prob = logsumexp(stats.norm.logpdf(yt, ft, noise), axis=(0, 1)) - np.log(chains * draws)
    groups = {
        POSTERIOR: {"net.weight": ((*SAMPLE, "net.weight_dim_0"), weights)},
        FUNCTION: {
            "f": ((*SAMPLE, "probe", "output"), line(probe_x)[..., None]),
            "log_likelihood": (SAMPLE, pointwise.sum(-1)),
            "log_prior": (SAMPLE, log_prior),
            "layer_norm": ((*SAMPLE, "layer"), np.linalg.norm(weights, axis=-1)[..., None]),
            "probe_x": (("probe", "feature"), probe_x[:, None]),
            "probe_kind": ("probe", kind),
        },
        LOG_LIKELIHOOD: {"y": ((*SAMPLE, "obs"), pointwise)},
        LOG_PRIOR: {"log_prior": (SAMPLE, log_prior)},
        POSTERIOR_PREDICTIVE: {
            "y": ((*SAMPLE, "obs"), line(x) + noise * rng.normal(size=(chains, draws, x.size)))
        },
        OBSERVED_DATA: {"y": ("obs", y)},
        CONSTANT_DATA: {"x": (("obs", "feature"), x[:, None])},
        PREDICTIONS: {
            "f": ((*SAMPLE, "pred_point", "output"), ft[..., None]),
            "y": ((*SAMPLE, "pred_point"), ft + noise * rng.normal(size=ft.shape)),
            "mean": (("pred_point", "output"), ft.mean((0, 1))[:, None]),
            "log_prob": ("pred_point", log_prob),
        },
        HELD_OUT: {"x": (("pred_point", "feature"), xt[:, None]), "y": ("pred_point", yt)},
    }
    if sample_stats:
        groups[SAMPLE_STATS] = {name: (SAMPLE, value) for name, value in sample_stats.items()}
    tree = xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})
    tree.attrs.update(
        {
            "method": "NUTS",
            "label": "nuts",
            "likelihood": "gaussian",
            "temperature": 1.0,
            **(attrs or {}),
        }
    )
    return tree


def healthy_stats(shape, seed=3):
    rng = np.random.default_rng(seed)
    return {
        "energy": rng.normal(size=shape),
        "diverging": np.zeros(shape, dtype=bool),
        "tree_depth": np.full(shape, 3),
        "acceptance_rate": rng.uniform(0.7, 0.95, shape),
        "lp": rng.normal(size=shape),
    }


def exact_tree(chains=4, draws=1000, noise=0.5, prior_scale=10.0, seed=0, **options):
    x, y, _ = line_data(seed=seed)
    mean, covariance = posterior_of(x, y, noise, prior_scale)
    weights = np.random.default_rng(seed + 10).multivariate_normal(
        mean, covariance, (chains, draws)
    )
    options.setdefault("sample_stats", healthy_stats((chains, draws)))
    return line_tree(weights, x, y, noise, prior_scale=prior_scale, **options)


def gaussian_tree(q_mean, q_covariance, mean, covariance, draws, x, y, noise, **attrs):
    """Draws from q with log_p and log_q against the exact posterior N(mean, covariance)."""
    weights = np.random.default_rng(5).multivariate_normal(q_mean, q_covariance, (1, draws))
    log_q = stats.multivariate_normal(q_mean, q_covariance).logpdf(weights).reshape(1, draws)
    log_p = stats.multivariate_normal(mean, covariance).logpdf(weights).reshape(1, draws) - 321.0
    return line_tree(
        weights,
        x,
        y,
        noise,
        attrs={"method": "SVI", "label": "svi", "iid": 1, **attrs},
        sample_stats={"log_p": log_p, "log_q": log_q},
    )


def healthy_svi():
    x, y, _ = line_data()
    mean, covariance = posterior_of(x, y, 0.5, 10.0)
    return gaussian_tree(mean, 1.1 * covariance, mean, covariance, 2000, x, y, 0.5)


def healthy_laplace():
    x, y, _ = line_data(seed=4)
    mean, covariance = posterior_of(x, y, 0.5, 10.0)
    return gaussian_tree(mean, covariance, mean, covariance, 1000, x, y, 0.5, method="Laplace")


def healthy_heteroskedastic():
    x, y, scale = line_data(num=400, noise=0.4, slope_of_noise=0.8)
    design = np.stack([np.ones_like(x), x], axis=1) / scale[:, None]
    covariance = np.linalg.inv(design.T @ design)
    weights = np.random.default_rng(1).multivariate_normal(
        covariance @ design.T @ (y / scale), covariance, (4, 500)
    )
    new = np.linspace(-2, 2, 200)
    noise = 0.4 * np.exp(0.8 * new)
    tree = line_tree(weights, x, y, scale, sample_stats=healthy_stats((4, 500)), held_out=(x, y))
    held_out = TRUTH[0] + TRUTH[1] * new + noise * np.random.default_rng(9).normal(size=200)
    f = weights[..., :1] + weights[..., 1:] * new
    replicates = f + noise * np.random.default_rng(8).normal(size=f.shape)
    tree[PREDICTIONS] = xr.Dataset({"y": ((*SAMPLE, "pred_point"), replicates)})
    tree[HELD_OUT] = xr.Dataset(
        {"x": (("pred_point", "feature"), new[:, None]), "y": ("pred_point", held_out)}
    )
    return tree


def classes_tree(sharpness=1.0):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 3)) * 1.5
    probs = softmax(logits, axis=1)
    labels = np.array([rng.choice(3, p=row) for row in probs])
    f = sharpness * logits + 0.1 * rng.normal(size=(4, 500, 300, 3))
    shown = softmax(f, axis=-1).mean((0, 1))
    groups = {
        POSTERIOR: {"net.weight": ((*SAMPLE, "d"), f[:, :, 0])},
        FUNCTION: {"f": ((*SAMPLE, "probe", "output"), f[:, :, :12])},
        PREDICTIONS: {
            "f": ((*SAMPLE, "pred_point", "output"), f),
            "probs": (("pred_point", "class"), shown),
            "log_prob": ("pred_point", np.log(shown[np.arange(300), labels])),
        },
        HELD_OUT: {"y": ("pred_point", labels)},
    }
    tree = xr.DataTree.from_dict({name: xr.Dataset(group) for name, group in groups.items()})
    tree.attrs.update({"method": "NUTS", "likelihood": "categorical"})
    return tree


def linear_case(seed=0, num_inputs=3, num_data=60, noise=0.5, draws=(4, 200)):
    """A linear net, data from its prior, held-out data, and draws of its exact posterior (chain, draw, weight)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_data, num_inputs))
    x_test = rng.normal(size=(100, num_inputs))
    weights = rng.normal(size=num_inputs + 1)
    design = np.concatenate([x, np.ones((num_data, 1))], axis=1)
    y = design @ weights + noise * rng.normal(size=num_data)
    y_test = x_test @ weights[:-1] + weights[-1] + noise * rng.normal(size=100)
    covariance = np.linalg.inv(design.T @ design / noise**2 + np.eye(num_inputs + 1))
    exact = rng.multivariate_normal(covariance @ design.T @ y / noise**2, covariance, draws)
    with seeded(seed):
        net = torch.nn.Linear(num_inputs, 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    likelihood = pb.likelihoods.HomoskedasticGaussian(noise)
    data = [
        torch.tensor(part, dtype=torch.float32) for part in (x, y[:, None], x_test, y_test[:, None])
    ]
    return pb.BNN(net, prior, likelihood), data, exact


def linear_tree(model, data, weights, **attrs):
    """The tree that the library writes of draws (chain, draw, weight) of a `linear_case`."""
    x, y, *test = data
    values = torch.tensor(weights, dtype=torch.float32)
    draws = {"net.weight": values[..., None, :-1], "net.bias": values[..., -1:]}
    known = {
        "method": "NUTS",
        "kind": "chains",
        "claim": "exact",
        "likelihood": "gaussian",
        "iid": False,
    }
    posterior = Posterior(model, draws, {"lp": values.square().sum(-1)}, meta=known | attrs)
    return posterior.to_datatree(x, y, test=tuple(test))


HEALTHY = {
    "nuts": exact_tree,
    "svi": healthy_svi,
    "laplace": healthy_laplace,
    "heteroskedastic": healthy_heteroskedastic,
    "classes": classes_tree,
}
