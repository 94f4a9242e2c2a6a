"""Whether a noise that was optimised along with the weights says anything of new data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.likelihoods import HeteroskedasticGaussian
from pyrobnn.model import NET

#: numbers in the Jacobian, and the side of the matrix that is decomposed, beyond which there is no check
MAX_JACOBIAN, MAX_SIDE = 2**27, 3000
#: how far below its unbiased estimate the noise variance may be, and the share of the data that weights may use up
FACTOR, SHARE = 2.0, 0.9
_CURE = (
    "give the noise a prior (HomoskedasticGaussian(dist.HalfNormal(1.0))) and infer it with NUTS or SVI, fix it, or "
    "stop early (callbacks.EarlyStopping on held-out data)"
)


def noise_notes(problem: Problem, values: Mapping[str, Tensor]) -> list[str]:
    r"""A note if the learned noise is that of weights which follow the data point by point.

    Linearised at ``values``, with rows :math:`J_n / \sigma_n` and the prior's variances S,

    .. math:: \gamma = \operatorname{tr} K (K + I)^{-1}, \quad K = \Sigma^{-1/2} J S J^\top \Sigma^{-1/2}, \qquad
        \hat\sigma^2 = \frac{1}{N - \gamma} \sum_n r_n^2

    is the number of data that the weights use up and the unbiased estimate of the noise (MacKay, 1992). Maximum
    likelihood divides by N. The note is given where the learned variance is below half the unbiased one, or where γ is
    more than nine tenths of the data, so that what remains says nothing of the noise.

    Args:
        problem: what was fitted; no note unless it is a BNN whose Gaussian noise is learned or comes from the net.
        values: site → value of the fitted weights and noise.

    Reference: Bayesian Interpolation (MacKay, 1992).
    """
    if not problem.is_bnn or problem.model.likelihood.task != "gaussian":
        return []
    model, likelihood = problem.model, problem.model.likelihood
    if not likelihood.points and not isinstance(likelihood, HeteroskedasticGaussian):
        return []
    names = [name for name in model.priors if name.startswith(NET) and name in values]
    num_weights = sum(values[name].numel() for name in names)
    num_values = problem.num_data * problem.y.shape[1]
    if 2 * num_weights < num_values:  # too few weights to use up half of the data
        return []
    if num_values * num_weights > MAX_JACOBIAN or min(num_values, num_weights) > MAX_SIDE:
        return [
            f"the noise is learned with {num_weights} weights from {num_values} values: whether the weights follow the "
            f"data point by point was not checked, that many are too many; if in doubt, {_CURE}"
        ]
    used, squares = _used_up(problem, {name: value.detach() for name, value in values.items()}, names)
    num_values = len(squares)
    left = max(num_values - used, 0.0)
    if float(squares.sum()) <= FACTOR * left and used <= SHARE * num_values:
        return []
    return [
        f"the weights use up {used:.1f} of {num_values} training values, so that the learned noise is that of points "
        f"already seen and far too small for new ones: {_CURE}"
    ]


def _used_up(problem: Problem, values: dict[str, Tensor], names: list[str]) -> tuple[float, Tensor]:
    """γ, and the squared residuals of all values in units of the learned noise (value,)."""
    model = problem.model
    with torch.random.fork_rng([]):  # iterating a loader advances the global state
        pairs = [(problem.x, problem.y)] if problem.loader is None else list(problem.one_pass())
    x, y = (torch.cat(part) for part in zip(*pairs))
    shapes = [values[name].shape for name in names]
    spread = torch.cat([_variance(model.priors[name], values[name]).reshape(-1).sqrt() for name in names])
    flat = torch.cat([values[name].reshape(-1) for name in names])
    loc, scale = model.likelihood.loc_scale(model.forward(values, x), values)
    loc, scale = loc.detach(), scale.detach()

    def mean(point: Tensor) -> Tensor:
        parts = point.split([shape.numel() for shape in shapes])
        weights = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}
        return model.forward(values | weights, x)[:, : y.shape[1]].reshape(-1)

    rows = torch.func.jacrev(mean, chunk_size=256)(flat).double()
    rows = rows * spread.double() / scale.reshape(-1, 1).double()
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    squares = ((y - loc) / scale).double().reshape(-1).square()
    return float((eigenvalues / (1.0 + eigenvalues)).sum()), squares


def _variance(prior: torch.distributions.Distribution, value: Tensor) -> Tensor:
    """The prior's variance; of heavy tails, and of a family that doesn't tell it, the square of the weight itself."""
    try:
        variance = prior.variance.to(value).expand(value.shape)
    except NotImplementedError:
        return value.square()
    return torch.where(torch.isfinite(variance), variance, value.square())
