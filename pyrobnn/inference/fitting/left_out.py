"""Check of the draws: whether their intervals would still hold the training values, had these been left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyro
import torch
from torch import Tensor

from pyrobnn.gradient import at_each
from pyrobnn.inference.fitting.noise_check import left_to_others, no_root, prior_variance
from pyrobnn.inference.optim.descent import descend
from pyrobnn.likelihoods import Likelihood
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior
from pyrobnn.seeding import generator

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.problem import Problem

#: what a note begins with, and what of a posterior it is about
SAID, PROBABILITIES = "90 % intervals", "class probabilities"
LEVEL = 0.9
#: how many times as many values as it should an interval misses before it is told, beyond so many standard errors
TWICE, ERRORS = 2.0, 1.64
#: rows below which a share of them says too little, and the most that are looked at; numbers in their Jacobian
FEW, MOST, MOST_SCALARS = 50, 1000, 2**24
#: draws, evenly spaced, that stand for all; iterations of each search that sees other noise
DRAWS, STEPS = 100, 100
#: by how much the most probable class may be less probable than it is right
MODEST = 0.1
#: the least of a value's information that is thought to be its own
OWN = 0.02
_CURE = (
    "compare with NUTS or with method='auto' of pyrobnn.BNNRegressor, take fewer weights or a narrower prior, or make "
    "the intervals conformal with rows held out (pyrobnn.conformal_interval(..., calibration=...))"
)


@dataclass(frozen=True, eq=False)
class _Draws:
    """A spread of the draws at a spread of the rows.

    Attributes: ``x``, ``y`` of the rows; ``f`` (draw, row, width) and its mean ``centre``; ``params`` of the
    likelihood by draw, and their mean ``own``; ``weights``, those whose function is closest to that mean; ``share`` of
    the rows.
    """

    x: Tensor
    y: Tensor
    f: Tensor
    centre: Tensor
    params: dict[str, Tensor]
    own: dict[str, Tensor]
    weights: dict[str, Tensor]
    share: float


def left_out_notes(problem: Problem, posterior: Posterior) -> list[str]:
    r"""A note if intervals miss training values that are left out at least twice as often as they should.

    Around the draws' mean function f, with a root :math:`S_n S_n^\top` of the Fisher information of a row, the Jacobian
    J and the prior's variances, the leverage :math:`H_n` is the n-th block of
    :math:`K (K + I)^{-1}, K = S^\top J \Sigma J^\top S`. Without row n, to first order,

    .. math:: f_n \to f_n - S_n^{-\top} \left((I - H_n)^{-1} - I\right) S_n^{-1} \nabla_f \log p(y_n \mid f_n), \qquad
        \mathrm{cov}_n \to S_n^{-\top} (I - H_n)^{-1/2} S_n^\top \, \mathrm{cov}_n \, S_n (I - H_n)^{-1/2} S_n^{-1}

    which is what an honest posterior does; one whose draws are too narrow moves as far and widens too little. A net
    also finds features for its noise, which no linear model does. So where these intervals hold less than they should
    and the response is normal, the mode is sought twice again, with the learned noise added to the targets and taken
    off them, and the leverages are raised to the degrees of freedom that the answer shows.

    What was found is kept in words in ``posterior.meta["left_out"]``, also where nothing could be checked.

    References: A scalable estimate of the out-of-sample prediction error via approximate leave-one-out cross-validation
    (Rad & Maleki, 2020); On measuring and correcting the effects of data mining and model selection (Ye, 1998).
    """
    if not problem.is_bnn:
        return []
    if posterior.meta["kind"] == "point":
        what = PROBABILITIES if posterior.bnn.likelihood.classes else SAID
        posterior.meta["left_out"] = f"{what} were not checked: a point has no draws"
        return []
    if posterior.bnn.likelihood.classes:
        return _modest(problem, posterior)
    unknown = no_root(posterior.bnn.likelihood)
    reason = _unchecked(problem, posterior) or unknown
    if reason is None:
        try:
            held, most, num = _checked(problem, posterior)
        except (RuntimeError, NotImplementedError) as error:  # a net that torch.func cannot take row by row
            reason = str(error).partition("\n")[0]
    if reason is not None:
        said = posterior.meta["left_out"] = f"{SAID} were not checked: {reason}"
        return [said] if unknown else []
    part = f"{num:,}" + ("" if num == problem.num_rows else f" of {problem.num_rows:,}")
    said = f"{SAID} hold {held:.0%} of {part} training values that are left out of the fit, by approximation"
    posterior.meta["left_out"] = said
    narrow = most < 1 - TWICE * (1 - LEVEL)
    return [f"{said}: they are too narrow for new ones: {_CURE}"] if narrow else []


def _modest(problem: Problem, posterior: Posterior) -> list[str]:
    """A note if a Gaussian of logits knows left-out labels far better than it says: they only grow where data agree."""
    likelihood, reason = posterior.bnn.likelihood, _unchecked(problem, posterior)
    if posterior.network is None or not likelihood.labels:
        reason = "only those that a linearised Laplace gives to single labels are"
    if reason is not None:
        posterior.meta["left_out"] = f"{PROBABILITIES} were not checked: {reason}"
        return []
    try:
        draws = _spread_of(problem, posterior)
        rest = left_to_others(_rows(posterior.bnn, draws), draws.share)
        probs = likelihood.probs(_unseen(posterior, draws, rest), draws.params).mean(0)
    except (RuntimeError, NotImplementedError) as error:
        posterior.meta["left_out"] = f"{PROBABILITIES} were not checked: {str(error).partition(chr(10))[0]}"
        return []
    sure, label = probs.max(-1)
    right, num = float((label == draws.y).double().mean()), len(label)
    least = right - ERRORS * math.sqrt(right * (1 - right) / num) - float(sure.mean())
    said = posterior.meta["left_out"] = (
        f"of {num:,} training labels that are left out of the fit, by approximation, {right:.0%} are known, and the "
        f"most probable class has {float(sure.mean()):.0%}"
    )
    if least < MODEST:
        return []
    return [
        f"the probabilities are too modest: {said}: classes that can be told apart want weights that no Gaussian "
        "reaches; use NUTS or an ensemble where the probabilities matter"
    ]


def _checked(problem: Problem, posterior: Posterior) -> tuple[float, float, int]:
    """Share of left-out values that intervals hold, the most that it may be of others, and the rows looked at."""
    model, draws = posterior.bnn, _spread_of(problem, posterior)
    rows = _rows(model, draws)
    rest = left_to_others(rows, draws.share)
    # errors of rows that share their weights are not independent: so many are
    free = max(1.0, float(rest.diagonal(dim1=1, dim2=2).mean(1).sum()))
    held = _held(posterior, draws, rest)
    # a sampler's mean function is that of no mode, and that of a linear model answers as its leverages say
    searched = posterior.meta["kind"] != "chains" and posterior.network is None
    bent = searched and model.likelihood.normal and draws.share == 1
    if bent and _bound(held, free) < LEVEL:
        held = min(held, _held(posterior, draws, _raised(rest, _bend(model, draws, rows))))
    return held, _bound(held, free), len(draws.x)


def _bound(held: float, num: float) -> float:
    """The share that may hold of others, from that of ``num`` independent ones."""
    return held + ERRORS * math.sqrt(held * (1 - held) / num)


def _unchecked(problem: Problem, posterior: Posterior) -> str | None:
    """Why there is no check; None where there is one."""
    model = posterior.bnn
    likelihood = model.likelihood
    if problem.loader is not None:
        return "the data are streamed"
    if likelihood.surrogate or type(likelihood).cdf is Likelihood.cdf:
        return f"the distribution function of {type(likelihood).__name__} is not known"
    if model.stochastic_layers():
        return "the net has layers that depend on the batch"
    if _rows_seen(problem, model) < FEW:
        return f"{problem.num_rows:,} rows are too few, or {model.num_weights:,} weights too many"
    return None


def _rows_seen(problem: Problem, model: BNN) -> int:
    return min(problem.num_rows, MOST, MOST_SCALARS // model.num_weights)


def _spread_of(problem: Problem, posterior: Posterior) -> _Draws:
    model, likelihood = posterior.bnn, posterior.bnn.likelihood
    keep = torch.linspace(0, problem.num_rows - 1, _rows_seen(problem, model)).round().long()
    x, y = problem.x[keep.to(problem.device)], problem.y[keep.to(problem.device)]
    draws = posterior.thin(max(1, DRAWS // posterior.num_chains)).stacked()
    weights = {name: value for name, value in draws.items() if name.startswith(NET)}
    with torch.no_grad():
        forward = posterior.network or model.forward
        f = at_each(lambda one: forward(one, x), weights).double()
        centre = f.mean(0)
        mean = {name: value.mean(0) for name, value in weights.items()}
        if (
            posterior.network is not None
        ):  # a linear one, around the mode that all of its draws are needed to tell
            mean = {name: posterior.draws[name].mean((0, 1)) for name in weights}
        far = (f - centre).square().sum((1, 2))
        # where draws gather around one mode, their mean is it; of several modes it is a net that nobody has seen
        best = int(far.argmin())
        off = float((model.forward(mean, x) - centre).square().sum())
        if posterior.network is None and off > float(far[best]):
            mean = {name: value[best] for name, value in weights.items()}
    known = (*likelihood.priors, *likelihood.points)
    params = {name: value.double() for name, value in draws.items() if name in known}
    own = {name: value.mean(0) for name, value in params.items()}
    return _Draws(
        x, y.double() if y.is_floating_point() else y, f, centre, params, own, mean, len(x) / problem.num_rows
    )


def _root(model: BNN, draws: _Draws) -> Tensor:
    with torch.no_grad():
        return model.likelihood.curvature_root(draws.centre, draws.y, draws.own).double()


def _rows(model: BNN, draws: _Draws) -> Tensor:
    """:math:`S_n^\\top J_n \\Sigma^{1/2}`, (row, column of the root, weight)."""
    names = [name for name in draws.weights if name in model.priors]
    shapes = [draws.weights[name].shape for name in names]
    flat = torch.cat([draws.weights[name].reshape(-1) for name in names])
    spread = _prior_scale(model, draws, names)

    def outputs(point: Tensor, row: Tensor) -> Tensor:
        parts = point.split([shape.numel() for shape in shapes])
        weights = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}
        return model.forward(draws.weights | weights, row.unsqueeze(0)).squeeze(0)

    def one(row: Tensor, columns: Tensor) -> Tensor:
        pull = torch.func.vjp(lambda point: outputs(point, row), flat)[1]
        return torch.func.vmap(lambda v: pull(v)[0])(columns.T)

    rows = at_each(one, draws.x, _root(model, draws).to(flat)).detach().double()
    return rows * spread.double()


def _prior_scale(model: BNN, draws: _Draws, names: list[str]) -> Tensor:
    parts = [prior_variance(model.priors[name], draws.weights[name]).reshape(-1).sqrt() for name in names]
    return torch.cat(parts)


def _held(posterior: Posterior, draws: _Draws, rest: Tensor) -> float:
    """Share of the values that their left-out intervals hold; of a value that is known in part, that part."""
    with pyro.validation_enabled(False):
        unseen = _unseen(posterior, draws, rest)
        below, upto = posterior.bnn.likelihood.cdf(unseen, draws.y, draws.params)
    low, high = below.mean(0), upto.mean(0)
    edge = (1 - LEVEL) / 2
    inside = (high.clamp_max(1 - edge) - low.clamp_min(edge)).clamp_min(0.0)
    sure = ((low >= edge) & (low <= 1 - edge)).double()
    return float(torch.where(high - low > 1e-12, inside / (high - low), sure).nan_to_num().mean())


def _unseen(posterior: Posterior, draws: _Draws, rest: Tensor) -> Tensor:
    """Outputs (draw, row, width) of each row as if it had been left out."""
    likelihood, root = posterior.bnn.likelihood, _root(posterior.bnn, draws)
    inverse = torch.linalg.pinv(root)
    with pyro.validation_enabled(False):
        slope = torch.func.grad(lambda f: likelihood.log_prob(f, draws.y, draws.own).sum())(draws.centre)
        pull = inverse @ slope.unsqueeze(-1)
        shift = (inverse.mT @ (torch.linalg.solve(rest, pull) - pull)).squeeze(-1)
        values, vectors = torch.linalg.eigh(rest)
        wider = inverse.mT @ vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT @ root.mT
        deviation = torch.einsum("nvw,snw->snv", wider, draws.f - draws.centre)
    return draws.centre - shift + deviation


def _raised(rest: Tensor, factor: float) -> Tensor:
    """:math:`I - H_n` of leverages that are ``factor`` times as large."""
    values, vectors = torch.linalg.eigh(rest)
    return vectors @ torch.diag_embed((1 - factor * (1 - values)).clamp_min(OWN)) @ vectors.mT


def _bend(model: BNN, draws: _Draws, rows: Tensor) -> float:
    """How many times more a mode answers to targets that move by the noise than the linear model does; at least one."""
    likelihood = model.likelihood
    names = [name for name in draws.weights if name in model.priors]
    shapes = [draws.weights[name].shape for name in names]
    scale = _prior_scale(model, draws, names)
    own = {name: value.to(draws.x) for name, value in draws.own.items()}
    with torch.no_grad():
        noise = likelihood.loc_scale(draws.centre.to(draws.x), own)[1].expand(draws.y.shape)
    signs = torch.randint(2, draws.y.shape, generator=generator(0)).to(noise) * 2 - 1
    moved = signs * noise

    def weights(z: Tensor) -> dict[str, Tensor]:
        parts = (z * scale).split([shape.numel() for shape in shapes])
        return draws.weights | {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes)}

    def answer(target: Tensor) -> Tensor:
        def loss(z: Tensor) -> Tensor:
            values = weights(z)
            prior = sum(model.priors[name].log_prob(values[name]).sum() for name in names)
            return -likelihood.log_prob(model.forward(values, draws.x), target, own).sum() - prior

        start = torch.cat([draws.weights[name].reshape(-1) for name in names]) / scale
        with pyro.validation_enabled(False):
            found = descend(torch.func.grad_and_value(loss), start, STEPS)[0]
        with torch.no_grad():
            return likelihood.loc_scale(model.forward(weights(found), draws.x), own)[0]

    y = draws.y.to(moved)
    found = float(((answer(y + moved) - answer(y - moved)) * signs / noise).sum() / 2)
    # the heads of the mean come first
    probe = torch.zeros(rows.shape[:2]).to(rows)
    probe[:, : signs.shape[1]] = signs
    flat, probe = rows.flatten(0, 1), probe.reshape(-1)
    inner = flat @ flat.T + torch.eye(len(flat)).to(flat)
    linear = float(probe @ probe - probe @ torch.linalg.solve(inner, probe))
    return max(1.0, found / linear)
