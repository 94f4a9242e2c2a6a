"""The precision of a Laplace approximation: curvature plus prior, always positive definite."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.inference.curvature.forms import ChosenCurvature, chosen_curvature
from pyrobnn.inference.curvature.gaussian import Block, DenseBlock, DiagBlock
from pyrobnn.inference.curvature.ggn import (
    Curvature,
    check_finite,
    hessian,
    hessian_diagonal,
)
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linear_head import HeadCurvature
from pyrobnn.inference.curvature.mode import Centre, coordinates_of
from pyrobnn.inference.curvature.prior import (
    PriorPrecision,
    Tuned,
    maximize_evidence,
    maximize_width,
    prior_precision,
    with_precision,
)
from pyrobnn.inference.fitting.batches import forward_in_parts
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.likelihoods.base import SCALE


@dataclass(frozen=True, eq=False)
class Precision:
    """Gaussian blocks at a centre.

    Attributes: ``centre`` (of the tuned model, where tuned); ``blocks``; ``jacobian`` of the network (None for a
        program); ``damping``: the most that was added to the diagonal; ``notes``; ``tuned``: factors, or None;
        ``has_evidence``: whether the log evidence of the tuned model says anything; ``form`` of the curvature, for
        ``meta``.
    """

    centre: Centre
    blocks: list[Block]
    jacobian: NetworkJacobian | None
    damping: float
    notes: Sequence[Finding] = ()
    tuned: dict[str, Any] | None = None
    has_evidence: bool = True
    form: Mapping[str, Any] | None = None

    @property
    def gradient_norm(self) -> float:
        """Length of the gradient at the centre, in the coordinates of the blocks."""
        index = torch.cat([block.index for block in self.blocks])
        return float(self.centre.gradient[index].double().norm())

    @functools.cached_property
    def newton_distance(self) -> float:
        """Length of Newton's step from the centre, in posterior standard deviations."""
        gradient = self.centre.gradient
        squares = []
        for block in self.blocks:
            whitened = block.root(gradient[block.index].unsqueeze(0))
            squares.append(whitened.double().square().sum())
        return float(torch.stack(squares).sum().sqrt())


def hessian_precision(centre: Centre, structure: str) -> Precision:
    """Exact Hessian, full or its diagonal."""
    block, damping = hessian_block(centre, centre.names, structure)
    has_weights = centre.net_split is not None and any(
        name.startswith(NET) for name in centre.names
    )
    jacobian = centre.jacobian() if has_weights else None
    return Precision(centre, [block], jacobian, damping.added, damping.notes(centre.density))


@dataclass(frozen=True, eq=False)
class WeightCurvature:
    """What the weights know of themselves at a centre.

    Attributes: the ``jacobian`` of the network; the precision of their ``prior``; ``chosen``, the whitened Gauss-Newton
        matrix of the log likelihood.
    """

    jacobian: NetworkJacobian
    prior: PriorPrecision
    chosen: ChosenCurvature

    @classmethod
    def at(cls, centre: Centre, structure: str) -> WeightCurvature:
        """The curvature at a centre.

        Raises:
            ValueError: no weight among the sites; a prior or layer that the structure can't take.
        """
        if not any(name.startswith(NET) for name in centre.names):
            raise Refused(
                f"'subset' holds no weights, only {', '.join(centre.names)}: use curvature='hessian'"
            )
        jacobian = centre.jacobian()
        prior = prior_precision(jacobian)
        return cls(jacobian, prior, chosen_curvature(jacobian, centre, structure, prior.prec))

    @property
    def ggn(self) -> Curvature:
        """The whitened Gauss-Newton matrix."""
        return self.chosen.curvature

    @property
    def notes(self) -> list[Finding]:
        """What had to be changed in the prior's precision, and a form that was chosen for its cost."""
        averaged = [Finding("prior_averaged")] if self.ggn.averaged else []
        return [*self.prior.notes, *averaged, *self.chosen.notes]

    def tuned_by_evidence(self, centre: Centre, *, per_layer: bool) -> Tuned:
        """Factors on the declared prior and noise of the highest evidence, all weights alike or by layer."""
        residual = _residual(centre)
        deviation = self._deviation(centre)
        return self._searched(partial(maximize_evidence, self.ggn, deviation, residual, per_layer))

    def narrowed_by_evidence(self, centre: Centre) -> Tuned | None:
        """A factor above 1 on the precision of all weights, of the highest evidence; None where there is none."""
        if self.prior.mean is None:
            return None
        best = self._searched(partial(maximize_width, self.ggn, self._deviation(centre)))
        return best if float(best.tau[0]) > 1.0 else None

    def _deviation(self, centre: Centre) -> Tensor:
        """Squared distance of the weights from their prior mean, in prior variances, (p,)."""
        mean = cast(Tensor, self.prior.mean)
        return (centre.mode[self.jacobian.index] - mean).square() * self.prior.prec

    def _searched(self, search: Callable[[], Tuned]) -> Tuned:
        """What a search for factors finds, with its error by random vectors, or searched again by more of these."""
        tuned = search()
        if not isinstance(self.ggn, HeadCurvature):
            return tuned
        ratio = float(tuned.tau[0]) / tuned.c
        if not self.ggn.is_certain(ratio):
            return search()
        return replace(tuned, log_factor_error=self.ggn.log_factor_error(ratio))


def ggn_precision(centre: Centre, weights: WeightCurvature, tuned: Tuned | None) -> Precision:
    """Gauss-Newton matrix of the weights and, beside it, the exact Hessian of the noise; under a tuned prior if given.

    Raises:
        ValueError: a curvature that overflows.
    """
    factors = tuned or Tuned(
        torch.ones(
            1,
            dtype=torch.float64,
            device=weights.prior.prec.device,
        )
    )
    blocks = weights.ggn.blocks(factors.tau, factors.c)
    for block in blocks:
        check_finite(block.log_det())  # a number of float64 may overflow in the net's dtype
    unresolved = weights.ggn.findings(factors.c / float(factors.tau.min()))
    notes = [*weights.notes, *factors.notes, *unresolved]
    damping = weights.prior.raised
    report = None
    if tuned is not None:
        report = _report_of(tuned, weights.ggn.group_names)
        centre = _tuned_centre(centre, weights.ggn.group_names, tuned)
    noise = [name for name in centre.names if not name.startswith(NET)]
    if noise:
        noise_block, noise_damping = hessian_block(centre, noise, "full")
        blocks = [*blocks, noise_block]
        damping = max(damping, noise_damping.added)
        notes += noise_damping.notes(centre.density)
    has_evidence = factors.held_out is None or not factors.at_bound
    return Precision(
        centre,
        blocks,
        weights.jacobian,
        damping,
        notes,
        report,
        has_evidence,
        weights.chosen.record,
    )


def _report_of(tuned: Tuned, groups: list[str]) -> dict[str, Any]:
    """The factors by the names of their layers, for ``meta``."""
    names = groups if len(tuned.tau) > 1 else ["all"]
    report: dict[str, Any] = {
        "prior_precision_factor": dict(zip(names, tuned.tau.tolist())),
        "noise_factor": tuned.c**-0.5,
    }
    if tuned.held_out is not None:
        report["held_out"] = tuned.held_out
    if tuned.log_factor_error:
        report["log_factor_error"] = tuned.log_factor_error
    return report


@dataclass(frozen=True)
class _Damping:
    """What is ``added`` to the diagonal of a matrix that is not positive definite; ``lowest``, its least eigenvalue."""

    lowest: float = 0.0
    added: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> _Damping:
        """The damping that eigenvalues (p,), or a diagonal, take."""
        lowest = float(values.min())
        highest = float(values.max())
        # the worst direction has its own curvature with the right sign, or what float64 can resolve
        return cls(lowest, -lowest + max(abs(lowest), 1e-8 * abs(highest), 1e-12))

    def notes(self, density: Density) -> list[Finding]:
        """That the Hessian of a net's density, or of a program's, had to be damped."""
        if not self.added:
            return []
        code = "hessian_indefinite_of_program" if density.owner is None else "hessian_indefinite"
        return [Finding(code, {"lowest": self.lowest, "added": self.added})]


def hessian_block(centre: Centre, names: Sequence[str], structure: str) -> tuple[Block, _Damping]:
    """Exact Hessian in the sites, damped by as much as it takes."""
    sites = [site for site in centre.density.sites if site.name in names]
    index = coordinates_of(sites, centre.mode.device)
    damping = _Damping()
    if structure == "diag":
        diagonal = hessian_diagonal(centre.density, centre.mode, index)
        _check_hessian(centre, index, diagonal)
        if not bool((diagonal > 0).all()):
            damping = _Damping.of(diagonal)
        return DiagBlock(index, diagonal + damping.added), damping
    matrix = hessian(centre.density, centre.mode, index)
    _check_hessian(centre, index, matrix)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        damping = _Damping.of(torch.linalg.eigvalsh(matrix))
        matrix.diagonal().add_(damping.added)
        factor = torch.linalg.cholesky(matrix)
    return DenseBlock(index, factor), damping


def _check_hessian(centre: Centre, index: Tensor, curvature: Tensor) -> None:
    """Refuse a Hessian (p, p) in coordinates ``index`` (p,), or its diagonal (p,), that is not finite."""
    if centre.density.owner is not None:
        check_finite(curvature)
        return
    rows = curvature.isfinite().reshape(len(index), -1).all(1)
    if bool(rows.all()):
        return
    names = dict.fromkeys(
        centre.density.site_of(int(place)) for place in index[~rows.to(index.device)]
    )
    shown = ", ".join(map(repr, [*names][:3])) + (", …" if len(names) > 3 else "")
    raise Refused(
        f"the curvature of the log joint is not finite in {shown}, where the search for its mode ended: a scale may "
        "have gone to zero there, as the scale of a hierarchy does whose joint density grows without bound. Use NUTS, "
        "or give the scale a prior that keeps it from zero"
    )


@torch.no_grad()
def _residual(centre: Centre) -> tuple[float, int] | None:
    """Σ r²/σ² and the number of residuals, where Gaussian noise is learned and hence tuned too."""
    likelihood = centre.bnn.likelihood
    if SCALE not in centre.points or not likelihood.targets.normal:
        return None
    problem = centre.problem
    f = forward_in_parts(centre.bnn, centre.values, problem.x)
    loc, scale = likelihood.loc_scale(f, centre.points)
    return float(((problem.y - loc) / scale).double().square().sum()), loc.numel()


def tuned_model(model: BNN, names: Iterable[str], factors: Mapping[str, float]) -> BNN:
    """The model with the prior precision of these sites multiplied, by layer or, as ``"all"``, alike."""
    model = copy.copy(model)
    model.priors = dict(model.priors)
    for name in names:
        if name.startswith(NET):
            factor = factors.get(name.rpartition(".")[0], factors.get("all", 1.0))
            model.priors[name] = with_precision(name, model.priors[name], factor)
    return model


def _tuned_centre(centre: Centre, groups: Sequence[str], tuned: Tuned) -> Centre:
    """The same mode under the tuned prior and noise."""
    problem = centre.problem
    factors = dict(zip(groups, tuned.tau.expand(len(groups)).tolist()))
    model = tuned_model(centre.bnn, centre.names, factors)
    points = dict(centre.points)
    if SCALE in points:
        points[SCALE] = points[SCALE] * tuned.c**-0.5
    program = partial(model.pyro_model, num_data=problem.num_data)
    free = Density(
        program,
        problem.density.args,
        points="free",
        values=points,
    )
    held_density = Density(
        program,
        problem.density.args,
        points="held",
        values=points,
    )
    # the gradient says whether the mode was found for the model it was searched in
    return replace(
        centre,
        problem=replace(problem, model=model, density=free),
        density=held_density,
        points=points,
    )


def mode_notes(
    precision: Precision,
    centre_given: bool,
    exact: bool,
    short: bool = False,
    saddle_gain: float = 0.0,
) -> list[Finding]:
    """That the centre is not a mode: the search ended ``short`` of it, or Newton's step is longer than .2 sds per √dim.

    ``saddle_gain``: the nats by which a way that has come to no mode has led down from a saddle.

    Of the ``exact`` mode of the linear model only the noise is not: it is that of the residuals at the centre, whose
    sum of squares the last step lowers by its squared length, in noise variances.
    """
    distance = precision.newton_distance
    size = sum(len(block.index) for block in precision.blocks)
    if not short and distance <= 0.2 * math.sqrt(size):
        return []
    if exact and distance**2 <= 0.1 * len(precision.centre.problem.x):
        return []
    values = {
        "gradient_norm": precision.gradient_norm,
        "distance": distance,
        "given": centre_given,
    }
    if short and saddle_gain:
        values["saddle_gain"] = saddle_gain
    return [Finding("not_a_mode", values)]


def record(precision: Precision) -> dict[str, Any]:
    """What the fit says about itself, for ``meta``."""
    jacobian = precision.jacobian
    net_split = precision.centre.net_split
    return {
        "gradient_norm": precision.gradient_norm,
        "newton_distance": precision.newton_distance,
        "damping": precision.damping,
        "tuned": precision.tuned,
        "curvature": precision.form,
        "log_evidence_kind": "laplace",
        "head": "" if net_split is None else net_split.path,
        "layer_products": jacobian is not None and bool(jacobian.layers),
    }
