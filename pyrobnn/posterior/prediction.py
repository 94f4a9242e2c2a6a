"""Prediction: what the posterior says about new inputs, with its uncertainty split in two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from statistics import NormalDist
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor, check_count
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import drawn, generator
from pyrobnn.model import BNN
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.catalogue import Categorical
from pyrobnn.model.likelihoods.dense import DenseCategorical
from pyrobnn.model.output_shape import check_positions, target_shape
from pyrobnn.posterior.mixture_quantiles import where_reached

#: scalars of the largest intermediate that prediction keeps at once, about 64 MiB of float32
CHUNK_SCALARS = 2**24
#: numbers in a layer of one draw from which on a CPU is quicker draw by draw: the convolutions of several draws at once
#: are one in groups, which its libraries do slowly
LARGE_LAYER = 2**18
#: scalars of float64 that fit in the cache of a core
_CACHED_SCALARS = 2**17
#: exact mean and variance of the function, both (point, out)
Moments: TypeAlias = tuple[Tensor, Tensor]


class Prediction:
    r"""The posterior predictive distribution at some inputs: a mixture with one component per posterior draw.

    .. math:: p(y \mid x) = \frac{1}{S} \sum_s p(y \mid f_s(x), \theta_s)

    Args:
        standard_f: network outputs (chain, draw, point, width) in the units of the program; a draw is one function,
            coherent across points.
        likelihood: the likelihood of the model.
        params: draws of the likelihood's own parameters, site → (chain, draw, \*shape).
        moments: exact mean and variance of the function, both (point, out), where the method knows them in closed form
            (linearised Laplace); they replace the draws' in ``mean`` and ``epistemic_var``.
        y_mean, y_scale: units: targets were fitted as (y − y_mean) / y_scale; all but ``standard_f`` is in the units
            of y, and in the wider of the two floating types.
        output_shape: the shape of the net's output for a row, (channel, height, width) say, where it has positions:
            they are columns here, and :meth:`shaped` gives them their shape back.

    Attributes: ``f`` (chain, draw, point, out), the mean of y under every draw for numbers, (chain, draw, point,
    class) the logits for classes; ``standard_f``, the network's raw output, in standard units where the model
    has a standardizer and with the noise head of a heteroskedastic net; for numbers ``mean``, ``aleatoric_var``,
    ``epistemic_var``, ``var``, all (point, out), with
    :math:`\mathrm{var} = E_s[\sigma_s^2] + \mathrm{Var}_s[\mu_s]` (law of total variance); for classes
    ``probs`` (point, class), and in nats ``aleatoric_entropy``, ``epistemic_entropy`` (mutual information) and
    their sum ``entropy``, all (point,); of labels of positions (point, position, class) and (point, position).

    ``log_prob``, ``quantile`` and ``sample`` are those of the mixture of draws. So are ``mean`` and ``var``, unless
    there are exact ``moments``: the mixture then agrees with them up to the Monte-Carlo error of its draws.
    """

    def __init__(
        self,
        standard_f: Tensor,
        likelihood: Likelihood,
        params: Mapping[str, Tensor],
        *,
        moments: tuple[Tensor, Tensor] | None = None,
        y_mean: float | Tensor = 0.0,
        y_scale: float | Tensor = 1.0,
        output_shape: Sequence[int] = (),
    ):
        sites = likelihood.own.priors | likelihood.own.points
        self.standard_f = standard_f
        self.likelihood = likelihood
        self.task = likelihood.task
        self.params = {name: value for name, value in params.items() if name in sites}
        self._moments = moments
        self.output_shape = tuple(output_shape)
        # numbers of the data's own type: float32 has no room for a mean of 1e8 and a spread of 1
        self._y_mean = _unit(y_mean, standard_f.device)
        self._y_scale = _unit(y_scale, standard_f.device)

    @property
    def f(self) -> Tensor:
        """Every draw's function: the mean of y (chain, draw, point, out) in its units, or logits (…, class)."""
        return self.standard_f if self.likelihood.targets.classes else self.loc

    @cached_property
    def loc(self) -> Tensor:
        """Mean of y under every draw, (chain, draw, point, out)."""
        return self._in_y(self._mean_variance[0])

    @cached_property
    def scale(self) -> Tensor:
        """Standard deviation of y under every draw, (chain, draw, point, out)."""
        return self._mean_variance[1].sqrt() * self._y_scale

    @cached_property
    def _mean_variance(self) -> tuple[Tensor, Tensor]:
        self._require_kind(classes=False)
        return self.likelihood.mean_variance(self.standard_f, self.params)

    def _in_y(self, values: Tensor) -> Tensor:
        return values * self._y_scale + self._y_mean

    @property
    def mean(self) -> Tensor:
        """Predictive mean (point, out); for Bernoulli the probability of 1."""
        if self.task == "bernoulli":
            return self.probs
        self._require_kind(classes=False)
        if self._moments is not None and self.likelihood.targets.linear_mean:
            return self._in_y(self._moments[0])
        return _mean(self.loc)

    @property
    def aleatoric_var(self) -> Tensor:
        """Expected variance of y given the function, E[σ²] (point, out); infinite where that of a draw is."""
        return _mean(self.scale.double().square()).to(self.f.dtype)

    @property
    def epistemic_var(self) -> Tensor:
        """Variance of the mean over draws, Var[μ] (point, out); exactly 0 for a single draw."""
        self._require_kind(classes=False)
        if self._moments is not None and self.likelihood.targets.linear_mean:
            return self._moments[1] * self._y_scale**2
        return self.loc.double().flatten(0, 1).var(0, correction=0).to(self.f.dtype)

    @property
    def var(self) -> Tensor:
        """Total predictive variance (point, out)."""
        return self.aleatoric_var + self.epistemic_var

    def thin(self, num_draws: int) -> Prediction:
        """Of at most ``num_draws`` draws of all chains, evenly spaced, joined to one chain, without exact moments."""
        check_count("num_draws", num_draws)
        total = self.f.shape[0] * self.f.shape[1]
        keep = evenly_spaced(total, min(num_draws, total))
        f = self.standard_f.flatten(0, 1)[keep][None]
        params = {name: value.flatten(0, 1)[keep][None] for name, value in self.params.items()}
        return Prediction(
            f,
            self.likelihood,
            params,
            y_mean=self._y_mean,
            y_scale=self._y_scale,
            output_shape=self.output_shape,
        )

    def shaped(self, values: Tensor) -> Tensor:
        r"""Values of columns, such as ``mean`` or ``f``, with the positions of images and sequences in their shape.

        Args:
            values: (…, point, column): ``mean``, ``var``, ``f``, a quantile, a sample; or of labels ``probs`` (point,
                position, class).

        Returns:
            (…, point, \*shape), the shape of the net's output without its heads, or of labels without its classes
            (``probs`` have them last). As they are where the net has no positions.

        Example:
            >>> import pyrobnn as pb
            >>> net = torch.nn.Conv2d(1, 1, 3, padding=1)
            >>> model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1))
            >>> x = torch.zeros(5, 1, 4, 4)
            >>> prediction = pb.MAP(num_steps=1, compile=False, polish_steps=0).fit(model, x, x).predict(x)
            >>> prediction.mean.shape, prediction.shaped(prediction.mean).shape
            (torch.Size([5, 16]), torch.Size([5, 1, 4, 4]))
        """
        if len(self.output_shape) < 2:
            return values
        shape = target_shape(self.likelihood, self.output_shape)
        size = math.prod(shape)
        if values.shape[-1] == math.prod(self.output_shape) != size:
            return values.unflatten(-1, self.output_shape)
        has_classes = (
            isinstance(self.likelihood, DenseCategorical)
            and values.shape[-1] == self.likelihood.num_classes
            and values.dim() > 2
            and values.shape[-2] == size
        )
        return values.unflatten(-2 if has_classes else -1, shape)

    def by_position(self, y: Tensor) -> tuple[Prediction, Tensor]:
        """Every position that has a label as a point of its own, and its label: what accuracy and calibration count.

        Args:
            y: labels (N, …) of the positions.

        Returns:
            A prediction of a label a point, those of a row one after another, and the labels (point,).

        Raises:
            AttributeError: the prediction is none of :class:`pyrobnn.likelihoods.DenseCategorical`.

        Caveat: positions of a row depend on each other; by row their number is not that of independent points.
        """
        likelihood = self.likelihood
        if not isinstance(likelihood, DenseCategorical):
            raise AttributeError(f"the prediction of a {self.task} likelihood has no positions")
        labels = self._target(y).flatten()
        f = likelihood.logits(self.standard_f).flatten(2, 3)
        observed = likelihood.observed(labels)
        return Prediction(f[:, :, observed], Categorical(), {}), labels[observed]

    def one_position(self, y: Tensor) -> tuple[Prediction, Tensor]:
        """One position of each row, and its target: points that are independent, as tests take them to be.

        The first, the second, … of the row that has a label, in turn. Of truth values one column; of numbers, and of
        one label a row, all there is.

        Args:
            y: targets, as ``log_prob`` takes them.
        """
        likelihood = self.likelihood
        if isinstance(likelihood, DenseCategorical):
            observed = likelihood.observed(self._target(y))
            per_row = observed.sum(1)
            points, labels = self.by_position(y)
            rows = (per_row > 0).nonzero()[:, 0]
            before = per_row.cumsum(0) - per_row
            chosen = before[rows] + rows % per_row[rows]
            return Prediction(points.standard_f[:, :, chosen], Categorical(), {}), labels[chosen]
        if likelihood.targets.kind != "binary" or self.standard_f.shape[-1] == 1:
            return self, y
        labels = self._target(y)
        column = (torch.arange(len(labels), device=labels.device) % labels.shape[1])[:, None]
        f = self.standard_f.gather(-1, column.expand(*self.standard_f.shape[:2], -1, -1))
        return Prediction(f, likelihood, self.params), labels.gather(1, column)

    def quantile(self, q: float | Tensor) -> Tensor:
        """Quantiles of the mixture of draws, each output by itself, to 1e-6 standard deviations of it.

        Of counts the least number whose probability to be reached is q or more.

        Of the draws, as ``log_prob`` and ``sample`` are, also where ``mean`` and ``var`` are known exactly.

        Args:
            q: probabilities in (0, 1), scalar or (k,).
        Returns:
            (point, out), or (k, point, out).
        Raises:
            ValueError: q outside (0, 1).
        """
        self._require_kind(classes=False)
        levels = as_tensor("q", q).to(self.f.device, torch.float64)
        if not levels.numel() or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"'q' must lie strictly between 0 and 1, got {q}")
        quantiles = self._quantiles(levels.reshape(-1).tolist())
        return self._in_y(quantiles.reshape(levels.shape + self.loc.shape[2:])).to(self.f.dtype)

    def _quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles (level, point, out) in the units of the program: where F is q to a billionth of its tail.

        A single normal has a formula.
        """
        if self.likelihood.targets.normal and self.standard_f[..., 0, 0].numel() == 1:
            loc, scale = self.likelihood.loc_scale(self.standard_f[0, 0].double(), self._only_draw)
            return torch.stack([loc + NormalDist().inv_cdf(level) * scale for level in levels])
        if self.likelihood.targets.kind == "count":
            return torch.stack([self._count_quantile(level) for level in levels])
        # rows of which the scalars of all draws stay in the cache of a core while every level is looked for
        at_once = max(1, _CACHED_SCALARS // self.standard_f[..., 0, :].numel())
        num_points = self.standard_f.shape[2]
        pieces = [
            self._quantiles_of(slice(start, start + at_once), levels)
            for start in range(0, num_points, at_once)
        ]
        return torch.cat(pieces, 1)

    def _quantiles_of(self, rows: slice, levels: Sequence[float]) -> Tensor:
        """Quantiles (level, row, out) of continuous targets; some 128 of the draws say where to begin."""
        num_draws = self.standard_f[..., 0, 0].numel()
        strides = (num_draws // 128, 1) if num_draws >= 256 else (1,)
        below = self._mixture_cdf(rows)
        center, scale = self._center_and_scale(rows)
        quantiles = []
        for level in levels:
            standard = NormalDist().inv_cdf(level)
            y = center + standard * scale
            slope = NormalDist().pdf(standard) / scale
            for stride in strides:
                tolerance = (1e-9 if stride == 1 else 1e-3) * min(level, 1 - level)
                of_draws = partial(below, stride)
                y, slope = where_reached(of_draws, level, y, slope, tolerance)
            quantiles.append(y)
        return torch.stack(quantiles)

    def _mixture_cdf(self, rows: slice) -> Callable[[int, Tensor], Tensor]:
        """P(Y ≤ y) at y (row, out) over every ``stride``-th draw, a function of the stride and of y."""
        draws = self.standard_f[:, :, rows].double().flatten(0, 1).contiguous()
        params = {name: value.double().flatten(0, 1) for name, value in self.params.items()}

        def below(stride: int, y: Tensor) -> Tensor:
            strided = {name: value[::stride] for name, value in params.items()}
            return self.likelihood.cdf(draws[::stride], y, strided)[1].mean(0)

        return below

    def _center_and_scale(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (row, out) in the units of the program; 0 and 1 where there are none."""
        mean, var = (values[:, :, rows].double().flatten(0, 1) for values in self._mean_variance)
        scale = (var.mean(0) + mean.var(0, correction=0)).sqrt()
        is_known = (scale > 0) & scale.isfinite()
        return mean.mean(0).nan_to_num(0.0, 0.0, 0.0), torch.where(is_known, scale, 1.0)

    def _count_quantile(self, level: float) -> Tensor:
        """A quantile (point, out) of counts: the least whose probability to be reached is the level or more.

        Some 128 draws say where to look; a bracket around there grows until it holds the quantile.
        """
        # imported late: a fit needs none of it
        from scipy.optimize import elementwise

        mean = _mean(self._mean_variance[0].double()).nan_to_num(0.0, 0.0, 0.0)
        y = mean.flatten().cpu().numpy()
        num_draws = self.standard_f[..., 0, 0].numel()
        cells = np.arange(len(y))
        strides = (num_draws // 128, 1) if num_draws >= 256 else (1,)
        for stride in strides:
            excess = partial(self._excess, level=level, stride=stride)
            bracket = elementwise.bracket_root(excess, y - 1.0, y + 1.0, args=(cells,)).bracket
            # steps of a count are told apart, and stepped over where F is q exactly
            tolerances = {"xatol": 0.1}
            root = elementwise.find_root(excess, bracket, args=(cells,), tolerances=tolerances)
            y = np.asarray(root.x)
        # by the excess over all draws: the last stride is one
        y = _least_count(y, lambda counts: excess(counts, cells))
        return torch.from_numpy(y).to(self.f.device).reshape(mean.shape)

    @property
    def _only_draw(self) -> dict[str, Tensor]:
        """The likelihood's own parameters where there is one draw, in float64."""
        return {name: value[0, 0].double() for name, value in self.params.items()}

    def _excess(
        self,
        at: np.ndarray,
        cells: np.ndarray,
        level: float,
        stride: int,
    ) -> np.ndarray:
        """By how much P(Y ≤ at) of counts, over every ``stride``-th draw, exceeds the level, (value,).

        ``cells`` are positions in the flattened (point, out).
        """
        return self._below(np.floor(at), cells, stride) - level

    def _below(
        self,
        y: np.ndarray,
        cells: np.ndarray,
        stride: int,
    ) -> np.ndarray:
        """P(Y ≤ y), over every ``stride``-th draw, at y (value,) in the units of the program; ``cells`` as above."""
        draws = self.standard_f.flatten(0, 1)[::stride]
        out = self.loc.shape[-1]
        params = {name: value.flatten(0, 1)[::stride] for name, value in self.params.items()}
        pieces = []
        at_once = max(1, _CACHED_SCALARS // len(draws))
        for start in range(0, len(y), at_once):
            piece = slice(start, start + at_once)
            y_piece = torch.from_numpy(y[piece]).to(draws.device)[:, None].expand(-1, out)
            cell = torch.from_numpy(cells[piece]).to(draws.device)
            reached = self.likelihood.cdf(draws[:, cell // out], y_piece, params)[1].mean(0)
            pieces.append(reached.gather(1, (cell % out)[:, None])[:, 0])
        return torch.cat(pieces).cpu().numpy()

    @property
    def probs(self) -> Tensor:
        """Class probabilities averaged over draws, (point, class); Bernoulli: probability of 1, (point, out)."""
        self._require_kind(classes=True)
        return _mean(self.likelihood.probs(self.f, self.params))

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities in nats, (point,)."""
        return self._entropy(self.probs)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Average entropy of the draws in nats, (point,)."""
        self._require_kind(classes=True)
        return _mean(self._entropy(self.likelihood.probs(self.f, self.params)))

    @property
    def epistemic_entropy(self) -> Tensor:
        """Mutual information of label and parameters in nats, (point,): entropy − aleatoric entropy, never negative."""
        return (self.entropy - self.aleatoric_entropy).clamp_min(0.0)

    def _entropy(self, probs: Tensor) -> Tensor:
        """Of labels; of truth values, of which each has its own probability, the sum over outputs."""
        terms = torch.special.entr(probs)
        if self.likelihood.targets.kind == "binary":
            terms = terms + torch.special.entr(1 - probs)
        return terms.sum(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of the *mixture* at ``y`` (point, out) or labels (point,), in nats, joint over outputs; (point,).

        In the units of y: log p(y|x) = logsumexp_s log p(y|x, θ_s) − log S.
        """
        per_draw = self.log_prob_draws(y).flatten(0, 1)
        return torch.logsumexp(per_draw, 0) - math.log(len(per_draw))

    def log_prob_draws(self, y: Tensor) -> Tensor:
        """Log density of ``y`` under each draw by itself, (chain, draw, point): what LOO is computed from.

        Raises:
            ValueError: ``y`` has another number of points, or a shape the likelihood does not take.
        """
        y = self._target(y)
        f, params = self._wide
        log_prob = self.likelihood.log_prob(f, self._standard(y), params)
        targets = self.likelihood.targets
        if targets.measured is None:
            return log_prob
        return log_prob - targets.log_volume(y, self._y_scale)

    def pit(self, y: Tensor, *, seed: int = 0) -> Tensor:
        """Probability integral transform of ``y``, (point, out): uniform where the prediction is right.

        That of the mixture of draws, :math:`P(Y < y) + u\\, P(Y = y)` with a uniform u: what a count, a label or a
        censored time leaves open is drawn at random.

        Args:
            y: targets (point, out), or labels (point,).
            seed: of u.

        Reference: Diagnostic checks for discrete data regression models using posterior predictive simulations
        (Gelman et al., 2000); Randomized quantile residuals (Dunn & Smyth, 1996).
        """
        f, params = self._wide
        below, reached = self.likelihood.cdf(f, self._standard(self._target(y)), params)
        lower = _mean(below)
        upper = _mean(reached)
        u = torch.rand(
            lower.shape,
            generator=generator(~seed),
            dtype=lower.dtype,
        ).to(lower.device)
        return lower + u * (upper - lower)

    @property
    def _wide(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The network's output and the likelihood's own parameters in float64."""
        params = {name: value.double() for name, value in self.params.items()}
        return self.standard_f.double(), params

    def _target(self, y: Tensor) -> Tensor:
        """Targets as the likelihood takes them, in float64 and in the units of the data; ValueError of other rows."""
        targets = self.likelihood.targets
        y = targets.read(y).to(self.standard_f.device)
        if self.output_shape:
            check_positions(self.likelihood, y.shape, self.output_shape)
        y = targets.columns(y)
        points, width = self.standard_f.shape[-2:]
        y = self.likelihood.target(y, width, torch.float64)
        if len(y) != points:
            raise ValueError(f"'y' has {len(y)} rows but the prediction has {points} points")
        return y

    def _standard(self, y: Tensor) -> Tensor:
        """Targets in the units of the program."""
        targets = self.likelihood.targets
        return y if targets.measured is None else targets.in_units(y, self._y_mean, self._y_scale)

    def sample(self, *, seed: int = 0, per_draw: int = 1) -> Tensor:
        """Noisy observations: (chain, draw · per_draw, point, out), or labels (chain, draw · per_draw, point).

        Args:
            seed: of the noise.
            per_draw: observations of each posterior draw, one after another; more than one where draws are few.
        """
        check_count("per_draw", per_draw)
        targets = self.likelihood.targets

        def draw() -> Tensor:
            law = self.likelihood.distribution(self.standard_f, self.params)
            return targets.values(law.sample((per_draw,))).movedim(0, 2).flatten(1, 2)

        values = drawn(draw, seed, self.f.device)
        return values if targets.measured is None else self._in_y(values)

    def _require_kind(self, classes: bool) -> None:
        """AttributeError unless this is a prediction of classes, or of numbers."""
        if self.likelihood.targets.classes != classes:
            use = "mean, aleatoric_var and epistemic_var" if classes else "probs and the entropies"
            raise AttributeError(f"this is the prediction of a {self.task} likelihood: use {use}")

    def __repr__(self) -> str:
        chains, draws, points, width = self.f.shape
        return f"Prediction({self.task}, {chains} chains x {draws} draws, {points} points, {width} outputs)"


def mixed(predictions: Sequence[Prediction]) -> Prediction:
    """The mixture of predictions at the same points, equally likely, of the same likelihood and units.

    Each draw of each chain is one of the mixture's; exact moments are those of the mixture.
    """
    one = predictions[0]
    params = {}
    for name in one.params:
        params[name] = torch.cat([prediction.params[name] for prediction in predictions], dim=1)
    moments = None
    if one._moments is not None:
        means = torch.stack([cast(Moments, prediction._moments)[0] for prediction in predictions])
        variances = torch.stack(
            [cast(Moments, prediction._moments)[1] for prediction in predictions]
        )
        moments = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    return Prediction(
        torch.cat([prediction.standard_f for prediction in predictions], dim=1),
        one.likelihood,
        params,
        moments=moments,
        y_mean=one._y_mean,
        y_scale=one._y_scale,
    )


def _unit(value: float | Tensor, device: torch.device) -> float | Tensor:
    return value.to(device) if isinstance(value, Tensor) else float(value)


def _mean(values: Tensor) -> Tensor:
    """The mean over draws of values (chain, draw, …), (…)."""
    return values.flatten(0, 1).mean(0)


def _least_count(y: np.ndarray, excess: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The least counts near y (value,) at which the excess, which rises, is not negative."""
    y = np.maximum(np.round(y), 0.0)
    not_below = np.where(excess(y) < 0, y + 1, y)
    return np.where(excess(y - 1) >= 0, y - 1, not_below)


@torch.no_grad()
def widest_layer(model: BNN, x: Tensor) -> int:
    """Scalars of the largest layer output for one point.

    Nothing is differentiated: a net that keeps what it computed would hold a tensor that cannot be copied.
    """
    sizes = [x[0].numel()]
    # a single row would be warned of by a net that looks at the spread of a batch
    rows = x[:2]

    def note(name: str, inputs: tuple, output: Tensor) -> None:
        # a module may return several
        sizes.append(output.numel() // len(rows) if isinstance(output, Tensor) else 0)

    with hooked(dict(model.eval_net.named_modules()), note):
        model.forward({}, rows)
    return max(sizes)


@contextmanager
def hooked(
    modules: Mapping[str, torch.nn.Module],
    hook: Callable[[str, tuple, Tensor], Tensor | None],
) -> Iterator[None]:
    """Inside, ``hook(name, inputs, output)`` is called after each of the modules, and may return another output."""
    with ExitStack() as handles:
        for name, module in modules.items():
            handles.enter_context(
                module.register_forward_hook(
                    lambda _, *call, name=name: hook(name, *call),
                    # before the net's own, which flattens what its last layer returns
                    prepend=True,
                )
            )
        yield
