"""The Laplace posterior as an approximation: independent Gaussian blocks around the mode, fixed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyrobnn.model import Density
from pyrobnn.model.density import Site, is_identity
from pyrobnn.posterior.approximation import state_points, state_sites

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.loaders import Data


class Block(Protocol):
    """A zero-mean Gaussian over the coordinates ``index`` (p,) of the flat vector, by its precision Λ."""

    kind: ClassVar[str]

    @property
    def index(self) -> Tensor: ...

    def log_det(self) -> Tensor:
        """log det Λ, scalar."""

    def sample(self, noise: Tensor) -> Tensor:
        """Draws (S, p) from standard normal ``noise`` (S, p)."""

    def quad(self, delta: Tensor) -> Tensor:
        """δᵀ Λ δ for δ (\\*batch, p); (\\*batch,)."""

    def root(self, vectors: Tensor) -> Tensor:
        """``vectors`` Λ^(-1/2), (M, p); times its own transpose it is the covariance of ``vectors`` (M, p).

        It is `sample` transposed: ``sample(root(vectors))`` is ``vectors`` Λ⁻¹.
        """


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """Λ = L Lᵀ with ``prec_tril`` L (p, p)."""

    kind: ClassVar[str] = "dense"
    index: Tensor
    prec_tril: Tensor

    def log_det(self) -> Tensor:
        return 2 * self.prec_tril.diagonal().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(
            self.prec_tril.T,
            noise.to(self.prec_tril).T,
            upper=True,
        ).T

    def quad(self, delta: Tensor) -> Tensor:
        return (delta.to(self.prec_tril) @ self.prec_tril).square().sum(-1)

    def root(self, vectors: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(
            self.prec_tril,
            vectors.to(self.prec_tril).T,
            upper=False,
        ).T


@dataclass(frozen=True, eq=False)
class LowRankBlock:
    """Λ = D (I + V diag(s) Vᵀ) D: ``scale`` 1/D (p,), orthonormal ``basis`` V (p, r), ``values`` s (r,)."""

    kind: ClassVar[str] = "lowrank"
    index: Tensor
    scale: Tensor
    basis: Tensor
    values: Tensor

    def log_det(self) -> Tensor:
        return self.values.double().log1p().sum() - 2 * self.scale.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return self._shrunk(noise.to(self.basis)) * self.scale

    def _shrunk(self, noise: Tensor) -> Tensor:
        # symmetric root of (I + V s Vᵀ)⁻¹, so only the span of V is touched
        return noise + (noise @ self.basis * ((1 + self.values).rsqrt() - 1)) @ self.basis.T

    def quad(self, delta: Tensor) -> Tensor:
        scaled = delta.to(self.basis) / self.scale
        data_squares = (scaled @ self.basis).double().square() * self.values
        return scaled.double().square().sum(-1) + data_squares.sum(-1)

    def root(self, vectors: Tensor) -> Tensor:
        return self._shrunk(vectors.to(self.basis) * self.scale)


@dataclass(frozen=True, eq=False)
class DiagBlock:
    """Λ = diag(``prec``), (p,)."""

    kind: ClassVar[str] = "diag"
    index: Tensor
    prec: Tensor

    def log_det(self) -> Tensor:
        return self.prec.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return noise.to(self.prec) * self.prec.rsqrt()

    def quad(self, delta: Tensor) -> Tensor:
        return (delta.double().square() * self.prec).sum(-1)

    def root(self, vectors: Tensor) -> Tensor:
        return vectors.to(self.prec) * self.prec.rsqrt()


@dataclass(frozen=True, eq=False)
class KronBlock:
    r"""Λ of a layer's matrix (out, in): eigenvectors of both factors and the precision ``prec`` in their basis.

    .. math:: \theta = (U_{out}\, (\varepsilon / \sqrt{\mathrm{prec}})\, U_{in}^\top)\, \mathrm{diag}(\mathrm{scale})
    """

    kind: ClassVar[str] = "kron"
    index: Tensor
    out_basis: Tensor
    in_basis: Tensor
    prec: Tensor
    scale: Tensor

    def log_det(self) -> Tensor:
        return self.prec.double().log().sum() - 2 * len(self.prec) * self.scale.double().log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        rotated = noise.to(self.prec).reshape(-1, *self.prec.shape) * self.prec.rsqrt()
        return ((self.out_basis @ rotated @ self.in_basis.T) * self.scale).flatten(1)

    def quad(self, delta: Tensor) -> Tensor:
        matrices = delta.to(self.prec).reshape(*delta.shape[:-1], *self.prec.shape)
        rotated = self._rotated(matrices / self.scale)
        return (rotated.square() * self.prec).double().sum((-1, -2))

    def root(self, vectors: Tensor) -> Tensor:
        matrices = vectors.to(self.prec).reshape(-1, *self.prec.shape)
        rotated = self._rotated(matrices * self.scale)
        return (rotated * self.prec.rsqrt()).flatten(1)

    def _rotated(self, matrix: Tensor) -> Tensor:
        """A matrix (\\*batch, out, in) in the eigenvectors' basis."""
        return self.out_basis.T @ matrix @ self.in_basis


@dataclass(frozen=True, eq=False)
class RowsBlock:
    """Λ of the rows of a matrix, independent of each other: ``prec_tril`` L (R, m, m) with Λ_r = L_r L_rᵀ."""

    kind: ClassVar[str] = "rows"
    index: Tensor
    prec_tril: Tensor

    def log_det(self) -> Tensor:
        return 2 * self.prec_tril.diagonal(dim1=1, dim2=2).log().sum()

    def sample(self, noise: Tensor) -> Tensor:
        return self._solved(
            self.prec_tril.mT,
            noise,
            upper=True,
        )

    def quad(self, delta: Tensor) -> Tensor:
        rows = delta.to(self.prec_tril).unflatten(-1, self.prec_tril.shape[:2])
        return (rows.unsqueeze(-2) @ self.prec_tril).square().sum((-1, -2, -3))

    def root(self, vectors: Tensor) -> Tensor:
        return self._solved(
            self.prec_tril,
            vectors,
            upper=False,
        )

    def _solved(
        self,
        factors: Tensor,
        vectors: Tensor,
        *,
        upper: bool,
    ) -> Tensor:
        """The row-by-row solutions (M, p) of ``factors`` (R, m, m) for ``vectors`` (M, p)."""
        rows = vectors.to(factors).unflatten(1, factors.shape[:2])
        solved = torch.linalg.solve_triangular(
            factors,
            rows.permute(1, 2, 0),
            upper=upper,
        )
        return solved.permute(2, 0, 1).flatten(1)


KINDS: dict[str, type] = {
    block.kind: block for block in (DenseBlock, LowRankBlock, DiagBlock, KronBlock, RowsBlock)
}

FAMILY = "block_normal"


class BlockNormal(TorchDistribution):
    """Independent zero-mean Gaussian blocks side by side around ``loc``; event (p,), the blocks' coordinates joined."""

    arg_constraints = {}
    support = constraints.real_vector
    # a linear image of the noise, with nothing to train in it
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        blocks: Sequence[Block],
        batch_shape: Sequence[int] = (),
    ):
        self.loc = loc
        self.blocks = list(blocks)
        self.splits = [len(block.index) for block in self.blocks]
        super().__init__(torch.Size(batch_shape), torch.Size([sum(self.splits)]))

    def expand(
        self, batch_shape: Sequence[int], _instance: BlockNormal | None = None
    ) -> BlockNormal:
        """The same in every entry of a batch, such as the particles of an ELBO."""
        return BlockNormal(self.loc, self.blocks, batch_shape)

    def log_det(self) -> Tensor:
        """log det of the precision, float64 scalar."""
        return torch.stack([block.log_det().double() for block in self.blocks]).sum()

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (\\*sample_shape, \\*batch, p)."""
        shape = torch.Size(sample_shape) + self.batch_shape
        noise = torch.randn(
            shape.numel(),
            sum(self.splits),
            dtype=self.loc.dtype,
            device=self.loc.device,
        )
        offsets = []
        for block, block_noise in zip(self.blocks, noise.split(self.splits, 1)):
            offsets.append(block.sample(block_noise).to(self.loc))
        return (torch.cat(offsets, 1) + self.loc).reshape(shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density (\\*batch,), float64."""
        offsets = (value - self.loc).split(self.splits, -1)
        quad = sum(block.quad(offset).double() for block, offset in zip(self.blocks, offsets))
        return 0.5 * (self.log_det() - quad - sum(self.splits) * math.log(2 * math.pi))


class BlockGaussian:
    r"""Gaussian over some coordinates of the flat unconstrained vector, the others held at the mode.

    .. math:: z_{\mathrm{index}} \sim N(z^*_{\mathrm{index}}, \Lambda^{-1})

    Sites outside the subset are constant in the draws and have no part in ``log_prob``.

    Args:
        layout: the density whose latent sites make up the vector (its data are not used).
        loc: the whole flat vector at the mode, (dim,).
        blocks: their indices don't overlap.
        centre: where the curvature was taken, (dim,), if that is not the mode.

    Example:
        >>> import pyro.distributions as dist
        >>> layout = Density(lambda: pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1)))
        >>> block = DiagBlock(torch.tensor([1]), torch.tensor([4.0]))
        >>> BlockGaussian(layout, torch.tensor([3.0, 0.0]), [block]).sample(2)["z"][:, 0]
        tensor([3., 3.])
    """

    def __init__(
        self,
        layout: Density,
        loc: Tensor,
        blocks: Sequence[Block],
        centre: Tensor | None = None,
    ):
        self.layout = layout
        self.loc = loc.detach()
        self.blocks = list(blocks)
        self.centre = self.loc if centre is None else centre.detach()
        self.index = torch.cat([block.index for block in self.blocks])
        self._sorted, self._order = self.index.sort()
        self.distribution = BlockNormal(self.loc[self.index], self.blocks)
        chosen = set(self.index.tolist())
        self.sites = tuple(site for site in layout.sites if site.start in chosen)

    def sample(self, num_draws: int) -> dict[str, Tensor]:
        """Independent draws by site, (num_draws, \\*shape), from torch's present random state; held ones as views."""
        coordinates = self.distribution.sample((num_draws,))
        if not self._holds_sites:
            return self.layout.constrain(self._filled(coordinates))
        held = self.layout.constrain(self.loc.to(self.layout.dtype))
        draws = {name: value.expand(num_draws, *value.shape) for name, value in held.items()}
        for site in self.sites:
            z = self._site_coordinates(coordinates, site).to(self.layout.dtype)
            draws[site.name] = site.transform(z.reshape(-1, *site.unconstrained_shape))
        return draws

    @property
    def _holds_sites(self) -> bool:
        """Whether some sites are held, and those that are drawn can be transformed without them."""
        return len(self.sites) < len(self.layout.sites) and not self.layout.dependent

    def _site_coordinates(self, coordinates: Tensor, site: Site) -> Tensor:
        """The coordinates of a site (\\*batch, size) among those of the blocks (\\*batch, p), else at the mode."""
        site_index = torch.arange(site.start, site.stop).to(self.index)
        place = torch.searchsorted(self._sorted, site_index).clamp_max(len(self.index) - 1)
        is_drawn = self._sorted[place] == site_index
        drawn = coordinates[..., self._order[place]].to(self.loc)
        return torch.where(is_drawn, drawn, self.loc[site.start : site.stop])

    def log_prob(self, draws: Mapping[str, Tensor]) -> Tensor:
        """log q of constrained draws (\\*batch, \\*shape), over the subset's sites; (\\*batch,)."""
        if self._holds_sites:
            return self._log_prob_of_drawn(draws)
        z = self.layout.unconstrain(draws)
        total = self.distribution.log_prob(z[..., self.index])
        for site in self.sites:
            total = total - self.layout.log_jacobian(z, site)
        return total

    def _log_prob_of_drawn(self, draws: Mapping[str, Tensor]) -> Tensor:
        """As :meth:`log_prob`, without a flat vector of all sites, of which most are held."""
        pieces = []
        log_jacobian: Tensor | float = 0.0
        for site in self.sites:
            value = torch.as_tensor(draws[site.name], device=self.loc.device).to(self.layout.dtype)
            batch = value.shape[: value.dim() - len(site.shape)]
            u = site.transform.inv(value)
            pieces.append(u.reshape(*batch, -1))
            if not is_identity(site.transform):
                term = site.transform.log_abs_det_jacobian(u, value)
                log_jacobian = log_jacobian + term.reshape(*batch, -1).sum(-1)
        sites_index = torch.cat([torch.arange(site.start, site.stop) for site in self.sites])
        place = torch.searchsorted(sites_index.to(self.index), self.index)
        return self.distribution.log_prob(torch.cat(pieces, -1)[..., place]) - log_jacobian

    def guide(self, *args: Data, **kwargs: Data) -> dict[str, Tensor]:
        """The Pyro guide: one auxiliary flat site, every model site as its image, and the point parameters."""
        state_points(self.layout)
        z = self._filled(
            pyro.sample(
                "_flat",
                self.distribution,
                infer={"is_auxiliary": True},
            )
        )
        return state_sites(self.layout, z, self.sites)

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Family name and tensors: those of :meth:`compact_state`, and ``<i>.<kind>.<field>`` for every block."""
        tensors = self.compact_state()
        for i, block in enumerate(self.blocks):
            tensors |= {f"{i}.{block.kind}.{name}": value for name, value in vars(block).items()}
        return FAMILY, tensors

    def compact_state(self) -> dict[str, Tensor]:
        """Where it lies, ``loc`` (and ``centre``); where sites are held, which the draws have, of the others alone."""
        tensors = {"loc": self.loc}
        if self.centre is not self.loc:
            tensors["centre"] = self.centre
        if not self._holds_sites:
            return tensors
        return {f"drawn_{name}": self._drawn_coordinates(value) for name, value in tensors.items()}

    def _drawn_coordinates(self, z: Tensor) -> Tensor:
        """Of a whole flat vector (dim,) the coordinates of the sites that are drawn."""
        return torch.cat([z[site.start : site.stop] for site in self.sites])

    def _filled(self, coordinates: Tensor) -> Tensor:
        """The whole flat vector (\\*batch, dim) with the coordinates of the blocks (\\*batch, p), else the mode."""
        z = self.loc.expand(*coordinates.shape[:-1], -1).clone()
        z[..., self.index] = coordinates.to(z)
        return z.to(self.layout.dtype)


def blocks_of_state(state: Mapping[str, Tensor]) -> list[Block]:
    """The blocks of a :meth:`BlockGaussian.state`; none of a compact one."""
    fields: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, value in state.items():
        if key[0].isdigit():
            number, kind, name = key.split(".")
            fields.setdefault((int(number), kind), {})[name] = value
    return [KINDS[kind](**fields[number, kind]) for number, kind in sorted(fields)]


def flat_of_state(
    layout: Density,
    state: Mapping[str, Tensor],
    names: Sequence[str],
    draws: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Loc and centre (dim,) of a state, the second None where it is the first; the sites ``names`` are drawn."""
    if "loc" in state:
        return state["loc"], state.get("centre")
    held = layout.unconstrain({site.name: draws[site.name][0, 0] for site in layout.sites})
    index = torch.cat(
        [torch.arange(site.start, site.stop) for site in layout.sites if site.name in names]
    ).to(held.device)
    loc = held.to(state["drawn_loc"]).index_copy(0, index, state["drawn_loc"])
    if "drawn_centre" not in state:
        return loc, None
    return loc, loc.index_copy(0, index, state["drawn_centre"])
