"""The Gaussian of a trained net's last linear layer, Kronecker-factored, at any width of the prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyrobnn.core.seeding import seeded
from pyrobnn.inference.curvature.gaussian import BlockGaussian, KronBlock
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linearized import SubsetNetwork
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.laplace import Laplace
from pyrobnn.model import BNN, Density
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.catalogue import Categorical
from pyrobnn.model.weight_priors import SitePriors
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.head import Split, split
from pyrobnn.posterior.prediction import CHUNK_SCALARS


@dataclass(frozen=True, eq=False)
class NetRows:
    """Outputs ``f`` (N, K) of a net, targets ``y``, and the ``features`` (N, p) that its last layer is given.

    ``features`` are None where nobody asks for them; ``seen``: the net was trained on these rows.
    """

    f: Tensor
    y: Tensor
    features: Tensor | None
    seen: bool


class LastLayer:
    r"""The layer's curvature A ⊗ B by the eigenvectors V of A and U of B: each prior precision τ costs a product.

    .. math:: A = \sum_n \phi_n \phi_n^\top, \quad B = \frac1N \sum_n H_n, \quad \mathrm{Var}[f_n] = U
        \mathrm{diag}_k\Big(\sum_j \frac{z_{nj}^2}{a_j b_k + \tau}\Big) U^\top, \quad z = V^\top \phi

    with the features :math:`\phi_n` of a row, and a 1 for the bias, and the curvature :math:`H_n` of its log density at
    the output. Of classes, the sum of :math:`H_n = \mathrm{diag}(p) - p p^\top` takes no Jacobian of all of them. Where
    y is normal, τ is in units of the precision of the noise.

    Attributes: ``layer``, ``likelihood`` and the ``rows`` that the curvature is taken at; ``in_values`` (p,) and
        ``in_basis`` V (p, p) of A, over the inputs; ``out_values`` (K,) and ``out_basis`` U (K, K) of B, over the
        outputs; ``tau_unit`` (K,), what τ is counted in: the noise's precision where y is normal, else 1.
    """

    def __init__(
        self,
        layer: nn.Linear,
        likelihood: Likelihood,
        rows: NetRows,
    ):
        self.layer = layer
        self.likelihood = likelihood
        self.rows = rows
        f = rows.f.double()
        if isinstance(likelihood, Categorical):
            probs = f.softmax(-1)
            curvature = torch.diag(probs.mean(0)) - probs.T @ probs / len(probs)
        else:
            roots = likelihood.fisher_root(f, {})
            curvature = torch.einsum("nik,njk->ij", roots, roots) / len(f)
        inputs = self._inputs(rows)
        in_values, self.in_basis = torch.linalg.eigh(inputs.T @ inputs)
        out_values, self.out_basis = torch.linalg.eigh(curvature)
        # rounding may leave them below zero
        self.in_values = in_values.clamp_min(0.0)
        self.out_values = out_values.clamp_min(0.0)
        self.tau_unit = torch.ones_like(self.out_values)
        if likelihood.targets.normal:
            self.tau_unit = self.out_values

    def _inputs(self, rows: NetRows) -> Tensor:
        """What the layer's matrix is multiplied by, (N, p), float64: the features, and a 1 where it has a bias."""
        inputs = cast(Tensor, rows.features).double()
        return inputs if self.layer.bias is None else nn.functional.pad(inputs, (0, 1), value=1.0)

    def precision(self, tau: float) -> Tensor:
        """The posterior precision in the bases, (K, p)."""
        return self.out_values[:, None] * self.in_values + tau * self.tau_unit[:, None]

    def variance(self, rows: NetRows, tau: float) -> Tensor:
        """The variance (N, K) of the outputs in their basis; of rows trained on, each without its own part."""
        var = (self._inputs(rows) @ self.in_basis).square() @ self.precision(tau).reciprocal().T
        if not rows.seen:
            return var
        # leverage at most .95: a row that decides its own output has no prediction without itself
        leverage = (var * self._row_curvature()).clamp_max(0.95)
        return var / (1 - leverage)

    def _row_curvature(self) -> Tensor:
        """Each row's own curvature (N, K) along U, of the rows that the layer was made of."""
        f = self.rows.f.double()
        if isinstance(self.likelihood, Categorical):
            probs = f.softmax(-1)
            return probs @ self.out_basis.square() - (probs @ self.out_basis).square()
        return (self.likelihood.fisher_root(f, {}).mT @ self.out_basis).square().sum(1)

    def without_itself(self) -> NetRows:
        """The rows with outputs of a layer that has not seen them, by a step of Newton's.

        Where all rows are fitted surely there is no curvature left, and the step, which takes it for constant, has no
        bound: it may turn what a row was sure of into its opposite, and no more.
        """
        tau = 1 / float(self.layer.weight.detach().double().square().mean() * self.tau_unit.mean())
        with torch.enable_grad():
            f = self.rows.f.double().requires_grad_()
            (slope,) = torch.autograd.grad(self.likelihood.log_prob(f, self.rows.y, {}).sum(), f)
        step = (self.variance(self.rows, tau) * (slope @ self.out_basis)) @ self.out_basis.T
        if not self.likelihood.targets.normal:
            longest = 1.0 + 2.0 * self.rows.f.double().abs().amax(1, keepdim=True)
            step = torch.where(step.isfinite(), step, 0.0).clamp(-longest, longest)
        return replace(self.rows, f=(f.detach() - step).to(self.rows.f))

    def grid(self) -> list[float]:
        """Precisions τ from that of a prior which says nothing to that which leaves the net as it is, ascending."""
        top = float(self.in_values.max() * (self.out_values / self.tau_unit).max())
        return [10.0 ** (0.75 * k) * top for k in range(-9, 3)]

    def posterior(
        self,
        net: nn.Module,
        name: str,
        likelihood: Likelihood,
        tau: float,
        precision_ratio: Tensor,
        x: Tensor,
        seed: int,
    ) -> Posterior:
        """The posterior with draws of one layer, at the net's own values elsewhere.

        Args:
            net: the trained net.
            name: of the layer in it.
            likelihood: of the targets, with the noise that was found for them.
            tau: precision of the prior, in ``tau_unit``.
            precision_ratio: (K,), precision of that noise by that of the noise that the curvature was taken with.
            x: the inputs.
            seed: of the draws.
        """
        prec = self.precision(tau) * precision_ratio.to(self.in_values)[:, None]
        width = (tau * self.tau_unit * precision_ratio).rsqrt().to(self.rows.f)
        model = BNN(net, _normal_priors(net, name, width), likelihood)
        values = model.initial_values()
        layout = Density(
            model.sample_parameters,
            (),
            points="held",
        )
        points = layout.initial_points
        approximation = self._gaussian(layout, values, prec)
        names = sorted(site.name for site in approximation.sites)
        net_split = split(model, names, values, x[:2])
        jacobian = NetworkJacobian(net_split.head, layout, approximation.loc, points, names)
        with seeded(seed, approximation.loc.device):
            draws = approximation.sample(max(50, min(500, 2 * CHUNK_SCALARS // prec.numel())))
        return make_posterior(
            self._problem(net_split, points, x),
            Laplace(
                structure="kron",
                subset="last_layer",
                predictive="draws",
            ),
            {site_name: value[None] for site_name, value in draws.items()},
            seed=seed,
            timings={},
            approximation=approximation,
            network=SubsetNetwork(jacobian, net_split.features),
            meta={
                "head": net_split.path,
                "layer_products": True,
                "held_sites": [],
            },
        )

    def _gaussian(
        self,
        layout: Density,
        values: Mapping[str, Tensor],
        prec: Tensor,
    ) -> BlockGaussian:
        """The Gaussian of precision ``prec`` (K, p) in the bases, around the layer's own values."""
        sites = sorted(
            (site for site in layout.sites if site.kind == "latent"), key=lambda site: site.name
        )
        mode = layout.unconstrain({site.name: values[site.name] for site in sites})
        # the weight, then the bias: the columns of A
        columns = [
            torch.arange(site.start, site.stop).reshape(len(prec), -1) for site in sites[::-1]
        ]
        index = torch.cat(columns, 1).reshape(-1).to(mode.device)
        scale = torch.ones_like(self.in_values)
        bases = [matrix.to(mode) for matrix in (self.out_basis, self.in_basis, prec, scale)]
        return BlockGaussian(layout, mode, [KronBlock(index, *bases)])

    def _problem(
        self,
        net_split: Split,
        points: Mapping[str, Tensor],
        x: Tensor,
    ) -> Problem:
        """The net and its data; the density is that of the head, of the features that are known already."""
        rows = self.rows
        density = Density(
            partial(net_split.head.pyro_model, num_data=len(x)),
            (rows.features if net_split.path else x, rows.y),
            points="held",
            values=points,
        )
        model = net_split.whole
        return Problem(model, density, x, rows.y, len(x), model.device)


def _normal_priors(net: nn.Module, name: str, width: Tensor) -> SitePriors:
    """Normal priors of the layer ``name``, whose outputs have standard deviations ``width`` (K,) each."""
    priors = {}
    for parameter, value in net.named_parameters():
        if parameter.rpartition(".")[0] == name:
            normal = dist.Normal(0.0, width.reshape(-1, *[1] * (value.dim() - 1)))
            priors[parameter] = normal.expand(value.shape).to_event(value.dim())
    return SitePriors(priors)
