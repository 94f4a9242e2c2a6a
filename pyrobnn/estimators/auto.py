"""``method="auto"``: a method that suits the size of the data and of the net, and why, in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor
from torch.distributions import Normal

from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.curvature.prior import elementwise
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.map import MAP
from pyrobnn.inference.method import METHODS
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.svi import SVI
from pyrobnn.likelihoods import HeteroskedasticGaussian, HomoskedasticGaussian, Likelihood, StudentT
from pyrobnn.likelihoods.base import SCALE
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior

#: weights up to which a full precision matrix is factorised in seconds
MOST_FULL = 3000
#: rows up to which every step of an optimiser sees all of them, and a pass over them for each draw costs little; at
#: 10,000 mini-batches found a better mode in a fifth of the time
MOST_WHOLE = 2000
#: rows up to which chains are done in seconds and a Gaussian with one noise does not do: of 12 rows its 90 % intervals
#: held 78 % of new ones on average, of 5 rows 70 %; and rows up to which chains are done in minutes
FEW, MOST_SAMPLED = 50, 1000
BATCH, STEPS, SVI_STEPS = 1000, 3000, 10_000
#: rows per weight from which noise that is maximised with the weights comes out right (on a weak signal, 90 % intervals
#: held 73, 82 and 88 % at 2, 4 and 8), and rows up to which several fits are done in minutes
ENOUGH, MOST_TRIED = 10, 20_000
#: noise as a share of what a linear model leaves: downwards, each 0.7 of the one before
SHARES = tuple(0.7**step for step in range(13))
#: rounds at most in which the outputs' noises go apart, and nats of evidence that one must gain for another
ROUNDS, GAIN = 4, 1.0
#: the least noise, as a share of the target's standard deviation
LEAST = 1e-4


def choose(
    num_data: int,
    num_weights: int,
    width: int,
    *,
    weighted: bool = False,
    normal: bool = True,
    joint: bool = False,
    compile: bool = True,
) -> tuple[Any, str]:
    """A configured method, and why it.

    Args:
        num_data: rows N.
        num_weights: scalar parameters of the net.
        width: of the net's output.
        weighted: whether rows have weights that are no whole numbers.
        normal: whether the weights have normal priors, whose width can be tuned.
        joint: whether the elements of a weight depend on each other under its prior, which no diagonal holds.
        compile: the method's option.

    Returns:
        The method, and a sentence.
    """
    size = f"{num_data:,} rows, {num_weights:,} weights"
    whole = num_data <= MOST_WHOLE
    if weighted or joint or num_data <= FEW:
        if weighted:
            size += ", each row with a weight of its own"
        elif joint:
            size += ", a prior of weights that depend on each other"
        if num_data <= MOST_SAMPLED:
            return NUTS(compile=compile), f"{size}: NUTS, which samples that posterior itself"
        svi = SVI(
            local_reparameterization=True,
            batch_size=None if whole else BATCH,
            num_steps=SVI_STEPS,
            compile=compile,
        )
        return svi, f"{size}: mean-field SVI, whose variances are too small where weights correlate"
    # the Gram matrix of the rows stands for that of the weights where it is the smaller
    full = min(num_weights, num_data * width) <= MOST_FULL
    search = MAP(compile=compile) if whole else MAP(num_steps=STEPS, batch_size=BATCH, compile=compile)
    tune: Literal["marginal_likelihood"] | None = "marginal_likelihood" if normal else None
    method = Laplace(structure="full" if full else "kron", tune=tune, map=search, importance=whole)
    words = [f"Laplace's approximation, linearised, {_width(normal)}"]
    if not full:
        words.append("its precision one Kronecker product per layer, for a full one would be too large")
    if not whole:
        words.append(
            f"its mode found with mini-batches of {BATCH:,} rows and few passes over all, and k-hat left out"
        )
    if num_data <= MOST_SAMPLED:
        words.append("method='nuts' samples the posterior itself, in minutes")
    return method, f"{size}: {'; '.join(words)}"


def named(name: str, *, normal: bool, compile: bool) -> tuple[Any, str, dict[str, Any]]:
    """The method of that name with its settings of a full run, why it, and the options of its ``fit``.

    Args:
        normal, compile: as of :func:`choose`.
    """
    known = METHODS[name]
    settings = dict(known.full)
    words = f"{known.cls.__name__}, as it was asked for by name"
    options = {"num_draws": settings.pop("num_draws")} if "num_draws" in settings else {}
    if "tune" in settings:
        words += f", {_width(normal)}"
        if not normal:
            del settings["tune"]
    if not compile:
        settings["compile"] = False
    return known.cls(**settings), words, options


def _width(normal: bool) -> str:
    how = "tuned by the marginal likelihood" if normal else "as declared: it is not normal"
    return f"its prior's width {how}"


def families(model: BNN) -> dict[str, bool]:
    """Of the priors of the net's weights, what :func:`choose` asks: ``normal`` and ``joint``."""
    priors = [elementwise(prior) for name, prior in model.priors.items() if name.startswith(NET)]
    return {
        "normal": all(isinstance(prior, Normal) for prior in priors),
        "joint": any(prior.event_shape for prior in priors),
    }


def tries_noises(method: Any, likelihood: Likelihood, num_data: int, num_weights: int) -> bool:
    """Whether the noise is better found with the weights averaged out than together with them.

    Warns:
        UserWarning: it is, and the data are too many for several fits, or the likelihood is none whose noise is known
            to be found so.
    """
    free = bool(likelihood.priors or likelihood.points or likelihood.heads > 1)
    if not isinstance(method, Laplace) or not free or likelihood.labels or num_data >= ENOUGH * num_weights:
        return False
    found = type(likelihood) is HeteroskedasticGaussian or (
        type(likelihood) in (HomoskedasticGaussian, StudentT) and likelihood.how("scale") != "fixed"
    )
    if num_data > MOST_TRIED or not found:
        many = "many for several fits" if found else f"{type(likelihood).__name__} has a spread of its own"
        warnings.warn(
            f"{num_data:,} rows are few for {num_weights:,} weights and {many}: the noise is maximised "
            "with the weights and may come out too small, and the intervals too narrow. Use a smaller net, or "
            "predict_interval(X, conformal=(X, y)) with rows held out",
            UserWarning,
            stacklevel=4,
        )
    return found and num_data <= MOST_TRIED


def with_scale(likelihood: Likelihood, scale: Tensor) -> Likelihood:
    """A copy of the likelihood whose ``scale`` is known, () or (out,), in the units in which the net computes."""
    known = likelihood.like(scale)
    known.priors = {name: prior for name, prior in known.priors.items() if name != SCALE}
    known.points = {name: value for name, value in known.points.items() if name != SCALE}
    known.declare("scale", scale)
    return known


def by_evidence(
    method: Laplace,
    model_of: Callable[[Tensor], BNN],
    x: Tensor,
    y: Tensor,
    options: dict[str, Any],
    log_prior: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Posterior, str]:
    """The fit whose fixed noise has the largest evidence, and that noise in words.

    Weights and noise that are maximised together fit the noise where there are few rows per weight: it comes out too
    small, and the intervals too narrow. The evidence of the weights given the noise has a maximum. The noise
    goes down from what a Bayesian linear regression leaves until the evidence has fallen twice in a row, and up from
    there where that was the best and the prior, which is not tuned, may be too narrow for any line. Of several outputs
    a line may leave of one what a net explains and of another nothing but noise: from the best each goes where its own
    residuals ask for, as long as the evidence rises.

    Args:
        method: with a ``log_evidence``.
        model_of: noise (out,), in the units in which the net computes → model.
        x, y: (N, feature) and (N, out), in the units of the data.
        options: of ``method.fit``.
        log_prior: of the noise, where it has one.

    Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
    """
    linear = left_by_a_line(model_of(torch.ones(y.shape[1], dtype=y.dtype)), x, y)
    fits: list[tuple[float, Tensor, Posterior]] = []

    def attempt(share: Tensor) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # those of the one that is kept are told below
            posterior = method.fit(model_of(share * linear), x, y, **options)
        evidence = -math.inf if posterior.log_evidence is None else posterior.log_evidence
        if log_prior is not None:
            evidence += float(log_prior(share * linear))
        fits.append((evidence, share, posterior))
        return evidence

    def best() -> tuple[float, Tensor, Posterior]:
        return max(fits, key=lambda each: (each[0], float(each[1].max())))

    def follow(shares: Iterable[float]) -> None:
        for share in shares:
            attempt(torch.full_like(linear, share))
            if len(fits) > 2 and max(each[0] for each in fits[-2:]) < best()[0]:
                break

    follow(SHARES)
    if method.tune is None and bool((best()[1] == 1).all()):
        follow(1 / share for share in SHARES[1:])
    for _ in range(ROUNDS if len(linear) > 1 else 0):
        evidence, share, posterior = best()
        if attempt((share * _asked_for(posterior, x, y)).clamp_min(LEAST)) < evidence + GAIN:
            break
    _, share, posterior = best()
    for note in posterior.meta["warnings"]:
        warnings.warn(note, UserWarning, stacklevel=4)
    shares = ", ".join(f"{each:.2g}" for each in (share[:1] if bool((share == share[0]).all()) else share))
    words = f"noise {shares} of what a linear model leaves, the best of {len(fits)} by the evidence"
    return posterior, words


def _asked_for(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    r"""The factor on the noise of each output (out,) that its residuals ask for.

    .. math:: \frac{1}{N - \gamma} \sum_n (y_n - f_n) \, \frac{\partial \log p(y_n \mid f_n)}{\partial f_n}

    is its square, which is :math:`\sum_n r_n^2 / (\sigma^2 (N - \gamma))` where y is normal; γ is the sum over rows of
    the variance of f times the Fisher information, the number of values that the weights use up.
    """
    model, likelihood = posterior.bnn, posterior.bnn.likelihood
    if model.standardizer is not None:
        x, y = model.standardizer.transform_x(x), model.standardizer.transform_y(y)
    x, y = x.to(model.device), y.to(model.device)
    known = (*likelihood.priors, *likelihood.points)
    own = {name: value.mean((0, 1)) for name, value in posterior.draws.items() if name in known}
    f, cov = (part.detach().to(y) for part in cast(Linearized, posterior.network).output_moments(x))
    slope = torch.func.grad(lambda f: likelihood.log_prob(f, y, own).sum())(f)
    information = likelihood.curvature_root(f, y, own).square().sum(-1)
    used = (cov.diagonal(dim1=1, dim2=2) * information).sum(0)
    left = (len(y) - used).clamp_min(0.1 * len(y))
    return (((y - f) * slope).sum(0) / left).clamp_min(LEAST**2).sqrt().cpu()


def left_by_a_line(model: BNN, x: Tensor, y: Tensor) -> Tensor:
    """Standard deviation (out,) of what a Bayesian linear regression leaves of each target, in the model's units."""
    if model.standardizer is not None:
        x, y = model.standardizer.transform_x(x), model.standardizer.transform_y(y)
    inputs = x.flatten(1).numpy()
    found = [BayesianRidge().fit(inputs, column.numpy()).alpha_ ** -0.5 for column in y.T]
    return torch.tensor(found, dtype=y.dtype).clamp_min(LEAST * y.std(0).clamp_min(1e-12))
