"""Prediction: what the posterior says about new inputs, with its uncertainty split in two."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyrobnn.checks import as_tensor, check_count
from pyrobnn.likelihoods import Likelihood
from pyrobnn.posterior.mixture import mixture_quantile
from pyrobnn.seeding import seeded


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

    Attributes: ``f`` (chain, draw, point, out), the mean function of every draw for regression, (chain, draw, point,
    class) the logits for classification; ``standard_f``, the network's raw output, in standard units where the model
    has a standardizer and with the noise head of a heteroskedastic net; for regression ``mean``, ``aleatoric_var``,
    ``epistemic_var``, ``var``, all (point, out), with
    :math:`\mathrm{var} = E_s[\sigma_s^2] + \mathrm{Var}_s[\mu_s]` (law of total variance); for classification
    ``probs`` (point, class), and in nats ``aleatoric_entropy``, ``epistemic_entropy`` (mutual information) and
    their sum ``entropy``, all (point,).

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
    ):
        self.standard_f = standard_f
        self.likelihood = likelihood
        self.params = {
            name: value
            for name, value in params.items()
            if name in likelihood.priors or name in likelihood.points
        }
        self.task = likelihood.task
        self._moments = moments
        # numbers of the data's own type: float32 has no room for a mean of 1e8 and a spread of 1
        self._y_mean, self._y_scale = (
            value.to(standard_f.device) if isinstance(value, Tensor) else float(value)
            for value in (y_mean, y_scale)
        )
        if self.task == "gaussian":
            loc, scale = likelihood.loc_scale(standard_f, self.params)
            #: mean and noise sd of every mixture component, (chain, draw, point, out)
            self.loc, self.scale = self._in_y(loc), scale * self._y_scale

    def in_units(self, y_mean: float | Tensor, y_scale: float | Tensor) -> Prediction:
        """The same prediction in the units of the original targets, y = y_mean + y_scale · standardised."""
        self._need("gaussian")
        return Prediction(
            self.standard_f,
            self.likelihood,
            self.params,
            moments=self._moments,
            y_mean=y_mean,
            y_scale=y_scale,
        )

    @property
    def f(self) -> Tensor:
        """Every draw's function: the mean of y (chain, draw, point, out) in its units, or logits (…, class)."""
        return self.loc if self.task == "gaussian" else self.standard_f

    def _in_y(self, values: Tensor) -> Tensor:
        return values * self._y_scale + self._y_mean

    # -- regression -------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """Predictive mean (point, out); for Bernoulli the probability of 1."""
        if self.task == "bernoulli":
            return self.probs
        self._need("gaussian")
        if self._moments is not None:
            return self._in_y(self._moments[0])
        return _mean(self.loc)

    @property
    def aleatoric_var(self) -> Tensor:
        """Expected noise variance E[σ²] (point, out)."""
        self._need("gaussian")
        return _mean(self.scale.double().square()).to(self.f.dtype)

    @property
    def epistemic_var(self) -> Tensor:
        """Variance of the mean over draws, Var[μ] (point, out); exactly 0 for a single draw."""
        self._need("gaussian")
        if self._moments is not None:
            return self._moments[1] * self._y_scale**2
        return self.loc.double().flatten(0, 1).var(0, correction=0).to(self.f.dtype)

    @property
    def var(self) -> Tensor:
        """Total predictive variance (point, out)."""
        return self.aleatoric_var + self.epistemic_var

    def quantile(self, q: float | Tensor) -> Tensor:
        """Quantiles of the mixture of draws, each output by itself, to 1e-6 standard deviations of it.

        Of the draws, as ``log_prob`` and ``sample`` are, also where ``mean`` and ``var`` are known exactly.

        Args:
            q: probabilities in (0, 1), scalar or (k,).
        Returns:
            (point, out), or (k, point, out).
        Raises:
            ValueError: q outside (0, 1).
        """
        self._need("gaussian")
        levels = torch.as_tensor(q, dtype=torch.float64, device=self.f.device)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"'q' must lie strictly between 0 and 1, got {q}")
        shape = self.loc.shape[2:]
        loc, scale = (v.flatten(0, 1).flatten(1).T.contiguous() for v in (self.loc, self.scale))
        found = [mixture_quantile(level, loc, scale) for level in levels.reshape(-1).tolist()]
        return torch.stack(found).reshape(levels.shape + shape).to(self.f.dtype)

    # -- classification ---------------------------------------------------------------------------------------------

    @property
    def probs(self) -> Tensor:
        """Class probabilities averaged over draws, (point, class); Bernoulli: probability of 1, (point, out)."""
        self._need("categorical", "bernoulli")
        return _mean(self.likelihood.probs(self.f))

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities in nats, (point,)."""
        return _entropy(self.probs, self.task)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Average entropy of the draws in nats, (point,)."""
        self._need("categorical", "bernoulli")
        return _mean(_entropy(self.likelihood.probs(self.f), self.task))

    @property
    def epistemic_entropy(self) -> Tensor:
        """Mutual information of label and parameters in nats, (point,): entropy − aleatoric entropy, never negative."""
        return (self.entropy - self.aleatoric_entropy).clamp_min(0.0)

    # -- both -------------------------------------------------------------------------------------------------------

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
        y = as_tensor("y", y).to(self.f.device)
        outputs = self.standard_f.shape[-1]
        y = self.likelihood.target(y, outputs, torch.float64)
        if len(y) != self.f.shape[-2]:
            points = self.f.shape[-2]
            raise ValueError(
                f"'y' has {len(y)} rows but the prediction has {points} points: predict at the same x"
            )
        if self.task == "gaussian":
            return torch.distributions.Normal(self.loc.double(), self.scale.double()).log_prob(y).sum(-1)
        return self.likelihood.log_prob(self.f.double(), y, self.params)

    def sample(self, *, seed: int = 0, per_draw: int = 1) -> Tensor:
        """Noisy observations: (chain, draw · per_draw, point, out), or labels (chain, draw · per_draw, point).

        Args:
            seed: of the noise.
            per_draw: observations of each posterior draw, one after another; more than one where draws are few.
        """
        check_count("per_draw", per_draw)
        with seeded(seed, self.f.device):
            if self.task == "gaussian":
                loc, scale = (value.repeat_interleave(per_draw, 1) for value in (self.loc, self.scale))
                return loc + scale * torch.randn_like(loc)
            labels = self.likelihood.distribution(self.f, self.params).sample((per_draw,))
            return labels.movedim(0, 2).flatten(1, 2)

    def _need(self, *tasks: str) -> None:
        if self.task not in tasks:
            use = (
                "probs and the entropies" if "gaussian" in tasks else "mean, aleatoric_var and epistemic_var"
            )
            raise AttributeError(f"this is the prediction of a {self.task} likelihood: use {use}")

    def __repr__(self) -> str:
        chains, draws, points, width = self.f.shape
        return f"Prediction({self.task}, {chains} chains × {draws} draws, {points} points, {width} outputs)"


def _mean(values: Tensor) -> Tensor:
    return values.flatten(0, 1).mean(0)


def _entropy(probs: Tensor, task: str) -> Tensor:
    if task == "bernoulli":
        return (torch.special.entr(probs) + torch.special.entr(1 - probs)).sum(-1)
    return torch.special.entr(probs).sum(-1)
