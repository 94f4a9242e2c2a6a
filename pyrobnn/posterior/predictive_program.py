"""The predictive distribution as one function of plain tensors, which torch.export can trace."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from statistics import NormalDist
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pyrobnn.model import BNN, NET
from pyrobnn.model.architectures import Exposed
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.catalogue import CensoredNormal
from pyrobnn.model.likelihoods.modes_and_bounds import MixtureDensity
from pyrobnn.model.net_checks import takes_words
from pyrobnn.posterior.approximation import is_same_in_all_draws
from pyrobnn.posterior.batching import WithBatchingRules
from pyrobnn.posterior.ranges import InputRange

#: how the draws are put through the network: all at once, with batching rules of this module or without, or in turn
Evaluation = Literal["rules", "vmap", "loop"]
EVALUATIONS: tuple[Evaluation, ...] = get_args(Evaluation)

#: halvings of the bracket of a quantile, some ten sd wide: to less than 1e-7 sd
HALVINGS = 26


class PredictiveProgram(nn.Module):
    """Inputs (N, …) of the data → what is predicted for each row, by name; draws and units are buffers.

    Of numbers ``mean``, ``sd``, ``aleatoric_sd``, ``epistemic_sd`` (N, out) and, of normal noise, ``quantiles`` (N,
    out, level); of classes ``probs`` (N, class), of truth values (N, out), ``entropy``, ``aleatoric_entropy`` and
    ``epistemic_entropy`` (N,) in nats; ``outside`` (N,), whether any input lies beyond the training data.

    Args:
        bnn: the model.
        draws: site → (draw, \\*shape).
        network: (params, x) → f where it is not the model's own.
        levels: of the quantiles.
        input_range: of the training data; None leaves ``outside`` out.
        wide: the type in which variances and distribution functions are computed.
        narrow: the type of draws and net, if not their own.
    """

    def __init__(
        self,
        bnn: BNN,
        draws: Mapping[str, Tensor],
        *,
        network: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None,
        levels: tuple[float, ...],
        input_range: InputRange | None,
        wide: torch.dtype = torch.float64,
        narrow: torch.dtype | None = None,
    ):
        super().__init__()
        self.evaluation: Evaluation = "rules"
        # a plain attribute: a module here would be a part of this one, with parameters of its own
        self._forward = bnn.forward if network is None else network
        self._likelihood = bnn.likelihood
        self._column = bnn.net.column if isinstance(bnn.net, Exposed) else None
        self._takes_words = takes_words(bnn.net)
        self._dtype = narrow or bnn.dtype
        self._wide = wide
        self._levels = levels
        self._standard_quantiles = [NormalDist().inv_cdf(level) for level in levels]
        self._varying = [
            site
            for site, value in draws.items()
            if len(value) > 1 and not is_same_in_all_draws(value, num_axes=1)
        ]
        self._count = max((len(draws[site]) for site in self._varying), default=1)
        self._has_input_units = bnn.standardizer is not None
        self._has_units = bnn.units is not None
        self._has_range = input_range is not None
        #: what is added, by the names of the buffers
        self._names: dict[str, str] = {}
        self._add("levels", torch.tensor(levels, dtype=wide))
        self._add_params(bnn, draws)
        self._add_units(bnn)
        self._add_range(input_range)

    def _add_params(self, bnn: BNN, draws: Mapping[str, Tensor]) -> None:
        """The net's own buffers, the draws (constant ones once), and the likelihood's fixed parameters."""
        for name, buffer in bnn.net.named_buffers():
            if NET + name not in draws:
                self._add(NET + name, self._narrow(buffer))
        for site, value in draws.items():
            self._add(site, self._narrow(value if site in self._varying else value[0]))
        for name, value in bnn.likelihood.own.fixed.items():
            self._add(f"fixed.{name}", self._narrow(value))

    def _add_units(self, bnn: BNN) -> None:
        if bnn.standardizer is not None:
            self._add("x_mean", bnn.standardizer.x_mean)
            self._add("x_scale", bnn.standardizer.x_scale)
        if bnn.units is not None:
            self._add("y_mean", bnn.units[0])
            self._add("y_scale", bnn.units[1])

    def _add_range(self, input_range: InputRange | None) -> None:
        if input_range is not None:
            self._add("low", input_range.low)
            self._add("high", input_range.high)

    def _narrow(self, value: Tensor) -> Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def _add(self, name: str, value: Tensor) -> None:
        self._names[name] = f"tensor_{len(self._names)}"
        self.register_buffer(self._names[name], value.detach().cpu().contiguous().clone())

    def _tensor(self, name: str) -> Tensor:
        return self.get_buffer(self._names[name])

    @property
    def draws_vary(self) -> bool:
        """Whether any parameter of the net has several draws."""
        return any(site.startswith(NET) for site in self._varying)

    @property
    def has_quantiles(self) -> bool:
        """Whether quantiles are among the outputs: those of mixtures of normals are."""
        likelihood = self._likelihood
        known = likelihood.targets.normal or isinstance(likelihood, CensoredNormal | MixtureDensity)
        return bool(self._levels) and known

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        likelihood, params = self._of_draws()
        f = self._function(self._inputs(x))
        read = self._class_outputs if likelihood.targets.classes else self._number_outputs
        outputs = read(likelihood, f, params)
        if self._has_range:
            beyond = (x < self._tensor("low")) | (x > self._tensor("high"))
            outputs["outside"] = beyond.flatten(1).any(1)
        return outputs

    def _inputs(self, x: Tensor) -> Tensor:
        """Inputs in the units and the type of the net."""
        standard = x
        if self._has_input_units:
            standard = (x - self._tensor("x_mean")) / self._tensor("x_scale")
        if self._column is not None:
            place = torch.arange(x.shape[1]) == self._column % x.shape[1]
            standard = torch.where(place, x, standard)
        if self._takes_words and not standard.is_floating_point():
            return standard
        return standard.to(self._dtype)

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parameters and buffers of the net: those of one value, and those that vary (draw, …)."""
        fixed: dict[str, Tensor] = {}
        varying: dict[str, Tensor] = {}
        for name in self._names:
            if name.startswith(NET):
                values = varying if name in self._varying else fixed
                values[name] = self._tensor(name)
        return fixed, varying

    def _function(self, x: Tensor) -> Tensor:
        """The network's output under every draw, (draw, N, width)."""
        fixed, varying = self._weights()
        if not varying:
            f = self._forward(fixed, x).unsqueeze(0)
            return f.expand(self._count, *f.shape[1:])

        def output(draw: Mapping[str, Tensor]) -> Tensor:
            return self._forward({**fixed, **draw}, x)

        if self.evaluation == "loop":
            outputs = []
            for index in range(self._count):
                outputs.append(output({site: value[index] for site, value in varying.items()}))
            return torch.stack(outputs)
        with WithBatchingRules() if self.evaluation == "rules" else nullcontext():
            return torch.func.vmap(output)(varying)

    def _of_draws(self) -> tuple[Likelihood, dict[str, Tensor]]:
        """The likelihood with its fixed parameters as buffers, and the draws (draw, …) of its others."""
        likelihood = copy.copy(self._likelihood)
        likelihood.own = copy.copy(likelihood.own)
        fixed = self._likelihood.own.fixed
        likelihood.own.fixed = {name: self._tensor(f"fixed.{name}") for name in fixed}
        params = {}
        for site in [*likelihood.own.priors, *likelihood.own.points]:
            value = self._tensor(site)
            if site not in self._varying:
                value = value.expand(self._count, *value.shape)
            params[site] = value
        return likelihood, params

    def _number_outputs(
        self, likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        means, variances = likelihood.mean_variance(f, params)
        aleatoric = variances.to(self._wide).mean(0)
        epistemic = means.to(self._wide).var(0, correction=0)
        outputs = {"mean": self._in_y(means.mean(0))}
        spreads = {
            "sd": aleatoric + epistemic,
            "aleatoric_sd": aleatoric,
            "epistemic_sd": epistemic,
        }
        for name, variance in spreads.items():
            sd = variance.sqrt().to(f.dtype)
            outputs[name] = sd * self._tensor("y_scale") if self._has_units else sd
        if self.has_quantiles:
            quantiles = self._quantiles(likelihood, f, params).to(f.dtype)
            # (level, N, out), so that the units of the outputs meet the last axis
            outputs["quantiles"] = self._in_y(quantiles).movedim(0, -1)
        return outputs

    def _in_y(self, values: Tensor) -> Tensor:
        if not self._has_units:
            return values
        return values * self._tensor("y_scale") + self._tensor("y_mean")

    def _quantiles(self, likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Quantiles (level, N, out) of the mixture of all draws' normals, which lie between those of its components."""
        components = _components(likelihood, f, params)
        loc = components.loc.to(self._wide)
        scale = components.scale.to(self._wide)
        share = components.share.to(self._wide)
        low = torch.stack([(loc + scale * z).amin(0) for z in self._standard_quantiles])
        high = torch.stack([(loc + scale * z).amax(0) for z in self._standard_quantiles])
        if len(loc) == 1:
            return low
        # of P(Y ≤ y) = E[1 + erf((y - loc) / (√2 scale))] / 2
        wanted = 2 * self._tensor("levels").reshape(-1, 1, 1) - 1
        precision = math.sqrt(0.5) / scale
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            reached = (share * torch.erf((middle.unsqueeze(1) - loc) * precision)).sum(1)
            low = torch.where(reached < wanted, middle, low)
            high = torch.where(reached < wanted, high, middle)
        return (low + high) / 2

    def _class_outputs(
        self, likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        by_draw = likelihood.probs(f, params)
        probs = by_draw.mean(0)
        labels = likelihood.targets.kind != "binary"
        entropy = _entropy(probs, labels)
        aleatoric = _entropy(by_draw, labels).mean(0)
        epistemic = (entropy - aleatoric).clamp_min(0.0)
        outputs = {"probs": probs, "entropy": entropy}
        return outputs | {"aleatoric_entropy": aleatoric, "epistemic_entropy": epistemic}


class _Components(NamedTuple):
    """The normals of which a prediction is a mixture: means, sds and shares, (component, N, out)."""

    loc: Tensor
    scale: Tensor
    share: Tensor


def _components(likelihood: Likelihood, f: Tensor, params: Mapping[str, Tensor]) -> _Components:
    """The normals of all draws; the shares are (component, 1, 1) where they are equal."""
    if isinstance(likelihood, MixtureDensity):
        law = likelihood.distribution(f, params).base_dist
        normal = law.component_distribution
        return _Components(
            _as_components(normal.loc),
            _as_components(normal.scale),
            _as_components(law.mixture_distribution.probs / len(f)),
        )
    if isinstance(likelihood, CensoredNormal):
        loc = f
        scale = likelihood.mean_variance(f, params)[1].sqrt()
    else:
        loc, scale = likelihood.loc_scale(f, params)
    return _Components(loc, scale, torch.full_like(loc[:, :1, :1], 1 / len(f)))


def _as_components(values: Tensor) -> Tensor:
    """Values (draw, N, out, K) of the components of a mixture at every draw, as (K·draw, N, out)."""
    return values.movedim(-1, 0).flatten(0, 1)


def _entropy(probs: Tensor, labels: bool) -> Tensor:
    """In nats, over the last axis: of labels, or the sum of truth values' own."""
    terms = _entr(probs) if labels else _entr(probs) + _entr(1 - probs)
    return terms.sum(-1)


def _entr(probs: Tensor) -> Tensor:
    """−p log p, zero at zero; of operators that ONNX has."""
    return -probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
