"""BoTorch's fully Bayesian Gaussian processes, sampled by this library's NUTS in place of NumPyro's.

The program has the priors of BoTorch's own; the marginal likelihood of the rows is written out with its gradient. Rows
are filled up with ones that weigh nothing, so that the tables of an optimisation share one compiled step.
"""

from __future__ import annotations

import functools
import math

import pyro
import pyro.distributions as dist
import torch
from botorch.models.fully_bayesian import (
    FullyBayesianSingleTaskGP,
    MaternPyroModel,
    PyroModel,
    SaasPyroModel,
)
from botorch.models.utils.gpytorch_modules import MIN_INFERRED_NOISE_LEVEL
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count, check_type
from pyrobnn.inference import NUTS
from pyrobnn.model.padding import row_weights

#: rows that a compiled step has room for: of an optimisation of 10 to 60 evaluations there are two
_CAPACITIES = (16, 64)
_SQRT5 = math.sqrt(5.0)


def fit_fully_bayesian_model_nuts(
    model: FullyBayesianSingleTaskGP,
    max_tree_depth: int = 6,
    warmup_steps: int = 512,
    num_samples: int = 256,
    thinning: int = 16,
    disable_progbar: bool = False,
    jit_compile: bool = False,
    seed: int = 0,
) -> None:
    """Fit a fully Bayesian Gaussian process of BoTorch, in place of ``botorch.fit.fit_fully_bayesian_model_nuts``.

    The same priors, the same number of draws of one chain with a dense mass matrix, loaded into the model in the same
    way. The step is compiled once for all tables of 17 to 64 rows, of 65 to 128, and so on.

    Args:
        model: a ``SaasFullyBayesianSingleTaskGP`` or ``FullyBayesianSingleTaskGP``; it is changed in place.
        max_tree_depth: at most 2^max_tree_depth leapfrogs per draw.
        warmup_steps: transitions of warm-up.
        num_samples: draws, of which every ``thinning``-th is kept.
        thinning: how many draws there are to one that is kept.
        disable_progbar: show no progress bar.
        jit_compile: without effect, as in BoTorch: the step is always compiled.
        seed: of all randomness.

    Raises:
        TypeError, ValueError: naming the argument.
        Refused: another kind of model, or one that warps its inputs.

    Reference:
        *High-Dimensional Bayesian Optimization with Sparse Axis-Aligned Subspaces* (Eriksson & Jankowiak, 2021)
        https://arxiv.org/abs/2103.00349
    """
    check_type("model", model, FullyBayesianSingleTaskGP, "a fully Bayesian GP of BoTorch")
    check_count("num_samples", num_samples)
    check_count("thinning", thinning)
    gp = model.pyro_model
    _check_priors(gp)
    model.train()
    variances = gp.train_Yvar
    x = gp.train_X if variances is None else torch.cat([gp.train_X, variances], -1)
    program = functools.partial(
        gaussian_process,
        sparse=type(gp) is SaasPyroModel,
        noisy=variances is None,
    )
    nuts = NUTS(
        num_chains=1,
        num_warmup=warmup_steps,
        max_tree_depth=max_tree_depth,
        mass_matrix="dense",
        compile=True,
        capacity=_capacity(len(x)),
    )
    posterior = nuts.fit(
        program,
        x.detach(),
        gp.train_Y.squeeze(-1).detach(),
        num_draws=num_samples,
        seed=seed,
        progress=not disable_progbar,
    )
    draws = {name: value[0, ::thinning] for name, value in posterior.draws.items()}
    model.load_mcmc_samples(_samples(draws))
    model.eval()


def _check_priors(gp: PyroModel) -> None:
    """Refuse priors that the program here does not have."""
    if type(gp) not in (SaasPyroModel, MaternPyroModel):
        raise Refused(
            f"the priors of a {type(gp).__name__} are not sampled here, those of SaasPyroModel and MaternPyroModel "
            "alone: use botorch.fit.fit_fully_bayesian_model_nuts"
        )
    if gp.use_input_warping:
        raise Refused(
            "the model warps its inputs, which is not sampled here: leave out use_input_warping, or use "
            "botorch.fit.fit_fully_bayesian_model_nuts"
        )


def _capacity(num_rows: int) -> int:
    """Rows that the step has room for."""
    return next((size for size in _CAPACITIES if num_rows <= size), _CAPACITIES[-1])


def _samples(draws: dict[str, Tensor]) -> dict[str, Tensor]:
    """Draws of the program's sites under the names by which BoTorch loads them."""
    samples = {
        name: value for name, value in draws.items() if name in ("mean", "noise", "outputscale")
    }
    samples["lengthscale"] = draws["inv_length_sq"].rsqrt()
    return samples


def gaussian_process(
    x: Tensor,
    y: Tensor,
    *,
    sparse: bool,
    noisy: bool,
) -> None:
    """A Gaussian process with a Matérn-5/2 kernel, the priors those of BoTorch.

    Args:
        x: inputs (N, dim); where the noise is known with its variance as the last column.
        y: targets (N,), standardised.
        sparse: the axis-aligned prior of few active inputs; otherwise length scales that grow with the dimension.
        noisy: whether the variance of the noise is inferred.
    """
    number = x.new_tensor
    inputs = x if noisy else x[:, :-1]
    outputscale = number(1.0)
    if sparse:
        outputscale = pyro.sample("outputscale", dist.Gamma(number(2.0), number(0.15)))
    mean = pyro.sample("mean", dist.Normal(number(0.0), number(1.0)))
    variance = x[:, -1]
    if noisy:
        excess = pyro.sample("noise", dist.Gamma(number(0.9), number(10.0)))
        variance = (MIN_INFERRED_NOISE_LEVEL + excess).expand(len(x))
    inv_length_sq = _inverse_square_lengths(inputs, sparse)
    covariance = outputscale * matern_5_2(inputs, inv_length_sq)
    weights = row_weights(len(y)).to(y)
    pyro.factor(
        "y",
        log_marginal(covariance, variance, y - mean, weights),
    )


def _inverse_square_lengths(x: Tensor, sparse: bool) -> Tensor:
    """One over the squares of the length scales (dim,)."""
    dim = x.shape[1]
    if not sparse:
        centre = x.new_full((dim,), math.sqrt(2.0) + 0.5 * math.log(dim))
        law = dist.LogNormal(-2.0 * centre, 2.0 * math.sqrt(3.0))
        return pyro.sample("inv_length_sq", law.to_event(1))
    shrinkage = pyro.sample("tausq", dist.HalfCauchy(x.new_tensor(0.1)))
    local = pyro.sample("local_inv_length_sq", dist.HalfCauchy(x.new_ones(dim)).to_event(1))
    return pyro.deterministic("inv_length_sq", shrinkage * local)


def matern_5_2(x: Tensor, inv_length_sq: Tensor) -> Tensor:
    r"""The Matérn kernel of order 5/2 between rows (N, dim), (N, N).

    .. math:: k(r) = (1 + \sqrt 5 r + \tfrac53 r^2) e^{-\sqrt 5 r}, \qquad
        \frac{dk}{d(r^2)} = -\tfrac56 (1 + \sqrt 5 r) e^{-\sqrt 5 r}

    The derivative is written out: that of the root is infinite where two rows are one.
    """
    x = x - 0.5
    norms = (x.square() * inv_length_sq).sum(-1)
    products = (x * inv_length_sq) @ x.T
    squares = norms.unsqueeze(-1) + norms - 2.0 * products
    fixed = squares.detach().clamp(min=0.0)
    distance = _SQRT5 * fixed.sqrt()
    decay = (-distance).exp()
    value = (1.0 + distance + (5.0 / 3.0) * fixed) * decay
    return _with_slope(value, squares, (-5.0 / 6.0) * (1.0 + distance) * decay)


def log_marginal(
    covariance: Tensor,
    variance: Tensor,
    residual: Tensor,
    weights: Tensor,
) -> Tensor:
    r"""The log density of residuals (N,) of a normal law with mean zero and covariance :math:`K + diag(v)`; a scalar.

    .. math:: \frac{\partial}{\partial K} = \tfrac12 (\alpha \alpha^\top - K^{-1}), \qquad \alpha = K^{-1} r

    A row of weight zero is independent of all others, with variance one and residual zero: it adds nothing.
    """
    counted = weights.unsqueeze(-1) * weights
    variances = variance * weights + (1.0 - weights)
    matrix = covariance * counted + variances * torch.eye(len(weights)).to(covariance)
    residual = residual * weights
    root = torch.linalg.cholesky(matrix.detach())
    inverse = torch.cholesky_inverse(root)
    alpha = inverse @ residual.detach()
    log_determinant = 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    size = weights.sum() * math.log(2.0 * math.pi)
    value = -0.5 * ((residual.detach() * alpha).sum(-1) + log_determinant + size)
    slope = 0.5 * (alpha.unsqueeze(-1) * alpha.unsqueeze(-2) - inverse)
    value = value + _change(matrix, slope).sum((-2, -1))
    return value + _change(residual, -alpha).sum(-1)


def _change(point: Tensor, slope: Tensor) -> Tensor:
    """Zero, with this slope in the point."""
    return (point - point.detach()) * slope.detach()


def _with_slope(value: Tensor, point: Tensor, slope: Tensor) -> Tensor:
    """A value with this slope in the point, element by element."""
    return value.detach() + _change(point, slope)
