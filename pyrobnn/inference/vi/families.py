"""Gaussian guides and a flow as arithmetic on one flat parameter vector: draw, log density, moments, entropy.

Every family lives in the unconstrained space of a :class:`pyrobnn.Density`'s latent sites, and is a few tensor
operations, so that it disappears into the compiled step. ``pyro_guides`` wraps Pyro's own guides the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyrobnn.core.checks import Refused
from pyrobnn.core.memory import require
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.model import Density
from pyrobnn.model.density import Rows, Site
from pyrobnn.posterior.approximation import FAMILIES, Approximation, FlatApproximation

_LOG_2PI = math.log(2 * math.pi)
#: low-rank columns relative to the scales: their size at the start, and an optimiser's step of them. Collinear weights
#: need columns many times the scale, which a step of one takes too long to reach.
_COLUMN_START = 0.2
_COLUMN_STEP = 2.0


class Moments(NamedTuple):
    """Mean and marginal variance (dim,) of a Gaussian family, and its entropy () in nats."""

    mean: Tensor
    var: Tensor
    entropy: Tensor


class Draw(NamedTuple):
    """One draw ``z`` (dim,) of a guide, its log density (), and moments of the family where they have a closed form.

    ``score`` is the gradient of log q with respect to ``z`` (dim,), a constant; None where it is not known.
    """

    z: Tensor
    log_q: Tensor
    moments: Moments | None
    score: Tensor | None


class Family(Protocol):
    """What the ELBO asks of a guide; ``phi`` is its flat parameter vector."""

    size: int
    #: whether the coordinates are independent, so that a closed form may condition on the other sites
    factorized: bool

    def initial(self) -> Tensor:
        """Where the optimisation starts, (size,)."""

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        """One reparameterised draw."""

    def approximation(self, phi: Tensor, layout: Density) -> Approximation:
        """The fitted guide as an approximation over the latent sites of ``layout``."""

    def at_rows(self, whole: Density, some: Density) -> Family:
        """The guide of the sites of ``some`` rows of a ``whole`` density, a function of the same parameters.

        Raises:
            Refused: a guide that has no law of some rows alone.
        """

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        """Which parameters (size,) belong to a row of a plate: a batch without it leaves them out. None: none does."""


def without_rows(family: Family, some: Density) -> Family:
    """A guide whose coordinates depend on each other, of a density where no latent site has a value for each row.

    Raises:
        Refused: a site has.
    """
    for site in some.sites:
        if some.rows is not None and some.rows.axes.get(site.name):
            raise Refused(
                f"the latent site {site.name!r} has a value for each row, and this guide draws all rows together: with "
                "mini-batches use guide='mean_field', AutoNormal or a guide program (x, y), or leave the batches out"
            )
    return family


class _Normal:
    """Normals whose parameters begin with the means ``loc`` and softplus⁻¹ of the standard deviations."""

    factorized = False

    def __init__(
        self,
        loc: Tensor,
        init_scale: float,
        num_further: int,
    ):
        self.loc = loc
        self.init_scale = init_scale
        self.dim = len(loc)
        self.size = 2 * self.dim + num_further

    def initial(self) -> Tensor:
        further = self.loc.new_zeros(self.size - 2 * self.dim)
        return torch.cat([self.loc, raw_scale(self.loc, self.init_scale), further])

    def at_rows(self, whole: Density, some: Density) -> Family:
        return without_rows(cast(Family, self), some)

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        return None

    def parts(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means and standard deviations, both (dim,), and the further parameters."""
        loc, raw, further = phi.split([self.dim, self.dim, self.size - 2 * self.dim])
        return loc, F.softplus(raw), further


class MeanField(_Normal):
    r"""Independent normals, :math:`z_i = \mu_i + \sigma_i \epsilon_i`.

    ``max_scale`` is a cap on the standard deviations, or None.

    Caveat: it matches conditional, not marginal, variances: they are underestimated where weights correlate.
    """

    factorized = True

    def __init__(
        self,
        loc: Tensor,
        init_scale: float,
        max_scale: float | None = None,
    ):
        super().__init__(loc, init_scale, 0)
        self.max_scale = max_scale

    def initial(self) -> Tensor:
        if self.max_scale is None:
            return super().initial()
        share = self.init_scale / self.max_scale
        return torch.cat([self.loc, torch.full_like(self.loc, math.log(share / (1 - share)))])

    def loc_scale(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, both (dim,)."""
        return phi[: self.dim], self.scale(phi[self.dim :])

    def scale(self, raw: Tensor) -> Tensor:
        """Standard deviations of their parameters."""
        if self.max_scale is None:
            return F.softplus(raw)
        # a sigmoid and not a clamp: a scale that has reached the cap can still come back
        return self.max_scale * torch.sigmoid(raw)

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale = self.loc_scale(phi)
        epsilon = noise.normal(loc)
        half_log_det = scale.log().sum(dtype=torch.float64)
        moments = Moments(loc, scale.square(), _entropy(half_log_det, self.dim))
        return Draw(
            loc + scale * epsilon,
            _log_q(epsilon, half_log_det),
            moments,
            -(epsilon / scale).detach(),
        )

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, scale = self.loc_scale(phi)
        return FlatApproximation(layout, "normal", {"loc": loc, "scale": scale})

    def at_rows(self, whole: Density, some: Density) -> MeanFieldAtRows:
        return MeanFieldAtRows(self, whole, some)

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        is_of_row = torch.zeros(
            self.dim,
            dtype=torch.bool,
            device=self.loc.device,
        )
        for site in whole.sites:
            if site.kind == "latent" and rows.axes.get(site.name):
                is_of_row[site.start : site.stop] = True
        # means, then standard deviations
        return is_of_row.repeat(2) if bool(is_of_row.any()) else None


class MeanFieldAtRows:
    """The normals of the sites of some rows, among those of all: a function of the parameters of all.

    What belongs to a row counts for all rows that it stands for, in the entropy and in log q.
    """

    factorized = True

    def __init__(
        self,
        mean_field: MeanField,
        whole: Density,
        some: Density,
    ):
        self.mean_field = mean_field
        self.size = mean_field.size
        self.some = some
        places = []
        factors = []
        for site in some.sites:
            if site.kind == "latent" and some.rows is not None:
                places.append(_places(whole.site(site.name), site, some.rows))
                factors.append(
                    torch.full(
                        (site.size,),
                        some.rows.factor(site.name),
                        dtype=some.dtype,
                        device=some.device,
                    )
                )
        #: of the coordinates of these rows among those of all, and how many each stands for
        self.places = torch.cat(places)
        self.factors = torch.cat(factors)

    def initial(self) -> Tensor:
        return self.mean_field.initial()

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        dim = self.mean_field.dim
        # the parameters of these rows first: the functions of those of all rows would cost as much as the step
        loc = phi[:dim][self.places]
        raw = phi[dim:][self.places]
        scale = self.mean_field.scale(raw)
        epsilon = noise.normal(loc)
        half_log_det = (self.factors * scale.log()).sum(dtype=torch.float64)
        log_q = -0.5 * (self.factors * epsilon.square()).sum(dtype=torch.float64)
        return Draw(
            loc + scale * epsilon,
            log_q - half_log_det - 0.5 * dim * _LOG_2PI,
            Moments(loc, scale.square(), _entropy(half_log_det, dim)),
            -(self.factors * epsilon / scale).detach(),
        )

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        return self.mean_field.approximation(phi, layout)

    def at_rows(self, whole: Density, some: Density) -> MeanFieldAtRows:
        return MeanFieldAtRows(self.mean_field, whole, some)

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        return self.mean_field.of_rows(whole, rows)


def _places(whole: Site, some: Site, rows: Rows) -> Tensor:
    """Where the coordinates (size,) of some rows of a site are in the vector of all."""
    device = next(iter(rows.numbers.values())).device
    places = torch.arange(
        whole.start,
        whole.stop,
        device=device,
    )
    places = places.reshape(whole.unconstrained_shape)
    for plate, axis in rows.axes[some.name].items():
        # an axis that the plate leaves at one value is none of rows
        if some.unconstrained_shape[axis] == len(rows.numbers[plate]):
            places = places.index_select(axis, rows.numbers[plate])
    return places.reshape(-1)


class FullRank(_Normal):
    r"""A normal with any covariance, :math:`z = \mu + \sigma \odot (I + C / \sqrt{n}) \epsilon`, C strictly lower.

    Raises:
        ValueError: the covariance factor would not fit in memory.
    """

    def __init__(self, loc: Tensor, init_scale: float):
        super().__init__(loc, init_scale, len(loc) * (len(loc) - 1) // 2)
        # the optimiser's copies of the matrix, and those of a step
        needed = 11 * (self.dim + 1) * self.dim * loc.element_size()
        require(
            needed,
            loc.device,
            f"guide='full_rank' of {self.dim} weights",
            "use guide='low_rank' or 'mean_field'",
        )
        row, column = torch.tril_indices(
            self.dim,
            self.dim,
            -1,
            device=loc.device,
        )
        # where each entry of the matrix is read from: the strict lower triangle, else a slot that is masked
        self._source = torch.zeros(
            self.dim,
            self.dim,
            dtype=torch.long,
            device=loc.device,
        )
        self._source[row, column] = torch.arange(len(row), device=loc.device)
        # Adam moves every parameter by lr, and so a row of n of them by √n lr: divided by √n, a row moves like a scale.
        # Without it the noise of many small entries makes a factor whose inverse grows exponentially with n.
        unit = torch.full(
            (self.dim, self.dim),
            1 / math.sqrt(self.dim),
            dtype=loc.dtype,
            device=loc.device,
        )
        self._lower = unit.tril(-1)
        self._eye = torch.eye(
            self.dim,
            dtype=loc.dtype,
            device=loc.device,
        )

    def factor(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (dim,), diagonal (dim,) and Cholesky factor (dim, dim)."""
        loc, scale, entries = self.parts(phi)
        if self.dim == 1:
            return loc, scale, scale[:, None]  # no lower triangle to read from
        return loc, scale, scale[:, None] * (self._eye + entries[self._source] * self._lower)

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale, tril = self.factor(phi)
        epsilon = noise.normal(loc)
        half_log_det = scale.log().sum(dtype=torch.float64)
        moments = Moments(loc, tril.square().sum(1), _entropy(half_log_det, self.dim))
        score = -torch.linalg.solve_triangular(
            tril.detach().T,
            epsilon[:, None],
            upper=True,
        )[:, 0]
        return Draw(loc + tril @ epsilon, _log_q(epsilon, half_log_det), moments, score)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, _, tril = self.factor(phi)
        # log q solves with the factor: float64
        return FlatApproximation(
            layout, "full_rank", {"loc": loc.double(), "scale_tril": tril.double()}
        )


class LowRank(_Normal):
    r"""A normal of diagonal plus low-rank covariance, :math:`z = \mu + \sigma \odot (\epsilon + V \epsilon')`.

    ``rank`` is the number of columns of V; ``seed`` is of its small random start, without which its gradient vanishes.
    """

    def __init__(
        self,
        loc: Tensor,
        init_scale: float,
        rank: int,
        seed: int,
    ):
        self.seed = seed
        self.rank = min(rank, len(loc))
        super().__init__(loc, init_scale, len(loc) * self.rank)

    def initial(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(
            self.dim * self.rank,
            generator=generator,
            dtype=torch.float64,
        )
        columns = columns.to(self.loc) * (_COLUMN_START / _COLUMN_STEP)
        return torch.cat([super().initial()[: 2 * self.dim], columns])

    def loc_scale_columns(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (dim,), diagonal standard deviations (dim,) and columns (dim, rank)."""
        loc, scale, columns = self.parts(phi)
        # in units of the scale, which an optimiser's step of lr would dwarf where weights are well determined
        return loc, scale, scale[:, None] * columns.reshape(self.dim, self.rank) * _COLUMN_STEP

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        loc, scale, columns = self.loc_scale_columns(phi)
        offset = columns @ noise.normal(columns[0]) + scale * noise.normal(loc)
        # Woodbury: determinant and quadratic form through the (rank, rank) capacitance
        whitened = columns / scale[:, None]
        u = offset / scale
        chol = self._capacitance_tril(whitened)
        inner = torch.linalg.solve_triangular(
            chol,
            (whitened.T @ u)[:, None],
            upper=False,
        )
        half_log_det = scale.log().sum(dtype=torch.float64) + chol.diagonal().log().sum(
            dtype=torch.float64
        )
        quadratic = u.square().sum(dtype=torch.float64) - inner.square().sum(dtype=torch.float64)
        log_q = -0.5 * quadratic - half_log_det - 0.5 * self.dim * _LOG_2PI
        var = scale.square() + columns.square().sum(1)
        explained = (
            whitened
            @ torch.linalg.solve_triangular(
                chol.T,
                inner,
                upper=True,
            )[:, 0]
        )
        score = -((u - explained) / scale).detach()
        return Draw(loc + offset, log_q, Moments(loc, var, _entropy(half_log_det, self.dim)), score)

    def _capacitance_tril(self, whitened: Tensor) -> Tensor:
        """Cholesky factor (rank, rank) of I + VᵀV for columns V (dim, rank) in units of the scale."""
        eye = torch.eye(
            self.rank,
            dtype=whitened.dtype,
            device=whitened.device,
        )
        # a fit that diverges shows it by its loss: NaN here, where cholesky would raise an error of its own
        chol, failed = torch.linalg.cholesky_ex(eye + whitened.T @ whitened)
        return torch.where(failed > 0, torch.nan, chol)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        loc, scale, columns = self.loc_scale_columns(phi)
        state = {
            "loc": loc,
            "cov_factor": columns,
            "cov_diag": scale.square(),
        }
        # LowRankMultivariateNormal inverts the capacitance: float64
        return FlatApproximation(
            layout, "low_rank", {name: value.double() for name, value in state.items()}
        )


def raw_scale(loc: Tensor, scale: float) -> Tensor:
    """What softplus makes ``scale`` of, for every coordinate of ``loc``."""
    return torch.full_like(loc, math.log(math.expm1(scale)))


def _log_q(noise: Tensor, half_log_det: Tensor) -> Tensor:
    return (
        -0.5 * noise.square().sum(dtype=torch.float64) - half_log_det - 0.5 * len(noise) * _LOG_2PI
    )


def _entropy(half_log_det: Tensor, dim: int) -> Tensor:
    return half_log_det + 0.5 * dim * (1 + _LOG_2PI)


#: a coupling multiplies by at most e^±2, so that no early step can blow up
_LOG_SCALE_BOUND = 2.0
#: an optimiser's step of the networks relative to that of locations and scales: the fit diverges at the same step
_NETWORK_STEP = 0.03


class CouplingFlow:
    r"""Affine couplings of the two halves of the vector, exchanged after each, then a shift and a scale per weight.

    .. math:: b \leftarrow b \odot e^{s(a)} + t(a), \qquad z = \mu + \sigma \odot u

    The networks s, t (one hidden layer) start at zero: the flow starts as the mean-field normal.

    Reference: `Density estimation using Real NVP (Dinh et al., 2017) <https://arxiv.org/abs/1605.08803>`_.
    """

    factorized = False

    def __init__(
        self,
        loc: Tensor,
        init_scale: float,
        seed: int,
        num_layers: int = 4,
    ):
        self.loc = loc
        self.init_scale = init_scale
        self.seed = seed
        self.dim = len(loc)
        if self.dim < 2:
            raise Refused(
                "guide='flow' needs at least two weights to couple: use guide='mean_field'"
            )
        self.shapes: dict[str, tuple[int, ...]] = {"loc": (self.dim,), "raw_scale": (self.dim,)}
        for k in range(num_layers):
            fixed, moved = _sizes(self.dim, k)
            hidden = 64
            self.shapes |= {
                f"{k}.in": (hidden, fixed),
                f"{k}.in_bias": (hidden,),
                f"{k}.out": (2 * moved, hidden),
                f"{k}.out_bias": (2 * moved,),
            }
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for name, shape in self.shapes.items():
            if name == "loc":
                parts.append(self.loc)
            elif name == "raw_scale":
                parts.append(raw_scale(self.loc, self.init_scale))
            elif name.endswith(".in"):
                scale = 1 / (math.sqrt(shape[1]) * _NETWORK_STEP)
                parts.append(torch.randn(shape, generator=generator).to(self.loc) * scale)
            else:
                parts.append(self.loc.new_zeros(shape))
        return torch.cat([tensor.reshape(-1) for tensor in parts])

    def state(self, phi: Tensor) -> dict[str, Tensor]:
        """The named tensors of a flat parameter vector."""
        parts = phi.split([math.prod(shape) for shape in self.shapes.values()])
        state = {}
        for (name, shape), tensor in zip(self.shapes.items(), parts, strict=True):
            step = 1.0 if name in ("loc", "raw_scale") else _NETWORK_STEP
            state[name] = tensor.reshape(shape) * step
        return state

    def draw(self, phi: Tensor, noise: Noise) -> Draw:
        z, log_q = _push(self.state(phi), noise.normal(self.loc))
        # no score: along the path alone the gradient of a flow has heavy tails, and the fit diverges
        return Draw(z, log_q, None, None)

    def approximation(self, phi: Tensor, layout: Density) -> FlatApproximation:
        return FlatApproximation(layout, "flow", self.state(phi))

    def at_rows(self, whole: Density, some: Density) -> Family:
        return without_rows(self, some)

    def of_rows(self, whole: Density, rows: Rows) -> Tensor | None:
        return None


def _push(state: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """z and log q(z) of standard normal noise, (\\*batch, dim) and (\\*batch,)."""
    scale = F.softplus(state["raw_scale"])
    log_q = -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1) - scale.log().sum()
    u = noise
    for k in range(_num_layers(state)):
        fixed, moved = u.split(list(_sizes(u.shape[-1], k)), -1)
        log_scale, shift = _coupling(state, k, fixed)
        # exchanged, so that the next layer moves what this one left
        u = torch.cat([moved * log_scale.exp() + shift, fixed], -1)
        log_q = log_q - log_scale.sum(-1)
    return state["loc"] + scale * u, log_q.double()


def _coupling(state: Mapping[str, Tensor], k: int, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Log scale and shift of the moved half, given the fixed one."""
    hidden = torch.tanh(F.linear(fixed, state[f"{k}.in"], state[f"{k}.in_bias"]))
    raw, shift = F.linear(hidden, state[f"{k}.out"], state[f"{k}.out_bias"]).chunk(2, -1)
    return _LOG_SCALE_BOUND * torch.tanh(raw / _LOG_SCALE_BOUND), shift


def _sizes(dim: int, k: int) -> tuple[int, int]:
    """Sizes of the fixed and the moved half in layer k: the exchange alternates them when dim is odd."""
    half = dim // 2
    return (half, dim - half) if k % 2 == 0 else (dim - half, half)


def _num_layers(state: Mapping[str, Tensor]) -> int:
    return sum(name.endswith(".in") for name in state)


class FlowDistribution(TorchDistribution):
    """The distribution of a coupling flow's output; event shape (dim,)."""

    arg_constraints = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, state: Mapping[str, Tensor]):
        self.flow = dict(state)
        super().__init__(
            torch.Size(),
            self.flow["loc"].shape,
            validate_args=False,
        )

    def expand(
        self, batch_shape: Sequence[int], _instance: FlowDistribution | None = None
    ) -> FlowDistribution:
        """Itself: there is one flow."""
        if torch.Size(batch_shape):
            raise NotImplementedError("a fitted flow has no batch of parameters")
        return self

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (\\*sample_shape, dim)."""
        loc = self.flow["loc"]
        noise = torch.randn(
            *sample_shape,
            *loc.shape,
            dtype=loc.dtype,
            device=loc.device,
        )
        return _push(self.flow, noise)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density (\\*batch,) of values (\\*batch, dim)."""
        scale = F.softplus(self.flow["raw_scale"])
        u = (value - self.flow["loc"]) / scale
        total = -scale.log().sum()
        for k in reversed(range(_num_layers(self.flow))):
            moved, fixed = u.split(list(_sizes(u.shape[-1], k))[::-1], -1)
            log_scale, shift = _coupling(self.flow, k, fixed)
            u = torch.cat([fixed, (moved - shift) * (-log_scale).exp()], -1)
            total = total - log_scale.sum(-1)
        return total - 0.5 * (u.square() + math.log(2 * math.pi)).sum(-1)


# so that a saved flow is found by its name
FAMILIES["flow"] = FlowDistribution
