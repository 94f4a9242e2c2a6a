"""A trained net in, honest probabilities out: a few ways to widen what it says, and the one that left-out data want."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyro.distributions as dist
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, as_tensor, check_count, check_finite, check_type
from pyrobnn.core.seeding import generator
from pyrobnn.inference.curvature.last_layer import LastLayer, NetRows
from pyrobnn.inference.fitting import batches
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.point_methods import MLE
from pyrobnn.model import BNN, Density, check_data, output_width
from pyrobnn.model.architectures import Temperature
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.catalogue import Bernoulli, Categorical, HomoskedasticGaussian
from pyrobnn.model.several_inputs import as_rows
from pyrobnn.model.weight_priors import IIDPrior, first_names
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import CHUNK_SCALARS, hooked, widest_layer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: log of how much likelier than under the simpler candidate targets must be, for one row alone to refute it
_REFUTED = math.log(20.0)


def posthoc(
    net: nn.Module,
    x_or_loader: ArrayLike | DataLoader,
    y: ArrayLike | None = None,
    *,
    likelihood: Likelihood | None = None,
    held_out: tuple[ArrayLike, ArrayLike] | None = None,
    seed: int = 0,
) -> Posterior:
    r"""Uncertainty for a net that is trained already, never worse than the net itself.

    Candidates, the simplest first: ``"net"`` as it is; ``"temperature"``, outputs over T, or ``"noise"``, another noise
    of numbers; ``"last_layer"``, Laplace's approximation of the last linear layer, Kronecker-factored, its prior
    precision tuned (and the noise with it). Each is tuned and judged by the mean log density of the left-out targets,
    and the simplest is taken which the best does not beat by more than a standard error of their difference. A row that
    a candidate finds impossible cannot hide behind its own size: in that error the gain of a row counts for at most
    log 20 nats. Where the simpler one is right, the targets are 20 times likelier under another in at most one case in
    twenty (Markov's inequality).

    .. math:: p(y \mid x) = E_{W \sim q_\tau}\left[p(y \mid W \phi(x) / T)\right]

    Args:
        net: trained; evaluated as in ``net.eval()``, and left as it is.
        x_or_loader, y: the training data, (N, …) and (N, out) or labels (N,); or a DataLoader of both.
        likelihood: default :class:`~pyrobnn.likelihoods.Categorical` for whole-number labels of a net with several
            outputs, :class:`~pyrobnn.likelihoods.Bernoulli` for targets 0 and 1, a column for each output, the logit;
            else Gaussian noise fitted to the residuals.
        held_out: (x, y) that the net has not seen. Without them each training row is left out of the last layer in
            closed form; its features still know it, and only wider predictions are taken then. A Gaussian whose
            noise is not given needs them where the net has no linear last layer: training residuals understate it.
        seed: of the draws.

    Returns:
        Posterior; ``meta["chosen"]``, ``meta["held_out_log_density"]`` (candidate → [mean, standard error], nats per
        row), ``meta["judged_by"]`` and ``meta["tuned"]``, what was chosen with its number.

    Raises:
        TypeError, ValueError, Refused: naming the argument.

    Caveat: with less than a hundred left-out rows expect the net itself, unless it finds one of them impossible. A
    candidate whose log density is not finite is left out.

    Reference: On Calibration of Modern Neural Networks (Guo et al., 2017); Laplace Redux (Daxberger et al., 2021);
    E-values: Calibration, combination and applications (Vovk & Wang, 2021) https://doi.org/10.1214/20-AOS2020

    Example:
        >>> import pyrobnn as pb, torch
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> with torch.random.fork_rng():
        ...     net = torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        >>> posterior = posthoc(net, x, (x[:, 0] > 0).long())
        >>> sorted(posterior.meta["held_out_log_density"])
        ['last_layer', 'net', 'temperature']
    """
    if not isinstance(net, nn.Module) or not any(True for _ in net.parameters()):
        raise TypeError(f"'net' must be a trained torch.nn.Module, got {type(net).__name__}")
    x_or_loader = as_rows(net, x_or_loader)
    if isinstance(x_or_loader, DataLoader):
        if y is not None:
            raise TypeError(
                "'y' must be left out when 'x_or_loader' is a DataLoader: its batches are (x, y)"
            )
        x_or_loader, y, _ = batches.read(x_or_loader, gather=True)
    if y is None or (
        held_out is not None and not (isinstance(held_out, tuple) and len(held_out) == 2)
    ):
        raise TypeError("pass posthoc(net, x, y), or posthoc(net, loader), and held_out=(x, y)")
    check_type("likelihood", likelihood, Likelihood | None, "one of pyrobnn.likelihoods")
    check_count("seed", seed, minimum=0)
    _refuse_positions(net, x_or_loader)
    if held_out is not None:
        held_out = (as_rows(net, held_out[0]), held_out[1])
    return _Posthoc(net, (x_or_loader, y), likelihood, held_out, seed).posterior()


class _Posthoc:
    """The net, its data, and the candidates.

    Attributes:
        net: a copy, in evaluation mode.
        gaussian: whether the likelihood is one of homoskedastic Gaussian noise.
        model: the net with its likelihood.
        x: the inputs of the training rows.
        last_name: of the linear layer that the net ends in; None where it does not.
        train: the training rows, with the net's outputs and the features before its last layer.
        noise: standard deviations (K,) of the Gaussian noise of the net as it is.
        last_layer: curvature of the last layer; None where there is none, or it is not known.
        judging_rows: those whose log densities judge the candidates.
    """

    def __init__(
        self,
        net: nn.Module,
        data: tuple[ArrayLike, ArrayLike],
        likelihood: Likelihood | None,
        held_out: tuple[ArrayLike, ArrayLike] | None,
        seed: int,
    ):
        self.net = copy.deepcopy(net).eval()
        self.seed = seed
        likelihood = likelihood or _default_likelihood(
            _bnn(self.net, HomoskedasticGaussian(1.0)), *data
        )
        self.gaussian = type(likelihood) is HomoskedasticGaussian
        free = likelihood.own.points | likelihood.own.priors
        if free and not self.gaussian:
            raise Refused(
                f"{likelihood!r} has parameters of its own, {', '.join(free)}: fix them by numbers"
            )
        self.model = _bnn(self.net, likelihood)
        self.x, y = check_data(self.model, data[0], data[1], self.model.device)
        self.last_name = _last_linear(self.net, self.x[:2])
        self.train = self._rows(self.x, y, in_training=True)
        if free:
            residual = (y - self.train.f).square().mean(0).sqrt()
            self.model = _bnn(self.net, HomoskedasticGaussian(residual.clamp_min(1e-12)))
        self.likelihood = self.model.likelihood
        if type(self.likelihood) is HomoskedasticGaussian:  # of the net as it is, (K,)
            self.noise = self.likelihood.loc_scale(self.train.f[:1], {})[1][0]
        self.last_layer = self._last_layer()
        self.judging_rows = self._judging_rows(held_out, bool(free))

    def _last_layer(self) -> LastLayer | None:
        """The curvature of the last layer; None where the net has none of its own, or its likelihood's is not known."""
        if self.last_name is None:
            return None
        first = first_names(self.net)
        shared = [name for name in first if first[name] != name]
        # features would change with a parameter that an earlier layer has too
        if any(name.rpartition(".")[0] == self.last_name for name in shared):
            return None
        layer = cast(nn.Linear, self.net.get_submodule(self.last_name))
        try:
            return LastLayer(layer, self.likelihood, self.train)
        except Refused:
            return None

    def _judging_rows(
        self,
        held_out: tuple[ArrayLike, ArrayLike] | None,
        noise_was_fitted: bool,
    ) -> NetRows:
        """The rows that judge the candidates: those that the net has not seen, if there are any."""
        if held_out is not None:
            return self._unseen_rows(held_out)
        if self.last_layer is not None:
            return self.last_layer.without_itself()
        if noise_was_fitted:
            raise Refused(
                "no row can be left out of a net that does not end in a linear layer: pass held_out=(x, y)"
            )
        return self.train

    def _unseen_rows(self, held_out: tuple[ArrayLike, ArrayLike]) -> NetRows:
        """The rows that the net has not seen."""
        try:
            x, y = check_data(self.model, held_out[0], held_out[1], self.model.device)
            return self._rows(x, y, in_training=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"held_out=(x, y): {error}") from error

    @torch.no_grad()
    def _rows(self, x: Tensor, y: Tensor, in_training: bool) -> NetRows:
        """The one pass over the data."""
        features: list[Tensor] = []
        layers = (
            {}
            if self.last_name is None
            else {self.last_name: self.net.get_submodule(self.last_name)}
        )
        with hooked(layers, lambda _, args, out: features.append(args[0])):
            size = max(1, CHUNK_SCALARS // widest_layer(self.model, x))
            f = torch.cat([self.net(rows) for rows in x.split(size)])
        check_finite("net(x)", f)
        return NetRows(f, y, torch.cat(features) if features else None, in_training)

    def _log_density(self, f: Tensor) -> Tensor:
        """Of every judging row, (N,), under the mixture of outputs (S, N, K) or at outputs (N, K).

        NaN for all rows where an output is not finite.
        """
        if not bool(f.isfinite().all()):
            return f.new_full(self.judging_rows.f.shape[:1], math.nan)
        value = self.likelihood.log_prob(f, self.judging_rows.y, {})
        return value if f.dim() == 2 else value.logsumexp(0) - math.log(len(f))

    def _refitted_noise(self, variance_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities (N,) of the judging rows, and the noise (K,) that suits them best.

        The predictive variance is (1 + ``variance_ratio``) times that of the noise.
        """
        rows = self.judging_rows
        total = 1 + variance_ratio.to(rows.f)
        scale = ((rows.y - rows.f).square() / total).mean(0).sqrt().clamp_min(1e-12)
        scale = torch.maximum(scale, self.noise) if rows.seen else scale
        return dist.Normal(rows.f, scale * total.sqrt()).log_prob(rows.y).sum(-1), scale

    def candidates(self) -> dict[str, tuple[Tensor, Any]]:
        """Name → log densities of the judging rows, and what was tuned; the simplest first.

        Tuned is nothing, None, of the net; the temperature T of classes; the noise (K,); and of the last layer its
        prior precision and the noise beside it, (τ, noise (K,) or None).
        """
        rows = self.judging_rows
        last_layer = self.last_layer
        candidates: dict[str, tuple[Tensor, Any]] = {"net": (self._log_density(rows.f), None)}
        if isinstance(self.likelihood, Categorical | Bernoulli):
            value = self._temperature()
            candidates["temperature"] = (self._log_density(rows.f / value), value)
        elif self.gaussian:
            candidates["noise"] = self._refitted_noise(torch.zeros(1))
        if last_layer is not None:
            widths = self._widths(last_layer)
            if widths:
                candidates["last_layer"] = max(widths, key=lambda width: float(width[0].mean()))
        finite = {
            name: candidate for name, candidate in candidates.items() if _is_finite(candidate[0])
        }
        return finite or {"net": candidates["net"]}

    def _widths(self, last_layer: LastLayer) -> list[tuple[Tensor, Any]]:
        """The last layer at every prior precision of its grid whose log densities are finite."""
        rows = self.judging_rows
        half = max(16, min(256, CHUNK_SCALARS // 4 // rows.f.numel())) // 2
        noise = torch.randn(
            half,
            1,
            rows.f.shape[1],
            generator=generator(self.seed),
        ).to(rows.f)
        noise = torch.cat([noise, -noise])

        def judged(tau: float) -> tuple[Tensor, Any]:
            var = last_layer.variance(rows, tau)
            if self.gaussian:
                score, scale = self._refitted_noise(var * last_layer.out_values)
                return score, (tau, scale)
            spread = (noise * var.sqrt().to(noise)) @ last_layer.out_basis.T.to(noise)
            return self._log_density(rows.f + spread), (tau, None)

        return [width for width in map(judged, last_layer.grid()) if _is_finite(width[0])]

    def _temperature(self) -> float:
        """The best for the judging rows and ten more as the net expects them: no mistakes in thirty prove little."""
        p = self.likelihood.probs(self.judging_rows.f)

        def loss(log_t: float) -> float:
            f = self.judging_rows.f / math.exp(log_t)
            if isinstance(self.likelihood, Categorical):
                expected = p * f.log_softmax(-1)
            else:
                expected = p * nn.functional.logsigmoid(f) + (1 - p) * nn.functional.logsigmoid(-f)
            return -float(
                self._log_density(f).double().sum() + 10 * expected.double().sum(-1).mean()
            )

        # the largest makes all classes alike
        largest = max(
            4.0, math.log(max(float(self.judging_rows.f.double().abs().max()), 1.0)) + 2.0
        )
        smallest = 0.0 if self.judging_rows.seen else -2.0
        return math.exp(
            minimize_scalar(
                loss,
                bounds=(smallest, largest),
                method="bounded",
            ).x
        )

    def posterior(self) -> Posterior:
        """Of the candidate that is chosen."""
        candidates = self.candidates()
        scores = {name: score.double() for name, (score, _) in candidates.items()}
        best = max(scores.values(), key=lambda score: float(score.mean()))
        # the simplest that the best does not beat by more than an error of their difference
        chosen = next(
            name
            for name, score in scores.items()
            if score is best or float((best - score).mean()) <= _bounded_error(best - score)
        )
        tuned = candidates[chosen][1]
        if chosen == "last_layer" and self.last_layer is not None:
            result = self._posterior_of_last_layer(self.last_layer, *tuned)
            tuned = {"prior_precision": tuned[0]}
        elif chosen == "noise":
            result = self._posterior_of_net(_bnn(self.net, HomoskedasticGaussian(tuned)))
            tuned = {"noise": tuned.tolist()}
        elif chosen == "temperature":
            net = nn.Sequential(self.net, Temperature(tuned))
            result = self._posterior_of_net(_bnn(net, self.likelihood))
            tuned = {"temperature": tuned}
        else:
            result = self._posterior_of_net(self.model)
        judgement = {
            "chosen": chosen,
            "held_out_log_density": {
                name: [float(score.mean()), _error(score)] for name, score in scores.items()
            },
            "judged_by": self._judged_by,
            "tuned": tuned,
        }
        return replace(result, meta=result.meta | judgement)

    def _posterior_of_last_layer(
        self,
        last_layer: LastLayer,
        tau: float,
        scale: Tensor | None,
    ) -> Posterior:
        """Draws of the last layer at prior precision ``tau``, under another noise where ``scale`` gives one."""
        likelihood = self.likelihood
        precision_ratio = torch.ones_like(self.train.f[0])
        if scale is not None:
            likelihood = HomoskedasticGaussian(scale)
            precision_ratio = (self.noise / scale).square()
        name = cast(str, self.last_name)
        return last_layer.posterior(
            self.net, name, likelihood, tau, precision_ratio, self.x, self.seed
        )

    def _posterior_of_net(self, model: BNN) -> Posterior:
        """The one draw that the net of ``model`` is."""
        density = Density(
            model.sample_parameters,
            (),
            points="held",
        )
        problem = Problem(model, density, self.x, self.train.y, len(self.x), model.device)
        draws = {name: value[None, None] for name, value in model.initial_values().items()}
        return make_posterior(
            problem,
            MLE(),
            draws,
            seed=self.seed,
            timings={},
        )

    @property
    def _judged_by(self) -> str:
        """What judged the candidates, for ``meta``."""
        if self.judging_rows is self.train:
            return "training"
        return "leave_one_out" if self.judging_rows.seen else "held_out"


def _refuse_positions(net: nn.Module, x: ArrayLike) -> None:
    """Refuse a net that returns an image or a sequence for each row."""
    model = _bnn(net, HomoskedasticGaussian(1.0))
    inputs = torch.atleast_1d(as_tensor("x", x))[:2].to(model.device)
    shape = model.output_shape(model.cast_inputs(inputs))
    if len(shape) > 1:
        raise Refused(
            f"the net returns {tuple(shape)} for each row, values of positions, and posthoc takes nets with one row of "
            "outputs: pb.Laplace(subset='last_layer'), pb.SWAG and pb.DeepEnsemble take it in a pb.BNN, labels of "
            "positions with pb.likelihoods.DenseCategorical"
        )


def _bnn(net: nn.Module, likelihood: Likelihood) -> BNN:
    """The net and a likelihood as a model, whose prior no candidate uses."""
    return BNN(net, cast(Any, IIDPrior)(dist.Normal(0.0, 1.0)), likelihood)


def _error(scores: Tensor) -> float:
    """Standard error of a mean; infinite of one row."""
    return float(scores.std()) / math.sqrt(len(scores)) if len(scores) > 1 else math.inf


def _bounded_error(gains: Tensor) -> float:
    """Standard error of the mean of gains (N,) in log density, which no single row sets.

    One row of a large gain makes the mean M / N and the error M / N too, and would never be believed. With its gain
    bounded, it is believed where all rows together have gained more than the bound.
    """
    return _error(gains.clamp_max(_REFUTED))


def _is_finite(score: Tensor) -> bool:
    """Whether the log densities (N,) of a candidate are all finite."""
    return bool(score.isfinite().all())


def _default_likelihood(model: BNN, x: ArrayLike, y: ArrayLike) -> Likelihood:
    """The likelihood that the targets and the net's outputs suggest."""
    inputs, targets = torch.atleast_1d(as_tensor("x", x), as_tensor("y", y))
    width = output_width(model, model.cast_inputs(inputs[:2].to(model.device)))
    # labels, whose form their own check looks at
    whole = width > 1 and bool((targets.double() % 1 == 0).all())
    if whole and (targets.numel() == len(inputs) or bool((targets.sum(-1) == 1).all())):
        return Categorical()
    return (
        Bernoulli()
        if set(targets.unique().tolist()) <= {0, 1}
        else HomoskedasticGaussian("learned")
    )


@torch.no_grad()
def _last_linear(net: nn.Module, x: Tensor) -> str | None:
    """The name of the last linear layer, where the net returns what it does with one row for each of its own."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    linear = {name: module for name, module in net.named_modules() if type(module) is nn.Linear}
    with hooked(linear, lambda name, args, out: calls.append((name, args[0], out))):
        f = net(x)
    name, inputs, out = calls[-1] if calls else ("", x, x)
    alone = [layer for layer, _, _ in calls].count(name) == 1 and inputs.dim() == 2
    return name if alone and out.shape == f.shape and torch.equal(out, f) else None
