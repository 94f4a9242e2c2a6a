"""A fitted approximation q: draws, log density, and a Pyro guide over the model's own sites."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self, cast

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.threads import process_state
from pyrobnn.model import BNN, Density
from pyrobnn.model.density import Program, Site
from pyrobnn.model.dtypes import types_explained
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior.prediction import CHUNK_SCALARS, LARGE_LAYER, widest_layer

#: family of distributions over the flat vector → how its state makes one; a method adds its own
FAMILIES: dict[str, Callable[[Mapping[str, Tensor]], Any]] = {
    "normal": lambda state: dist.Normal(state["loc"], state["scale"]).to_event(1),
    "full_rank": lambda state: dist.MultivariateNormal(
        state["loc"], scale_tril=state["scale_tril"]
    ),
    "low_rank": lambda state: dist.LowRankMultivariateNormal(
        state["loc"], state["cov_factor"], state["cov_diag"]
    ),
}

#: draws of which the log joint is taken together
DRAWS_AT_ONCE = 64
#: numbers of flat draws that are drawn together
_NUMBERS_AT_ONCE = 2**25

_Restore = Callable[[Any, Density, str, Mapping[str, Tensor]], Any]
#: family that is more than a distribution over the flat vector → (posterior without approximation, layout of its latent
#: sites with point parameters at their fitted values, family, its tensors) ↦ the posterior with what belongs to it
RESTORERS: dict[str, _Restore] = {}
#: what `Posterior.update`, `remove` and `refine` do, by name; :mod:`pyrobnn.inference.update` and ``refine`` add them
CHANGES: dict[str, Callable[..., Any]] = {}


class PosteriorLike(Protocol):
    """What is asked of a :class:`pyrobnn.Posterior` here and where its draws are put to a test."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    @property
    def model(self) -> BNN | Program:
        """The BNN or the plain Pyro program."""

    @property
    def draws(self) -> dict[str, Tensor]:
        """Site → (chain, draw, \\*shape)."""

    @property
    def meta(self) -> dict[str, Any]:
        """The method and what it says of its draws."""

    @property
    def approximation(self) -> Approximation | None:
        """q, of a method that has one."""

    @property
    def network(self) -> Callable[[Mapping[str, Tensor], Tensor], Tensor] | None:
        """(params, x) → f where it isn't the model's own ``forward``."""

    @property
    def num_chains(self) -> int:
        """Number of chains."""

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""

    def thin(self, num_draws: int) -> Self:
        """The same with at most so many draws of each chain."""

    def function(self, x: Tensor) -> Tensor:
        """Every draw's mean of y or logits, (chain, draw, point, out)."""


class Approximation(Protocol):
    """What SVI, Laplace and SWAG hand to the posterior."""

    def sample(self, num_draws: int) -> dict[str, Tensor]:
        """Independent draws by site, (num_draws, \\*shape), from torch's present random state."""

    def log_prob(self, draws: Mapping[str, Tensor]) -> Tensor:
        """log q of constrained draws (\\*batch, \\*shape), with respect to the constrained sites; (\\*batch,)."""

    def guide(self, *args: Any) -> dict[str, Tensor]:
        """A Pyro guide for the model these draws belong to; takes the model's arguments and ignores them."""

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Family name and tensors, enough to rebuild it."""


class SampleStats(UserDict[str, Tensor]):
    """Statistics of draws of which some are computed when the first is asked for.

    Args:
        known: statistic → (chain, draw).
        pending: gives the others, such as log_p and log_q of an approximation: a pass over the data per draw.
        is_dear: whether these take too long to be computed because a posterior is saved.
    """

    # of pickles of earlier versions too
    is_dear = False

    def __init__(
        self,
        known: Mapping[str, Tensor],
        pending: Callable[[], Mapping[str, Tensor]] | None = None,
        *,
        is_dear: bool = False,
    ):
        self._known = dict(known)
        self._pending = pending
        self.is_dear = is_dear

    @property
    def of_file(self) -> dict[str, Tensor]:
        """Those that a file has: all of them, but for dear ones that nobody has asked for."""
        return self._known if self.is_dear else self.data

    @property
    def data(self) -> dict[str, Tensor]:  # type: ignore[override]
        """All of them."""
        if self._pending is not None:
            with process_state():
                self._compute()
        return self._known

    def _compute(self) -> None:
        # another thread may have been first
        if self._pending is not None:
            self._known |= self._pending()
            self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": self.of_file, "_pending": None, "is_dear": self.is_dear}


class FlatApproximation:
    """A distribution over the flat unconstrained vector, pushed through the bijections of the sites.

    Args:
        layout: the density whose latent sites make up the vector (its data are not used).
        family: of :data:`FAMILIES`: ``"normal"`` (loc, scale), ``"full_rank"`` (loc, scale_tril), ``"low_rank"``
            (loc, cov_factor, cov_diag), or one that a method has added.
        state: the tensors of the family, ``loc`` (dim,) among them.
    """

    def __init__(
        self,
        layout: Density,
        family: str,
        state: Mapping[str, Tensor],
    ):
        self.layout = layout
        self.family = family
        self._state = {name: value.detach() for name, value in state.items()}
        self.distribution = FAMILIES[family](self._state)

    def sample(self, num_draws: int) -> dict[str, Tensor]:
        """Independent draws by site, (num_draws, \\*shape), from torch's present random state."""
        # in parts: a factor of the covariance is copied for every draw of one
        size = max(1, _NUMBERS_AT_ONCE // self._state["loc"].numel())
        counts = [min(size, num_draws - start) for start in range(0, num_draws, size)]
        parts = [self.distribution.sample((count,)).to(self.layout.dtype) for count in counts]
        return self.layout.constrain(torch.cat(parts) if len(parts) > 1 else parts[0])

    def log_prob(self, draws: Mapping[str, Tensor]) -> Tensor:
        """log q of constrained draws (\\*batch, \\*shape); (\\*batch,)."""
        z = self.layout.unconstrain(draws)
        # low-rank and full families hold float64 factors; the Jacobian is that of the draws
        log_density = self.distribution.log_prob(z.to(self._state["loc"].dtype))
        return log_density - self.layout.log_jacobian(z)

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The Pyro guide: one auxiliary flat site, every model site as its image, and the point parameters."""
        state_points(self.layout)
        flat = pyro.sample(
            "_flat",
            self.distribution,
            infer={"is_auxiliary": True},
        )
        return state_sites(self.layout, flat.to(self.layout.dtype), self.layout.sites)

    def state(self) -> tuple[str, dict[str, Tensor]]:
        """Family name and tensors, enough to rebuild it."""
        return self.family, self._state


def state_sites(layout: Density, z: Tensor, drawn: Sequence[Site]) -> dict[str, Tensor]:
    """A guide's statements of the sites of ``layout`` as images of ``z`` (dim,), those not ``drawn`` held there."""
    values = layout.constrain(z)
    for site in layout.sites:
        density = -layout.log_jacobian(z, site) if site in drawn else z.new_zeros(())
        # as the program has it, which Pyro runs
        value = values[site.name].to(layout.own_dtypes[site.name])
        pyro.sample(
            site.name,
            dist.Delta(
                value,
                log_density=density,
                event_dim=len(site.shape),
            ),
        )
    return values


def state_points(layout: Density) -> None:
    """A guide's statements of the point parameters of ``layout``'s program, at the values that it holds.

    A BNN reads them from the guide's trace. A plain program reads its ``pyro.param`` from Pyro's store and from nowhere
    else, so for it they are ordinary ``pyro.param`` statements.

    Raises:
        ValueError: the store holds another value under the name of a plain program's parameter.
        Refused: the BNN has layers in training mode, whose statistics belong to each draw.
    """
    points = layout.initial_points.items()
    if layout.owner is None:
        for name, value in points:
            initial = value.to(layout.own_dtypes.get(name, value.dtype), copy=True)
            stored = pyro.param(
                name,
                initial,
                constraint=layout.constraints[name],
            ).detach()
            if not _same_values(stored, value):
                raise ValueError(
                    f"Pyro's param store holds {stored} as {name!r} where this fit has {value}, and the program would "
                    "use it: call guide and program inside 'with pyro.get_param_store().scope():'"
                )
        return
    layers = layout.owner.stochastic_layers()
    if layers:
        raise Refused(
            f"the layers {', '.join(layers)} are in training mode, with batch statistics of every posterior draw: use "
            "predict, or pyro.infer.Predictive(model, posterior_samples=posterior.stacked()), which holds them"
        )
    for name, value in points:
        pyro.sample(
            name,
            dist.Delta(value, event_dim=value.dim()),
            infer={"is_auxiliary": True},
        )


def _same_values(stored: Tensor, value: Tensor) -> bool:
    if stored.shape != value.shape:
        return False
    return torch.allclose(
        stored,
        value.to(stored),
        rtol=1e-4,
        atol=1e-6,
    )


@torch.no_grad()
def log_importance(
    density: Density, approximation: Approximation, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """log p (joint, constrained space) and log q of draws (chain, draw, \\*shape), both (chain, draw) in float64.

    In batches of draws, and where the program is a BNN's of rows too.
    """
    held = {
        site.name: draws[site.name][0, 0]
        for site in density.sites
        if is_stored_once(draws[site.name])
    }
    if held and density.owner is not None and not density.dependent:
        moving = {
            site.name: draws[site.name].flatten(0, 1)
            for site in density.sites
            if site.name not in held
        }
        log_p = _log_joint_beside(density, held, moving)
        shape = next(iter(draws.values())).shape[:2]
        return {"log_p": log_p.reshape(shape), "log_q": approximation.log_prob(draws).double()}
    z = density.unconstrain(draws)
    batches = z.reshape(-1, density.dim).split(DRAWS_AT_ONCE)
    log_p = torch.cat([_log_joint(density, batch) for batch in batches])
    return {"log_p": log_p.reshape(z.shape[:-1]), "log_q": approximation.log_prob(draws).double()}


def is_stored_once(value: Tensor) -> bool:
    """Whether draws (chain, draw, \\*shape) of a site are views of one value, which need not be stored for each."""
    sizes = value.shape[:2]
    strides = value.stride()[:2]
    return sizes.numel() > 1 and all(
        not stride for size, stride in zip(sizes, strides, strict=True) if size > 1
    )


def is_same_in_all_draws(value: Tensor, num_axes: int = 2) -> bool:
    """Whether all draws of a site have one value; the first ``num_axes`` axes, chain and draw, are those of the draws.

    Unlike :func:`is_stored_once` it compares values that are stored for each draw.
    """
    if not any(value.stride()[:num_axes]):
        return True
    one_draw = value[(slice(1),) * num_axes]
    return torch.equal(value, one_draw.expand_as(value))


def _log_joint_beside(
    density: Density, held: Mapping[str, Tensor], moving: Mapping[str, Tensor]
) -> Tensor:
    """Log joint (draw,) of a net, of draws of some sites beside the values of the others."""
    x, y = density.args
    rows_at_once = _rows_at_once(cast(BNN, density.owner), x)
    total: Tensor | None = None
    log_prior: Tensor | None = None
    for rows, targets in zip(x.split(rows_at_once), y.split(rows_at_once), strict=True):
        log_prior, likelihood = at_each(
            lambda values: density.log_parts_at({**held, **values}, rows, targets),  # noqa: B023
            dict(moving),
            at_once=DRAWS_AT_ONCE,
        )
        # the program scales the likelihood of its rows to all of them
        scaled = likelihood * (len(rows) / len(x))
        total = scaled if total is None else total + scaled
    return cast(Tensor, log_prior) + cast(Tensor, total)


def _log_joint(density: Density, z: Tensor) -> Tensor:
    """Log joint of flat vectors (draw, dim); (draw,)."""
    if density.owner is None:
        return at_each(lambda point: density.log_joint(point, jacobian=False), z)
    x, y = density.args
    rows_at_once = _rows_at_once(density.owner, x)
    is_large = len(x) * widest_layer(density.owner, x) > LARGE_LAYER
    draws_at_once = None
    if is_large and x.device.type == "cpu":
        draws_at_once = 1
        rows_at_once = min(len(x), rows_at_once * DRAWS_AT_ONCE)
    log_priors = []
    terms = []
    for rows, targets in zip(x.split(rows_at_once), y.split(rows_at_once), strict=True):
        log_prior, likelihood = at_each(
            lambda point: density.log_parts(point, rows, targets),  # noqa: B023
            z,
            at_once=draws_at_once,
        )
        log_priors.append(log_prior)
        # the program scales the likelihood of its rows to all of them
        terms.append(likelihood * (len(rows) / len(x)))
    # every piece has the same log prior
    return log_priors[-1] + torch.stack(terms).sum(0)


def _rows_at_once(model: BNN, x: Tensor) -> int:
    """Rows whose log likelihoods under a batch of draws are computed together."""
    return max(1, CHUNK_SCALARS // (DRAWS_AT_ONCE * widest_layer(model, x)))


def density_of(
    posterior: PosteriorLike,
    program: BNN | Program,
    args: tuple[Tensor | None, Tensor | None],
    fixed: Mapping[str, Tensor],
) -> Density:
    """The density of a program and its data; of a plain one in float64 where draws are finer than its own tensors.

    Raises:
        TypeError: data of another type than the program takes.
    """
    if isinstance(posterior.model, BNN):
        return Density(
            program,
            args,
            points="held",
            values=fixed,
        )
    double = bool(posterior.meta.get("program_dtypes") or posterior.meta.get("float64"))
    with types_explained(program, dict(zip("xy", args, strict=True))):
        density = Density(
            program,
            args,
            points="held",
            values=fixed,
            double=double,
        )
        density = density.as_fine_as(posterior.draws)
        draw = {name: value[0, 0] for name, value in posterior.draws.items()}
        # run once, so that data of a wrong type fail here, in words
        density.log_joint(density.unconstrain(draw))
    return density
