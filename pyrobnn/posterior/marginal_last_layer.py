r"""A net whose last layer is integrated out: where prior and noise are normal, so are its weights given all else.

.. math:: p(y \mid u) = N(\Phi_u m, \; \sigma^2 I + \Phi_u S^2 \Phi_u^\top)

with the features Φ that the other weights u make of the inputs, and the prior N(m, S²) of the last layer. Chains of u
alone need not follow the narrow valleys in which a feature and its weight make up for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.distribution_kinds import elementwise, is_normal
from pyrobnn.model.likelihoods.base import SCALE
from pyrobnn.model.likelihoods.catalogue import HomoskedasticGaussian
from pyrobnn.model.log_terms import without_validation

#: units before the last layer, of all outputs together, up to which its matrices cost little beside the features
_MOST_UNITS = 200


class _Fit(NamedTuple):
    """The last layer given all else: a Bayesian linear regression of each output.

    Args:
        weights: posterior mean, (out, unit).
        factor: Cholesky factor of the precision, in units of the prior, (out, unit, unit).
        error: of the rows at the mean, (N, out).
        log_marginal: log density of the targets, the weights integrated out, in nats.
    """

    weights: Tensor
    factor: Tensor
    error: Tensor
    log_marginal: Tensor


class Completed(NamedTuple):
    """Vectors of all sites (chain, dim), and their log joint density (chain,)."""

    z: Tensor
    log_density: Tensor


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The last layer of a net with normal noise, and what comes before it.

    Args:
        density: of the whole net.
        trunk: the net without its last layer.
        names: the sites of the last layer, its weight and perhaps its bias.
        others: coordinates of all other sites.
        loc, scale: of the prior of the last layer, (out, unit), the bias last.
    """

    density: Density
    trunk: BNN
    names: tuple[str, ...]
    others: Tensor
    loc: Tensor
    scale: Tensor

    @classmethod
    def of(cls, density: Density) -> LastLayer | None:
        """That of a density's net; None where its weights are not normal given all else, or there is nothing else."""
        model = density.owner
        if not isinstance(model, BNN) or type(model.likelihood) is not HomoskedasticGaussian:
            return None
        names = _names_of_last(model)
        drawn = {site.name for site in density.sites if site.kind == "latent"}
        is_whole = len(drawn) == len(density.sites) and drawn <= model.priors.keys()
        if not names or not is_whole or not drawn > set(names) or density.dependent:
            return None
        priors = [elementwise(model.priors[name]) for name in names]
        loc, scale = (
            torch.cat([_as_matrix(getattr(prior, part)) for prior in priors], 1)
            for part in ("loc", "scale")
        )
        if loc.numel() > _MOST_UNITS:
            return None
        others = [
            torch.arange(site.start, site.stop) for site in density.sites if site.name not in names
        ]
        return cls(
            density,
            model.with_nets(_without_last),
            names,
            torch.cat(others).to(density.device),
            loc.double(),
            scale.double(),
        )

    def num_operations(self, rows: int) -> int:
        """Of the matrices of one gradient: products of the features of so many rows, a factor and its inverse."""
        num_outputs, num_units = self.loc.shape
        if rows < num_units:
            return num_outputs * (4 * rows**2 * num_units + 3 * rows**3)
        return 4 * rows * num_units**2 + 3 * num_outputs * num_units**3

    def log_density(self, z: Tensor) -> Tensor:
        """Log density of the other sites, the last layer integrated out, at ``z`` (other,), in float64; a scalar."""
        values, log_others = self._others_at(z)
        log_marginal, *_ = _LogMarginal.apply(
            self._features(values),
            self._noise(values),
            self,
        )
        return log_others + log_marginal

    def log_evidence(self, values: dict[str, Tensor]) -> float:
        """Of the data, in nats: the mean of their marginal density over draws (draw, …) of the other sites' prior."""

        def log_marginal(draw: dict[str, Tensor]) -> Tensor:
            return self.fit(self._features(draw), self._noise(draw)).log_marginal

        by_draw = torch.func.vmap(log_marginal)(values)
        return float(by_draw.logsumexp(0)) - math.log(len(by_draw))

    def complete(self, z: Tensor, random: torch.Generator) -> Completed:
        """The other sites ``z`` (chain, other) with the last layer drawn given them."""
        size = (len(z), *self.loc.shape, 1)
        normals = torch.randn(
            size,
            generator=random,
            dtype=torch.float64,
        ).to(z.device)
        return Completed(*torch.func.vmap(self._completed)(z, normals))

    def _completed(self, z: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        """One vector of all sites (dim,) and its log joint density, of standard normals (out, unit, 1)."""
        values, log_others = self._others_at(z)
        fit = self.fit(self._features(values), self._noise(values))
        deviation = torch.linalg.solve_triangular(
            fit.factor.mT,
            normals,
            upper=True,
        )[..., 0]
        weights = fit.weights + self.scale * deviation
        log_determinant = fit.factor.diagonal(dim1=1, dim2=2).log().sum()
        log_scale = self.scale.log().sum() + 0.5 * math.log(2 * math.pi) * weights.numel()
        log_given = log_determinant - 0.5 * normals.square().sum() - log_scale
        full = self._vector(z)
        start = 0
        for name in self.names:
            site = self.density.site(name)
            stop = start + site.size // len(weights)
            value = weights[:, start:stop].reshape(-1).to(z)
            index = torch.arange(
                site.start,
                site.stop,
                device=z.device,
            )
            full = full.index_copy(0, index, value)
            start = stop
        return full, log_others + fit.log_marginal + log_given

    def _vector(self, z: Tensor) -> Tensor:
        """A vector of all sites (dim,), zero at the last layer."""
        return z.new_zeros(self.density.dim).index_copy(0, self.others, z)

    def _others_at(self, z: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The values of the other sites, and the log density of their prior in unconstrained space."""
        full = self._vector(z)
        values = self.density.constrain(full)
        log_prior = self.density.log_jacobian(full).double()
        for name in self.names:
            del values[name]
        with without_validation():
            for name, value in values.items():
                terms = elementwise(self.trunk.priors[name]).log_prob(value)
                log_prior = log_prior + terms.sum(dtype=torch.float64)
        return values, log_prior

    def _features(self, values: dict[str, Tensor]) -> Tensor:
        """What the last layer is linear in, (N, unit), in float64: a column of ones for its bias is the last."""
        x = self.density.args[0]
        features = self.trunk.forward(self.density.initial_points | values, x).double()
        if len(self.names) == 1:
            return features
        return torch.cat([features, torch.ones_like(features[:, :1])], 1)

    def _noise(self, values: dict[str, Tensor]) -> Tensor:
        """Standard deviation of the noise of each output, (out,), in float64."""
        given = self.density.initial_points | values
        y = self.density.args[1]
        scale = self.trunk.likelihood.own.value(SCALE.rpartition(".")[2], y, given)
        return scale.double().reshape(-1).expand(len(self.loc))

    def fit(self, features: Tensor, noise: Tensor) -> _Fit:
        """The regression of the targets on features (N, unit), under noise (out,)."""
        y = self.density.args[1].double()
        gram = features.mT @ features
        pull = (features.mT @ y).mT - self.loc @ gram
        shrunk = self.scale / noise[:, None]
        precision = shrunk[:, :, None] * gram * shrunk[:, None, :]
        precision = precision + torch.eye(
            len(gram),
            dtype=gram.dtype,
            device=gram.device,
        )
        factor = torch.linalg.cholesky_ex(precision).L
        deviation = torch.cholesky_solve((shrunk / noise[:, None] * pull)[..., None], factor)[
            ..., 0
        ]
        weights = self.loc + self.scale * deviation
        error = y - features @ weights.mT
        squares = (error / noise).square().sum() + deviation.square().sum()
        log_determinant = factor.diagonal(dim1=1, dim2=2).log().sum()
        log_noise = len(y) * (noise.log() + 0.5 * math.log(2 * math.pi)).sum()
        return _Fit(weights, factor, error, -0.5 * squares - log_determinant - log_noise)

    def slopes_by_rows(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Log marginal density and its slopes along features and noise, by the covariance of fewer rows than units.

        .. math:: K = \sigma^2 I + \Phi S^2 \Phi^\top, \quad \alpha = K^{-1} (y - \Phi m), \quad
            \frac{\partial}{\partial \Phi} = \alpha (m + S^2 \Phi^\top \alpha)^\top - K^{-1} \Phi S^2, \quad
            \frac{\partial}{\partial \sigma} = \sigma (|\alpha|^2 - \operatorname{tr} K^{-1})
        """
        y = self.density.args[1].double()
        error = (y - features @ self.loc.mT).mT[..., None]
        scaled = features * self.scale.square()[:, None, :]
        identity = torch.eye(
            len(features),
            dtype=features.dtype,
            device=features.device,
        )
        covariance = scaled @ features.mT + noise.square()[:, None, None] * identity
        factor = torch.linalg.cholesky_ex(covariance).L
        inverse = _inverse(factor)
        alpha = inverse @ error
        weights = self.loc + (scaled.mT @ alpha)[..., 0]
        slope = alpha[..., 0].mT @ weights - (inverse @ scaled).sum(0)
        traces = inverse.diagonal(dim1=1, dim2=2).sum(1)
        noise_slope = noise * (alpha.square().sum((1, 2)) - traces)
        log_determinant = factor.diagonal(dim1=1, dim2=2).log().sum()
        log_marginal = -0.5 * (error * alpha).sum() - log_determinant
        return log_marginal - 0.5 * y.numel() * math.log(2 * math.pi), slope, noise_slope


class _LogMarginal(torch.autograd.Function):
    r"""Log marginal density of the targets given features (N, unit) and noise (out,), its derivatives written out.

    .. math:: \frac{\partial}{\partial \Phi} = \frac{e w^\top - \Phi C}{\sigma^2}, \qquad
        \frac{\partial}{\partial \sigma} = \frac{|e|^2}{\sigma^3} - \frac{N - k + \operatorname{tr} S^{-2} C}{\sigma}

    of each output, with error e, mean w and covariance C of its k weights.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, noise: Tensor, layer: LastLayer) -> tuple[Tensor, Tensor, Tensor]:
        """The log density (), and its slopes along features and noise."""
        if len(features) < features.shape[1]:
            return layer.slopes_by_rows(features, noise)
        fit = layer.fit(features, noise)
        covariance = _inverse(fit.factor)
        shrunk = layer.scale / noise[:, None]
        pooled = (shrunk[:, :, None] * covariance * shrunk[:, None, :]).sum(0)
        slope = (fit.error / noise.square()) @ fit.weights - features @ pooled
        num_free = (
            features.shape[0] - features.shape[1] + covariance.diagonal(dim1=1, dim2=2).sum(1)
        )
        noise_slope = fit.error.square().sum(0) / noise**3 - num_free / noise
        return fit.log_marginal, slope, noise_slope

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        """Keep the slopes."""
        _, slope, noise_slope = output
        ctx.mark_non_differentiable(slope, noise_slope)
        ctx.save_for_backward(slope, noise_slope)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        """The slopes."""
        slope, noise_slope = ctx.saved_tensors
        return gradient * slope, gradient * noise_slope, None


def _names_of_last(model: BNN) -> tuple[str, ...]:
    """The sites of the last layer of a net, its weight and perhaps its bias; none unless both have normal priors."""
    net = model.net
    if type(net) is not nn.Sequential or type(net[-1]) is not nn.Linear:
        return ()
    module = next(reversed(dict(net.named_children())))
    names = tuple(f"{NET}{module}.{name}" for name, _ in net[-1].named_parameters())
    # a parameter that another module shares is no site of the last layer alone
    inside = {id(parameter) for parameter in net[:-1].parameters()}
    is_shared = any(id(parameter) in inside for parameter in net[-1].parameters())
    normal = all(
        name in model.priors and is_normal(elementwise(model.priors[name])) for name in names
    )
    return names if normal and not is_shared else ()


def _inverse(factor: Tensor) -> Tensor:
    """The inverse (…, unit, unit) of what a Cholesky factor is of; not finite, with no error, where it is singular."""
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.cholesky_solve(identity.expand_as(factor), factor)


def _without_last(net: nn.Module) -> nn.Module:
    return cast(nn.Sequential, net)[:-1]


def _as_matrix(values: Tensor) -> Tensor:
    """Values (out, unit), or (out,) as a column."""
    return values if values.dim() == 2 else values[:, None]
