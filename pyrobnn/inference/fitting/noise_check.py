"""Check of a noise that was optimised along with the weights: it may have followed the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pyro
import torch
from torch import Tensor

from pyrobnn.likelihoods import Likelihood
from pyrobnn.model import NET

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem

#: numbers in the Jacobian, and the side of the matrix that is decomposed, beyond which there is no check
MAX_JACOBIAN, MAX_SIDE = 2**27, 3000
#: how far below its unbiased estimate the noise variance may be, and the share of the data that weights may use up
FACTOR, SHARE = 2.0, 0.9
#: nats by which the log density of a datum may fall when it is left out, on average, where the net gives the noise
OPTIMISM = 1.0
#: how far the log of a left-out datum's noise is trusted to move, times √2
_FAR = 5.0
#: nats that a single left-out datum of another likelihood is trusted to lose
_MOST = 20.0
_CURE = (
    "give the noise a prior (HomoskedasticGaussian(dist.HalfNormal(1.0))) and infer it with NUTS or SVI, fix it, or "
    "stop early (callbacks.EarlyStopping on held-out data)"
)
_SMALLER = (
    "narrow the prior of the weights or take fewer of them, sample with NUTS, or stop early "
    "(callbacks.EarlyStopping on held-out data)"
)


def noise_notes(problem: Problem, values: Mapping[str, Tensor]) -> list[str]:
    r"""A note if the optimised noise is that of weights which follow the data point by point.

    Linearised at ``values``, with rows :math:`J_n / \sigma_n` and the prior's variances S,

    .. math:: \gamma = \operatorname{tr} K (K + I)^{-1}, \quad K = \Sigma^{-1/2} J S J^\top \Sigma^{-1/2}, \qquad
        \hat\sigma^2 = \frac{1}{N - \gamma} \sum_n r_n^2

    is the number of data that the weights use up and the unbiased estimate of the noise (MacKay, 1992). Maximum
    likelihood divides by N. The note is given where the learned variance is below half the unbiased one, or where γ is
    more than nine tenths of the data, so that what remains says nothing of the noise. A noise below what the residuals
    themselves ask for counts as theirs: it has not been found yet, which is another matter.

    Noise that comes from the net may collapse on some of the data while it is wide on the rest, and sums do not tell.
    There, and where the noise is not Gaussian, a note is given where leaving out a datum, to first order in the net's
    outputs, costs its log density more than a nat on average.

    Args:
        problem: what was fitted; no note unless it is a BNN whose noise (a scale, a concentration, a shape) is
            optimised, under a prior or not, or comes from the net. Of a likelihood whose Fisher information is not
            known, and of too many weights, the note is that nothing was checked.
        values: site → value of the fitted weights and noise; without a noise that has a distribution of its own.

    Reference: Bayesian Interpolation (MacKay, 1992).
    """
    if not problem.is_bnn or problem.bnn.likelihood.classes or problem.bnn.likelihood.surrogate:
        return []
    model, likelihood = problem.bnn, problem.bnn.likelihood
    if (
        not likelihood.points
        and likelihood.heads == 1
        and not any(name in values for name in likelihood.priors)
    ):
        return []
    names = [name for name in model.priors if name.startswith(NET) and name in values]
    num_weights = sum(values[name].numel() for name in names)
    num_values = problem.num_rows * likelihood.values(problem.y).shape[1]
    if 2 * num_weights < num_values:  # too few weights to use up half of the data
        return []
    num_rows = num_values * likelihood.heads
    if num_rows * num_weights > MAX_JACOBIAN or min(num_rows, num_weights) > MAX_SIDE:
        return [
            f"the noise is found with {num_weights} weights from {num_values} values: whether the weights follow the "
            f"data point by point was not checked, that many are too many; if in doubt, {_CURE}"
        ]
    values = {name: value.detach() for name, value in values.items()}
    if no_root(likelihood):
        return [
            f"the noise is found with {num_weights} weights from {num_values} values: whether the weights follow the "
            f"data point by point was not checked: {no_root(likelihood)}; if in doubt, {_SMALLER}"
        ]
    if not likelihood.normal:
        return _told(_left_out(problem, values, names), "spread", _SMALLER)
    rows, residuals = _linearised(problem, values, names)
    num_values = residuals.numel()
    used = _used_up(rows[:, : residuals.shape[1]].flatten(0, 1))
    left = max(num_values - used, 0.0)
    if min(float(residuals.square().sum()), num_values) > FACTOR * left or used > SHARE * num_values:
        return [
            f"the weights use up {used:.1f} of {num_values} training values, so that the noise found with them is that "
            f"of points already seen and far too small for new ones: {_CURE}"
        ]
    return _told(_optimism(rows, residuals), "net's noise", _CURE) if likelihood.heads == 2 else []


def no_root(likelihood: Likelihood) -> str | None:
    """Why the leverage of a row is not known under this likelihood; None where it is."""
    if likelihood.normal or type(likelihood).fisher_root is not Likelihood.fisher_root:
        return None
    return f"{type(likelihood).__name__} has no fisher_root, which tells what each row says"


def _told(lost: float, noise: str, cure: str) -> list[str]:
    if lost <= OPTIMISM:
        return []
    return [
        f"left out of the fit, a training value would lose {lost:.2g} nats of log density on average: the {noise} "
        f"follows single points and is far too small for new ones: {cure}"
    ]


def _linearised(problem: Problem, values: dict[str, Tensor], names: list[str]) -> tuple[Tensor, Tensor]:
    """Rows (datum, head, weight) of the net's outputs, and residuals (datum, output), in units of the learned noise.

    A weight counts in widths of its prior. Heads are the means over σ and, where the net gives the noise, √2 log σ: the
    Fisher information of each is one.
    """
    model = problem.bnn
    x, y = _data(problem)
    loc, scale = (part.detach() for part in model.likelihood.loc_scale(model.forward(values, x), values))

    def heads(f: Tensor) -> Tensor:
        mean, width = model.likelihood.loc_scale(f, values)
        given = [math.sqrt(2) * width.log()] if model.likelihood.heads == 2 else []
        return torch.cat([mean / scale, *given], -1)

    return _rows(problem, x, values, names, heads), ((y - loc) / scale).double()


def _data(problem: Problem) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng([]):  # iterating a loader advances the global state
        pairs = [(problem.x, problem.y)] if problem.loader is None else list(problem.one_pass())
    x, y = (torch.cat(part) for part in zip(*pairs))
    return x, y


def _rows(
    problem: Problem,
    x: Tensor,
    values: dict[str, Tensor],
    names: list[str],
    heads: Callable[[Tensor], Tensor],
) -> Tensor:
    """Derivatives (datum, head, weight) of what ``heads`` makes of the outputs; a weight counts in prior widths."""
    model = problem.bnn
    shapes = [values[name].shape for name in names]
    spread = torch.cat(
        [prior_variance(model.priors[name], values[name]).reshape(-1).sqrt() for name in names]
    )
    flat = torch.cat([values[name].reshape(-1) for name in names])

    def of_weights(point: Tensor) -> Tensor:
        parts = point.split([shape.numel() for shape in shapes])
        weights = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}
        return heads(model.forward(values | weights, x)).reshape(-1)

    rows = torch.func.jacrev(of_weights, chunk_size=256)(flat).double() * spread.double()
    return rows.reshape(len(x), -1, len(flat))


def _left_out(problem: Problem, values: dict[str, Tensor], names: list[str]) -> float:
    r"""Mean loss of log density of a left-out datum, in nats, of any likelihood whose Fisher information is known.

    With a root :math:`S_n S_n^\top` of the information, the outputs move by :math:`-S_n^{-\top} ((I - H_n)^{-1} - I)
    S_n^{-1} g_n`, as of :func:`_optimism`.
    """
    x, y = _data(problem)
    likelihood = problem.bnn.likelihood
    f = problem.bnn.forward(values, x).detach()
    root = likelihood.curvature_root(f, y, values).detach()
    rows = _rows(problem, x, values, names, lambda outputs: torch.einsum("nwk,nw->nk", root, outputs))
    f, y = f.double(), y.double()
    own = {name: value.double() for name, value in values.items()}

    def log_prob(outputs: Tensor) -> Tensor:
        return likelihood.log_prob(outputs, y, own)

    with pyro.validation_enabled(False):
        slope = torch.func.grad(lambda outputs: log_prob(outputs).sum())(f)
        inverse = torch.linalg.pinv(root.double())
        pull = (inverse @ slope.unsqueeze(-1)).squeeze(-1)
        # of variance one at most where the data are as the likelihood has them: more is a search that is unfinished
        moved = _moved(rows, pull / pull.square().mean().sqrt().clamp_min(1.0))
        shift = (inverse.mT @ moved.unsqueeze(-1)).squeeze(-1)
        lost = log_prob(f) - log_prob(f - shift)
    return float(lost.nan_to_num(nan=_MOST, posinf=_MOST).clamp_max(_MOST).mean())


def _used_up(rows: Tensor) -> float:
    """γ of the rows (value, weight)."""
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    return float((eigenvalues / (1.0 + eigenvalues)).sum())


def _optimism(rows: Tensor, residuals: Tensor) -> float:
    r"""Mean loss of log density of a left-out datum, in nats.

    Without datum n its outputs move by :math:`-H_n (I - H_n)^{-1} g_n`, with the gradient :math:`g_n` of its log
    density and its block :math:`H_n` of :math:`K (K + I)^{-1}`.

    Reference: A scalable estimate of the out-of-sample prediction error via approximate leave-one-out cross-validation
    (Rad & Maleki, 2020).
    """
    slope = torch.cat([residuals, (residuals.square() - 1) / math.sqrt(2)], 1)
    moved = _moved(rows, slope)
    shift, log_scale = moved.chunk(2, 1)
    log_scale = -log_scale.clamp(-_FAR, _FAR) / math.sqrt(2)
    kept = -0.5 * residuals.square()
    lost = kept + 0.5 * ((residuals + shift) * (-log_scale).exp()).square() + log_scale
    return float(lost.sum(1).mean())


def _moved(rows: Tensor, slope: Tensor) -> Tensor:
    """:math:`((I - H_n)^{-1} - I) g_n` (datum, head) of the gradients ``slope``, from rows (datum, head, weight)."""
    return torch.linalg.solve(left_to_others(rows), slope.unsqueeze(-1)).squeeze(-1) - slope


def left_to_others(rows: Tensor, share: float = 1.0) -> Tensor:
    """:math:`I - H_n` (datum, head, head), from rows (datum, head, weight) that are a ``share`` of all like them."""
    num_data, width, num_weights = rows.shape
    flat, eye = rows.flatten(0, 1), torch.eye(width).to(rows)
    if len(flat) <= num_weights:
        factor = torch.linalg.cholesky(flat @ flat.T + share * torch.eye(len(flat)).to(rows))
        whole = torch.cholesky_inverse(factor).reshape(num_data, width, num_data, width)
        rest = (1 - share) * eye + share**2 * torch.einsum("nanb->nab", whole)
    else:
        factor = torch.linalg.cholesky(flat.T @ flat / share + torch.eye(num_weights).to(rows))
        basis = torch.linalg.solve_triangular(factor, flat.T, upper=False).T.reshape(num_data, width, -1)
        rest = eye - basis @ basis.mT
    # what float64 does not tell from one leaves that much of the datum to the others
    return rest + torch.finfo(rest.dtype).eps * eye


def prior_variance(prior: torch.distributions.Distribution, value: Tensor) -> Tensor:
    """The prior's variance; of heavy tails, and of a family that doesn't tell it, the square of the weight itself."""
    try:
        variance = prior.variance.to(value).expand(value.shape)
    except NotImplementedError:
        return value.square()
    return torch.where(torch.isfinite(variance), variance, value.square())
