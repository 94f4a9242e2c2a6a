"""Groups of short chains on their way to a posterior, each begun at one point, and the quantities that judge them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.seeding import generator
from pyrobnn.core.threads import threads_by_need
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.gradient import at_each
from pyrobnn.model.likelihoods.base import identified
from pyrobnn.posterior.arrival import NOWHERE, arrival, effective_draws
from pyrobnn.posterior.marginal_last_layer import LastLayer
from pyrobnn.posterior.short_chains import LONGEST, ShortChains, Visit, traced_gradient

#: leapfrogs of the longest path where a net's last layer is integrated out
_LONGEST_OF_OTHERS = 24
#: transitions after which the chains are first judged, by the later half of their transitions
_FIRST_CHECK = 16
#: transitions until the next look, as a multiple of those until this one
_NEXT_CHECK = 1.125
#: effective sample size of the window that chains which have arrived need, by the smallest of its estimates: of twenty
#: quantities whose true size is 400 that has the median 280 where there are 64 chains
_MIN_ESS = 280.0
#: sds of the log density by which groups from elsewhere lie so far below the others that they are left out
_BELOW = 3.0

#: identified quantities (quantity, chain) at a visit
Quantities = Callable[[Visit], np.ndarray]


class Groups:
    """Groups of chains, each begun at one point, on their way to a posterior, and how far they have come.

    Of a net whose last layer can be integrated out, the chains are of all else, and it is drawn at every visit
    (:class:`~pyrobnn.posterior.marginal_last_layer.LastLayer`).

    Args:
        density: of the posterior.
        starts: where the groups begin (group, dim), those from elsewhere last.
        num_elsewhere: groups that begin elsewhere.
        size: chains of a group.
        quantities: identified quantities of the chains at a visit.
        seed: of the moves.
    """

    def __init__(
        self,
        density: Density,
        starts: Tensor,
        num_elsewhere: int,
        size: int,
        quantities: Quantities,
        seed: int,
    ) -> None:
        self.size = size
        self.is_elsewhere = torch.arange(len(starts)) >= len(starts) - num_elsewhere
        self.kept = torch.ones(len(starts), dtype=torch.bool)
        self.last_layer = LastLayer.of(density)
        longest = LONGEST
        log_density: Callable[[Tensor], Tensor]
        if self.last_layer is None:
            log_density = density.in_fewer_operations(starts[:2]).log_joint
        else:
            longest = _LONGEST_OF_OTHERS
            starts = starts[:, self.last_layer.others]
            log_density = self.last_layer.log_density
        z = starts.repeat_interleave(size, 0).contiguous()
        self.random = generator(seed)
        traced = traced_gradient(log_density, z)
        self.gradient = traced.gradient
        #: of a leapfrog of all chains on one core, forecast from the operations of the gradient
        self.seconds_per_leapfrog = traced.seconds
        self.chains = ShortChains.begin(self.gradient, z, self.random, longest)
        self.visits: list[Visit] = []
        self.arrival = NOWHERE
        self.ess = 0.0
        self.arrived = False
        self._steady_since: int | None = None
        self._quantities = quantities
        self._values: list[np.ndarray] = []

    @threads_by_need()
    def run(self, spent: Callable[[ShortChains], float]) -> None:
        """Move the chains until they have arrived or all of a budget is spent; ``spent`` is its share so far."""
        next_check = _FIRST_CHECK
        share_spent = 0.0
        while not self.arrived and share_spent < 1.0:
            self.chains = self.chains.transition(self.gradient, self.random)
            self.visits.append(self._completed(self.chains.visits[-1]))
            share_spent = spent(self.chains)
            if len(self.chains.visits) >= next_check or share_spent >= 1.0:
                next_check = math.ceil(_NEXT_CHECK * len(self.chains.visits))
                self._check_progress(may_leave_out=share_spent >= 0.5)

    @property
    def window(self) -> tuple[Visit, ...]:
        """What is judged, and handed over: the later half of the transitions.

        Where too few draws are all that is lacking, the half that was judged and all that came since.
        """
        return tuple(self.visits[self._begin() :])

    def _begin(self) -> int:
        """The transitions before the window."""
        half = len(self.visits) // 2
        return half if self._steady_since is None else min(half, self._steady_since)

    def _completed(self, visit: Visit) -> Visit:
        """A visit of the chains with all sites, and their log joint density."""
        if self.last_layer is None:
            return visit
        completed = self.last_layer.complete(visit.z, self.random)
        return visit._replace(z=completed.z, log_density=completed.log_density)

    def window_values(self) -> np.ndarray:
        """Identified quantities (quantity, transition, chain) of the window."""
        while len(self._values) < len(self.visits):
            self._values.append(self._quantities(self.visits[len(self._values)]))
        return np.stack(self._values[self._begin() :], 1)

    def mask(self) -> Tensor:
        """Which chains (chain,) are of groups that are kept."""
        return self.kept.repeat_interleave(self.size)

    def _check_progress(self, may_leave_out: bool) -> None:
        """See how far the chains have come, if need be without the groups from elsewhere that lie below the others."""
        self.kept = torch.ones_like(self.kept)
        self._update_arrival()
        if not self.arrived and may_leave_out and bool(self.is_elsewhere.any()):
            self.kept = ~(self.is_elsewhere & self._groups_far_below())
            if not bool(self.kept.all()):
                self._update_arrival()

    def _update_arrival(self) -> None:
        """Judge the chains of the kept groups: arrived if they are converged and worth enough independent draws."""
        self._judge_window()
        if self._steady_since is not None and not self.arrival.is_converged:
            self._steady_since = None
            self._judge_window()
        if self.arrival.is_converged and self._steady_since is None:
            self._steady_since = len(self.visits) // 2
        self.arrived = self.arrival.is_converged and self.ess >= _MIN_ESS

    def _judge_window(self) -> None:
        """How near the chains of the kept groups are to convergence in the window, and their effective draws."""
        values = self.window_values()[:, :, self.mask().numpy()]
        self.arrival = arrival(values, int(self.kept.sum()))
        self.ess = effective_draws(values)

    def _groups_far_below(self) -> Tensor:
        """Which groups (group,) lie so far below the others in log density that chance does not explain it."""
        levels = torch.stack([visit.log_density for visit in self.window]).mean(0).cpu()
        levels = levels.reshape(len(self.kept), self.size)
        ours = levels[~self.is_elsewhere]
        return levels.mean(1) < ours.mean() - _BELOW * ours.std() / math.sqrt(self.size) - _BELOW


def net_quantities(density: Density, x: Tensor) -> Quantities:
    """The log density, a net's function at inputs ``x`` (point, …) and the sites but its weights."""
    model = cast(BNN, density.owner)

    def quantities(visit: Visit) -> np.ndarray:
        draws = density.constrain(visit.z)
        fixed = density.initial_points
        f = at_each(lambda draw: model.forward(fixed | draw, x), draws)
        columns = [visit.log_density[:, None], identified(model.likelihood, f[None])[0].flatten(1)]
        names = [name for name in draws if not name.startswith(NET)]
        return _joined([*columns, *(draws[name] for name in names)])

    return quantities


def site_quantities(density: Density) -> Quantities:
    """The log density and all latent sites of a program."""

    def quantities(visit: Visit) -> np.ndarray:
        return _joined([visit.log_density, *density.constrain(visit.z).values()])

    return quantities


def _joined(columns: Sequence[Tensor]) -> np.ndarray:
    """Quantities (chain, …) side by side, (quantity, chain)."""
    flat = [column.reshape(len(column), -1).double() for column in columns]
    return torch.cat(flat, 1).cpu().numpy().T
