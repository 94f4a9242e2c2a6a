"""A mixture of Laplace's approximations: the modes that several starts find, weighed by their evidence."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_choice, check_count
from pyrobnn.core.seeding import seeded
from pyrobnn.density.density import Density
from pyrobnn.inference.curvature.gaussian import BlockGaussian, BlockNormal, blocks_of_state
from pyrobnn.inference.curvature.images import log_images
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.fitting.watch import OffsetCallback, end_of
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import FAMILIES, RESTORERS, FlatApproximation
from pyrobnn.wording.findings import Finding, of_meta

FAMILY = "block_mixture"
#: two starts have found one mode, or mirror images of it, where their evidence (nats) and their functions at the data
#: (in sds of the function) differ by less
SAME = 0.3


@register("laplace_mixture", quick={"num_draws": 500, "num_modes": 3, "num_steps": 500})
@dataclass(frozen=True)
class LaplaceMixture(Method):
    r"""A mixture of Laplace's approximations around the modes that several starts find, weighed by their evidence.

    .. math:: q(\theta) = \sum_m \pi_m N(\theta; \theta^*_m, \Lambda_m^{-1}), \qquad \pi_m \propto Z_m

    A mode that several starts find counts once, and so do its mirror images (units exchanged, or with both signs
    turned), which make the same function: how often a search ends in a mode says nothing of its mass. Their evidence
    counts as often as there are images: log H! + T log 2 of a layer of H different units, T of them odd and not zero.

    Args:
        num_modes: starts, each at the net initialised anew: as many modes at most.
        structure: of the precision, as of :class:`pyrobnn.Laplace`, whose Gauss-Newton matrix it is.
        num_steps: of the searches.
        compile: compile the searches; False gives the same numbers slower.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws in one chain, each through the net linearised at its own mode, with exact
    mean and variance; ``log_evidence``, that of all modes together, and in ``meta`` ``mode_weights`` (which sum to 1),
    ``mode_log_evidence`` (of a mode and its images) and ``num_starts``. Callbacks follow every search; True stops that
    one. A DataLoader is gathered in memory.

    Refused: ``init``, a plain Pyro program, a value without a prior; a full precision that does not fit in memory.

    Caveat: it knows the modes that were found, of a net's many. The weights are as good as Laplace's evidence: of two
    modes that differ by a nat or two either may be the larger. ``meta["mode_weights"]`` has them.

    Reference: `Mixtures of Laplace Approximations for Improved Post-Hoc Uncertainty in Deep Learning (Eschenhagen et
    al., 2021) <https://arxiv.org/abs/2111.03577>`_, whose weights are equal.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> model = pb.BNN(
        ...     pb.networks.mlp(1, (3,), seed=0), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.1)
        ... )
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> mixture = LaplaceMixture(num_modes=2, num_steps=200, compile=False).fit(model, x, x**2)
        >>> round(sum(mixture.meta["mode_weights"]), 6)
        1.0
    """

    num_modes: int = 5
    structure: Literal["full", "kron", "diag"] = "full"
    num_steps: int = 2000
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ()
    remedy: ClassVar[str] = "The normals miss the weights, or a mode was not found: run NUTS and compare."

    def __post_init__(self) -> None:
        check_count("num_modes", self.num_modes)
        check_choice("structure", self.structure, ("full", "kron", "diag"))
        check_count("num_steps", self.num_steps)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        (model, x, y), seed, num_draws = run.given, run.seed, run.num_draws
        if not isinstance(model, BNN):
            raise Refused(
                "LaplaceMixture starts at nets initialised anew and needs a pyrobnn.BNN: for a plain Pyro program with "
                "several modes use SMC, or Laplace(curvature='hessian') around one"
            )
        if points := list(problem.density.initial_points):
            raise Refused(
                f"{', '.join(map(repr, points[:3]))}: a point parameter has no prior to weigh modes by: give it one (a "
                "learned noise: HomoskedasticGaussian(dist.HalfNormal(1.0))), a fixed value, or use Laplace"
            )
        started = time.perf_counter()
        notes: list[Finding | str] = []
        found: list[Posterior] = []
        laplace = self._laplace()
        for start in range(seed * self.num_modes, (seed + 1) * self.num_modes):
            steps = len(found) * self.num_steps
            told = [OffsetCallback(callback, steps) for callback in run.callbacks]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # what it warns of joins the notes
                mode = laplace.fit(
                    model.reinitialized(start), x, y, num_draws=1, seed=start, device=problem.device,
                    callbacks=told, progress=run.progress,
                )  # fmt: skip
            notes += [note for note in of_meta(mode.meta) if note not in notes]
            found.append(mode)
        for callback in run.callbacks:
            end_of(callback)()
        modes = _distinct(found, problem.x)
        parts = [cast(BlockGaussian, mode.approximation) for mode in modes]
        log_z = torch.tensor(
            [_log_z(mode) + log_images(problem.bnn, part, problem.x[:4]) for mode, part in zip(modes, parts)],
            dtype=torch.float64,
        )
        state = {"loc": parts[0].loc, "log_weights": log_z.log_softmax(0).to(problem.device)}
        for index, part in enumerate(parts):
            state |= {f"{index}.{name}": value for name, value in part.state()[1].items()}
        mixture = FlatApproximation(parts[0].layout, FAMILY, state)
        with seeded(seed, problem.device):
            draws = {name: value.unsqueeze(0) for name, value in mixture.sample(num_draws).items()}
        products = modes[0].meta["layer_products"]
        network = LinearMixture(problem.bnn, mixture, products)
        return make_posterior(
            problem,
            self,
            draws,
            seed=seed,
            timings={"fit": time.perf_counter() - started},
            approximation=mixture,
            log_evidence=float(log_z.logsumexp(0)),
            meta={
                "mode_weights": log_z.softmax(0).tolist(),
                "mode_log_evidence": log_z.tolist(),
                "num_starts": len(found),
                "log_evidence_kind": "laplace",
                "layer_products": products,
            },
            notes=notes,
            network=network,
            moments=network.moments,
        )

    def _laplace(self) -> Laplace:
        return Laplace(structure=self.structure, num_steps=self.num_steps, compile=self.compile)


class MixtureNormal(BlockNormal):
    """Laplace's normals over the flat vector, each with its weight; event (dim,).

    Args:
        state: ``log_weights`` (mode,), and ``<mode>.<name>`` of what each normal's own state has.
    """

    def __init__(self, state: Mapping[str, Tensor]):
        self.log_weights = state["log_weights"]
        own: list[dict[str, Tensor]] = [{} for _ in self.log_weights]
        for key, value in state.items():
            if key not in ("loc", "log_weights"):
                number, _, name = key.partition(".")
                own[int(number)][name] = value
        self.locs = [each["loc"] for each in own]
        self.centres = [each.get("centre", each["loc"]) for each in own]
        blocks = [blocks_of_state(each) for each in own]
        self.index = torch.cat([block.index for block in blocks[0]])
        self.normals = [BlockNormal(loc[self.index], each) for loc, each in zip(self.locs, blocks)]
        super().__init__(self.locs[0], blocks[0])

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (\\*sample_shape, dim)."""
        shape = torch.Size(sample_shape)
        which = torch.multinomial(self.log_weights.exp(), shape.numel(), replacement=True)
        draws = self.loc.new_empty(shape.numel(), *self.event_shape)
        for number, normal in enumerate(self.normals):
            rows = (which == number).nonzero()
            draws[rows, self.index] = normal.sample((len(rows),))
        return draws.reshape(shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density (\\*batch,), float64."""
        parts = [normal.log_prob(value[..., self.index]) for normal in self.normals]
        return (torch.stack(parts, -1) + self.log_weights).logsumexp(-1)


FAMILIES[FAMILY] = MixtureNormal


class LinearMixture:
    """Every draw through the net linearised at the mode that it most probably belongs to.

    Args:
        model: the net.
        approximation: the mixture.
        products: whether the net's Jacobian is made of products of its layers.
    """

    def __init__(self, model: BNN, approximation: FlatApproximation, products: bool):
        self.mixture = mixture = cast(MixtureNormal, approximation.distribution)
        layout = approximation.layout
        weights = [site.name for site in layout.sites if site.name.startswith(NET)]
        self.networks = []
        for loc, centre, normal in zip(mixture.locs, mixture.centres, mixture.normals):
            jacobian = NetworkJacobian(model, layout, centre, {}, weights)
            if not products:
                jacobian.layers = []
            self.networks.append(Linearized(jacobian, normal.blocks, None if centre is loc else loc))

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """f for one set of parameters, (N, width)."""
        mixture, jacobian = self.mixture, self.networks[0].jacobian
        z = torch.cat([site.transform.inv(params[site.name]).reshape(-1) for site in jacobian.sites])
        scores = []
        for loc, normal in zip(mixture.locs, mixture.normals):
            # of the noise, of which the net knows nothing, the mode's own
            whole = loc.scatter(0, jacobian.index, z.to(loc))
            scores.append(normal.log_prob(whole[mixture.index]))
        f = torch.stack([network(params, x) for network in self.networks])
        best = (torch.stack(scores) + mixture.log_weights).argmax()
        return ((best == torch.arange(len(f), device=f.device)).to(f)[:, None, None] * f).sum(0)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the network's first head, (point, out), by the law of total variance."""
        means, variances = map(torch.stack, zip(*(network.moments(x) for network in self.networks)))
        weights = self.mixture.log_weights.exp().to(means)[:, None, None]
        mean = (weights * means).sum(0)
        return mean, (weights * (variances + (means - mean).square())).sum(0)


def _distinct(found: Sequence[Posterior], x: Tensor) -> list[Posterior]:
    """One of each mode, that of the largest evidence first; at 200 of the inputs ``x`` their functions are compared."""
    kept: list[tuple[Posterior, Tensor, Tensor]] = []
    for mode in sorted(found, key=_log_z, reverse=True):
        f, cov = cast(Linearized, mode.network).output_moments(x[:: max(1, len(x) // 200)])
        near = [each for each in kept if _log_z(each[0]) - _log_z(mode) < SAME]
        if not any(float(((f - g) / sd).square().mean().sqrt()) < SAME for _, g, sd in near):
            sd = cov.diagonal(dim1=1, dim2=2).sqrt()
            kept.append((mode, f, sd.clamp_min(torch.finfo(sd.dtype).tiny)))
    return [mode for mode, *_ in kept]


def _log_z(mode: Posterior) -> float:
    return -math.inf if mode.log_evidence is None else mode.log_evidence


def _restored(posterior: Posterior, layout: Density, family: str, state: Mapping[str, Tensor]) -> Posterior:
    """The posterior with its mixture and its linear networks rebuilt."""
    mixture = FlatApproximation(layout, family, state)
    network = LinearMixture(posterior.bnn, mixture, posterior.meta["layer_products"])
    return replace(posterior, approximation=mixture, network=network, moments=network.moments)


RESTORERS[FAMILY] = _restored
