r"""New rows learned, old ones forgotten, without a refit: a Gaussian recentred, or particles led along a path.

.. math:: \pi_\beta(z) \propto p(z) \prod_i p(y_i \mid x_i, z)^{w_i(\beta)},

where the weight of a new row goes from 0 to 1 with β, that of a removed one from 1 to 0, and all others stay 1. Rows
are filled up to a power of two, with weight zero, so that one density serves as long as they fit.

:func:`update` and :func:`remove` check what is asked for and call :func:`_changed`; that calls :func:`_recentred` for
Laplace's Gaussian, whose centre moves (:func:`_find_centre`), and :func:`_led` for draws, which are particles that
:func:`_travel` leads by ``tempering``. The ``facts`` are of one update, for ``meta["updates"]``; ``entries`` are those
of ``meta``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, check_count
from pyrobnn.core.findings import Finding, as_json, warn
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.fitting import rng
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.program import what_program_says
from pyrobnn.inference.hmc.metric import form_of
from pyrobnn.inference.laplace import method_of
from pyrobnn.inference.optim.descent import descend
from pyrobnn.inference.smc import (
    log_mean,
    rung_history,
    standard_error,
    student_interval,
    student_width,
)
from pyrobnn.inference.tempering import (
    Evaluate,
    Population,
    Rung,
    Tempering,
    batched,
    evaluator,
    lag,
)
from pyrobnn.model import BNN, Density, check_data
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.gradient import why_not_batched
from pyrobnn.model.log_terms import log_prob_sum, row_terms
from pyrobnn.model.nodes import is_datum, is_subsample
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import CHANGES, density_of
from pyrobnn.posterior.rows import Rows

_PARTICLES = 1000  # most, of all islands
_FEWEST = 40  # draws of chains that can be updated
_MAX_TEMPERATURES = 100  # of a way
_FAR = 15  # temperatures of a way beyond which a refit may be cheaper
_MOST_EVALUATIONS = 1000  # of the gradient, on the way of a Gaussian's centre
_COMPILE_AFTER = 400  # calls of the gradient by Python: those of a few updates

#: the data as a program takes them, x and y
_Data = tuple[Tensor | None, ...]


def update(posterior: Posterior, x: Any, y: Any, seed: int) -> Posterior:
    """What :meth:`pyrobnn.Posterior.update` says."""
    old = _rows_at_fit(posterior)
    new = Rows.of(posterior.model, x, y)
    if new is None or not len(new) or (new.x is None) != (old.x is None):
        raise TypeError(
            "'x' and 'y' must be tensors with the same number of rows, of one x[None], y[None]"
        )
    new_x_shape = _row_shape(new.x)
    new_y_shape = _row_shape(new.y)
    old_x_shape = _row_shape(old.x)
    old_y_shape = _row_shape(old.y)
    if new_x_shape != old_x_shape or new.y[0].numel() != old.y[0].numel():
        raise ValueError(
            f"a new row has 'x' of shape {new_x_shape} and 'y' of {new_y_shape}, the fit's have {old_x_shape} and "
            f"{old_y_shape}"
        )
    new = replace(new, y=new.y.reshape(len(new), *old.y.shape[1:]))
    _program_data(posterior, new)  # checked by themselves: the error names their rows
    joined = old.joined(new)
    change = (torch.arange(len(joined)) >= len(old)).double()
    return _changed(posterior, joined, change, joined, seed)


def remove(posterior: Posterior, rows: int | Sequence[int] | Tensor, seed: int) -> Posterior:
    """What :meth:`pyrobnn.Posterior.remove` says."""
    old = _rows_at_fit(posterior)
    removed = _mask(rows, len(old))
    if bool(removed.all()):
        raise Refused("without any row a posterior is the prior: keep one, or sample the prior")
    return _changed(posterior, old, -removed.double(), old.at(~removed), seed)


CHANGES |= {"update": update, "remove": remove}


def _row_shape(values: Tensor | None) -> tuple[int, ...] | None:
    """The shape of one row."""
    return None if values is None else tuple(values.shape[1:])


def _mask(rows: int | Sequence[int] | Tensor, num: int) -> Tensor:
    """The mask (num,) of rows that are named by index or mask."""
    try:
        index = torch.as_tensor(rows).cpu()
    except (RuntimeError, TypeError, ValueError):  # a slice, names
        index = torch.empty(0)
    if index.dtype == torch.bool and index.shape == (num,):
        return index
    index = index.reshape(-1)
    is_integer = index.numel() and not index.is_floating_point() and index.dtype != torch.bool
    in_range = is_integer and int(index.min()) >= 0 and int(index.max()) < num
    if not in_range or len(index.unique()) < len(index):
        raise ValueError(
            f"'rows' must name rows by different indices 0 to {num - 1}, or a mask ({num},); got {rows!r}"
        )
    return torch.zeros(num, dtype=torch.bool).scatter(0, index.long(), True)


def _rows_at_fit(posterior: Posterior) -> Rows:
    """The rows of a posterior that can be updated, as they were at its fit."""
    meta = posterior.meta
    method = meta.get("method", "this method")
    gaussian = method == "Laplace" and posterior.approximation is not None
    if method == "Laplace" and posterior.meta.get("factors_left_out"):
        raise Refused(
            "the file of this posterior left out the factors of its Gaussian, and it holds no rows: "
            "Posterior.load(path, model, x=x, y=y) computes them"
        )
    if meta.get("kind") != "chains" and not gaussian:
        raise Refused(
            f"draws of {method} are not of the posterior: fit again, fit(model, x_all, y_all, init=posterior), or use "
            "Laplace (of a program: not from a file), NUTS, SMC, SGHMC or SGLD"
        )
    if meta.get("temperature", 1.0) != 1.0:
        raise Refused(
            f"the draws are of temperature {meta['temperature']:g}: an update needs those of temperature 1"
        )
    if isinstance(posterior.model, BNN) and posterior.model.stochastic_layers():
        raise Refused(
            "the net is in training mode, so the density of a row depends on the batch that it is in: fit again on all "
            "rows, fit(model, x_all, y_all, init=posterior)"
        )
    if posterior.rows is None:
        raise Refused(
            "this posterior holds no rows of data: a file has them where save(path, rows=True) asked for it, and "
            "Posterior.load(path, model, x=x, y=y) gives them back; of a DataLoader, posthoc or a program of its own "
            "there are none: fit tensors, fit(model, x, y)"
        )
    num_draws = posterior.num_chains * posterior.num_draws
    if num_draws < _FEWEST and not gaussian:
        raise Refused(f"{num_draws} draws are too few: make {_FEWEST} at least")
    _check_points(posterior)
    return posterior.rows.checked()


def _check_points(posterior: Posterior) -> None:
    """Refuse point parameters that differ between draws."""
    for name in posterior.meta.get("point_sites", ()):
        draws = posterior.draws[name]
        if bool((draws != draws[:1, :1]).any()):
            raise Refused(
                "the point parameters differ between draws, which no density has: give them priors or hold them"
            )


def _changed(
    posterior: Posterior,
    rows: Rows,
    change: Tensor,
    new_rows: Rows,
    seed: int,
) -> Posterior:
    """The posterior whose weights of ``rows`` have changed by ``change`` (N,), and which then holds ``new_rows``."""
    check_count("seed", seed, minimum=0)
    started = time.perf_counter()
    earlier_updates = posterior.meta.get("updates", ())
    make = _recentred if posterior.meta["method"] == "Laplace" else _led
    result, facts = make(posterior, rows, change, new_rows, seed)
    seconds = round(time.perf_counter() - started, 6)
    entries = facts | {
        "num_data": len(new_rows),
        "seed": seed,
        "updates": [*earlier_updates, {"rows": int(change.sum()), **facts}],
        "timings": posterior.meta.get("timings", {}) | {"update": seconds},
    }
    return replace(
        result,
        meta=result.meta | entries,
        rows=new_rows,
    )


def _recentred(
    posterior: Posterior,
    rows: Rows,
    change: Tensor,
    new_rows: Rows,
    seed: int,
) -> tuple[Posterior, dict[str, Any]]:
    r"""Laplace's Gaussian, led by L-BFGS in its own units to where the gradient is what it was at the old centre.

    .. math:: \nabla \log p(y_\text{after}, z) = \nabla \log p(y_\text{before}, z^*)

    which is zero at a mode; a centre that the user gave, or a prior that was tuned, keeps its own.
    """
    meta = posterior.meta
    q = cast(BlockGaussian, posterior.approximation)
    points = {name: posterior.draws[name][0, 0] for name in meta["point_sites"]}
    old_density = _density(posterior, cast(Rows, posterior.rows), points)
    new_density = _density(posterior, new_rows, points)
    method = method_of(posterior)
    move = _find_centre(q, old_density, new_density, method.compile)
    values = q.layout.constrain(move.z) | points
    centre = {name: value[None, None] for name, value in values.items()}
    refit = method.fit(
        posterior.model,
        new_rows.x,
        new_rows.y,
        init=Posterior(posterior.model, centre),
        num_draws=posterior.num_draws,
        seed=seed,
        device=new_density.device,
    )
    num_values = int((change != 0).sum()) * new_rows.y[0].numel()
    notes = _range_findings(rows.x, change > 0) + move.notes(num_values)
    warn(notes)
    entries = {"settings": meta["settings"], "tuned": meta["tuned"]} | _note_entries(refit, notes)
    facts = {
        "log_evidence_added": _evidence_gain(posterior.log_evidence, refit.log_evidence),
        "log_evidence_added_error": None,
        "gradients": move.num_calls,
        **move.facts,
    }
    return replace(refit, meta=meta | refit.meta | entries), facts


def _evidence_gain(old_log_evidence: float | None, new_log_evidence: float | None) -> float | None:
    """What the log evidence gained; None where either is not known."""
    if old_log_evidence is None or new_log_evidence is None:
        return None
    return new_log_evidence - old_log_evidence


class _CentreMove(NamedTuple):
    """How a Gaussian's centre moved: to which end, in standard deviations and as a position, and what it took.

    ``dip`` is by how much the tilted log density falls, in nats, below its value at the start, on the straight line to
    the end.
    """

    end: Tensor
    z: Tensor
    dip: float
    num_calls: int

    @property
    def facts(self) -> dict[str, float]:
        """How far the centre went."""
        return {"distance": float(self.end.norm()), "dip": self.dip}

    def notes(self, num_values: int) -> list[Finding]:
        """What the user has to know where it is farther than so many new or removed values should lead."""
        limit = 2.0 + math.sqrt(min(num_values, len(self.end)))
        far = self.dip > 0.1 or float(self.end.norm()) > limit
        return [Finding("far_update", self.facts)] if far else []


def _find_centre(
    q: BlockGaussian,
    old_density: Density,
    new_density: Density,
    compile: Compile,
) -> _CentreMove:
    """Lead the centre to where the gradient of the new density is what that of the old was at the old centre."""
    calls = itertools.count(1)
    with full_float32(new_density.device):
        old_gradient = torch.func.grad(old_density.log_joint)(q.loc)

        def tilted_log_joint(z: Tensor) -> Tensor:
            return new_density.log_joint(z) - old_gradient @ z

        def negative_slope(w: Tensor) -> tuple[Tensor, Tensor]:
            z = _at_deviations(q, w)
            gradient, value = torch.func.grad_and_value(tilted_log_joint)(z)
            whitened = [block.whitened(gradient[block.index][None])[0].to(w) for block in q.blocks]
            return -torch.cat(whitened), -value

        start = torch.zeros_like(q.loc[q.index])
        traced = compiled(
            negative_slope,
            start,
            enabled=False,
            calls=_MOST_EVALUATIONS,
        )

        def counted(w: Tensor) -> tuple[Tensor, Tensor]:
            next(calls)
            return cast(tuple[Tensor, Tensor], traced(w))

        if not bool(traced(start)[1].isfinite()):
            raise Refused("the new rows are impossible at the centre: check their values")
        end, distance = descend(
            counted,
            start,
            num_steps=_MOST_EVALUATIONS,
            patience=100,
        )
        if not distance <= 0.05 * math.sqrt(len(end)):
            raise Refused(
                f"after 1,000 steps the new centre is still {distance:.2g} standard deviations away: fit again"
            )
        # minus the log density only falls on the straight way to the mode of a Gaussian, and the way is short, unless
        # the rows contradict each other
        negative_log_joints = [float(traced(end * tenth / 10)[1]) for tenth in range(11)]
        dip = max(negative_log_joints) - float(traced(start)[1])
    return _CentreMove(end, _at_deviations(q, end), dip, next(calls))


def _at_deviations(q: BlockGaussian, w: Tensor) -> Tensor:
    """The position (dim,) that is ``w`` standard deviations of the Gaussian from its centre."""
    z = q.loc.clone()
    sizes = [len(block.index) for block in q.blocks]
    for block, step in zip(q.blocks, w.split(sizes)):
        z[block.index] += block.sample(step[None])[0].to(z)
    return z


class _ParticlePath(NamedTuple):
    """Particles at the end of their path, and what happened at its steps."""

    particles: Population
    rungs: list[Rung]

    def by_island(self, values: Tensor) -> Tensor:
        """Values of the particles (island × particle, …) as (island, particle, …)."""
        return values.unflatten(0, (self.particles.num_islands, self.particles.num_each))

    @property
    def num_ancestors(self) -> int:
        """Of the particles at the beginning, those that the particles at the end descend from."""
        return sum(len(island.unique()) for island in self.by_island(self.particles.ancestor))

    @property
    def facts(self) -> dict[str, Any]:
        """What ``meta`` holds of this update."""
        added = self.particles.log_evidence
        return {
            "log_evidence_added": log_mean(added),
            "log_evidence_added_error": standard_error(added),
            "log_evidence_added_interval": student_interval(added),
            "gradients": self.particles.num_gradients,
            "ess": [round(rung.ess, 4) for rung in self.rungs],
            "ancestors": self.num_ancestors,
        }

    @property
    def notes(self) -> list[Finding]:
        """What the user has to know of the way."""
        notes = []
        count = len(self.particles.z)
        steps = len(self.rungs)
        ancestors = self.num_ancestors
        if steps > _FAR or ancestors < 0.05 * count:
            values = {
                "steps": steps,
                "ancestors": ancestors,
                "draws": count,
            }
            gradients = {"gradients": self.particles.num_gradients}
            notes.append(Finding("far_update", values | gradients))
        nats = lag(self.rungs)
        if nats > 0.5 + 2.0 * (standard_error(self.particles.log_evidence) or 0.0):
            notes.append(Finding("particles_lag", {"lag": nats}))
        return notes


def _led(
    posterior: Posterior,
    rows: Rows,
    change: Tensor,
    new_rows: Rows,
    seed: int,
) -> tuple[Posterior, dict[str, Any]]:
    """Draws of chains, led by weights and moves."""
    point_sites = posterior.meta.get("point_sites", ())
    points = {name: posterior.draws[name][0, 0] for name in point_sites}
    density = _density(posterior, rows, points)
    with full_float32(density.device), torch.no_grad():
        path = _travel(*_population(posterior, rows, density, change, seed))
        draws = density.constrain(path.by_island(path.particles.z))
    shape = next(iter(draws.values())).shape[:2]
    draws |= {name: value.expand(*shape, *value.shape) for name, value in points.items()}
    notes = path.notes + _range_findings(rows.x, change > 0)
    entries: dict[str, Any] = {}
    if not isinstance(posterior.model, BNN):
        program = _density(posterior, new_rows, points)
        deterministic, entries, notes_of_program = what_program_says(program, draws, points)
        draws |= deterministic
        notes += notes_of_program
    warn(notes)
    entries |= {"step_size": path.rungs[-1].step_size, **_note_entries(posterior, notes)}
    return _posterior_of_path(posterior, path, draws, entries), path.facts


def _posterior_of_path(
    posterior: Posterior,
    path: _ParticlePath,
    draws: dict[str, Tensor],
    entries: dict[str, Any],
) -> Posterior:
    """The posterior with the draws and the evidence that their path led to, and these entries of ``meta``."""
    particles = path.particles
    total, uncertainty = _total_evidence(posterior, particles.log_evidence)
    meta = posterior.meta | entries | uncertainty
    meta.pop("log_evidence_by_island", None)
    statistics = {"lp": particles.log_joint(), "ancestor": particles.ancestor}
    return replace(
        posterior,
        draws=draws,
        sample_stats={name: path.by_island(values) for name, values in statistics.items()},
        log_evidence=total,
        history=rung_history(path.rungs),
        meta=meta,
    )


def _population(
    posterior: Posterior,
    rows: Rows,
    density: Density,
    change: Tensor,
    seed: int,
) -> tuple[Tempering, Population]:
    """The posterior's draws as particles at the beginning of the way, and what leads them."""
    meta = posterior.meta
    # draws of one call after the other must not move by the same random numbers
    key = int(rng.key(torch.tensor(seed), torch.tensor(len(meta.get("updates", ())))))
    islands, z = _particles(posterior, density)
    compile = bool(meta.get("settings", {}).get("compile", True))
    evaluate = _weighted_gradient(rows, density, z, change, compile)
    dense = form_of("auto", isinstance(posterior.model, BNN), density.dim) == "dense"
    tempering = Tempering(
        evaluate,
        moved_below=0.5,
        dense=dense,
        partly=True,
    )
    try:
        return tempering, tempering.start(z, islands, key, _first_step_size(posterior))
    except RuntimeError as unbatched:
        why = why_not_batched(unbatched)
        raise Refused(
            f"an update runs the program for many draws at once, and {why}"
        ) from unbatched


def _total_evidence(posterior: Posterior, added: Tensor) -> tuple[float | None, dict[str, Any]]:
    """Log evidence after an update that ``added`` (island,), and the entries of ``meta`` on its error."""
    if posterior.log_evidence is None:
        return None, {}
    total = posterior.log_evidence + log_mean(added)
    error = posterior.meta.get("log_evidence_error") or 0.0
    error = math.hypot(error, standard_error(added) or 0.0)
    width = student_width(error, len(added))
    interval = [total - width, total + width]
    return total, {"log_evidence_error": error, "log_evidence_interval": interval}


def _note_entries(posterior: Posterior, notes: Sequence[Finding]) -> dict[str, list[Any]]:
    """Entries of ``meta``: what was found before, and these notes."""
    meta = posterior.meta
    return {
        "findings": [*meta.get("findings", ()), *as_json(notes)],
        "warnings": [*meta.get("warnings", ()), *map(str, notes)],
    }


def _travel(tempering: Tempering, particles: Population) -> _ParticlePath:
    """Lead the particles to the end of the way."""
    if not particles.possible():
        raise Refused("the new rows are impossible at every draw of a chain: check their values")
    rungs: list[Rung] = []
    while particles.beta < 1.0:
        if len(rungs) == _MAX_TEMPERATURES:
            raise Refused(
                f"{_MAX_TEMPERATURES} steps led to beta = {particles.beta:.3g}, not 1: "
                "the rows are too far away. Fit again"
            )
        particles, rung = tempering.climb(particles, 0.5)
        rungs.append(rung)
    return _ParticlePath(particles, rungs)


def _program_data(posterior: Posterior, rows: Rows) -> tuple[Tensor | None, Tensor]:
    """The data as the program takes them."""
    device = next(iter(posterior.draws.values())).device
    if isinstance(posterior.model, BNN):
        return check_data(posterior.model, rows.x, rows.y, device)
    return None if rows.x is None else rows.x.to(device), rows.y.to(device)


def _density(posterior: Posterior, rows: Rows, points: dict[str, Tensor]) -> Density:
    """The density of these rows, their likelihood unscaled."""
    program = posterior.model.pyro_model if isinstance(posterior.model, BNN) else posterior.model
    return density_of(posterior, program, _program_data(posterior, rows), points)


def _particles(posterior: Posterior, density: Density) -> tuple[int, Tensor]:
    """Islands, and the draws (island × particle, dim): chains, or stretches of few long and groups of many short."""
    islands = posterior.num_chains if 4 <= posterior.num_chains <= 16 else 4
    total = posterior.num_chains * posterior.num_draws // islands
    picked = evenly_spaced(total, min(total, _PARTICLES // islands))

    def pick(value: Tensor) -> Tensor:
        draws = value.flatten(0, 1)[: islands * total].unflatten(0, (islands, total))
        return draws[:, picked.to(value.device)].flatten(0, 1).to(density.device)

    values = {site.name: pick(posterior.draws[site.name]) for site in density.sites}
    return islands, density.unconstrain(values).contiguous()


def _first_step_size(posterior: Posterior) -> float | None:
    """The step size of the last update or of NUTS's chains, in units of the posterior's spread."""
    if posterior.meta.get("method") == "NUTS":
        steps = posterior.sample_stats.get("step_size")
        if steps is not None:
            return float(steps.double().mean())
    return posterior.meta.get("step_size")


def _base_and_terms(
    density: Density,
    z: Tensor,
    args: _Data,
    num: int,
) -> tuple[Tensor, Tensor]:
    """Log joint at ``z`` (dim,) without the data, and the term of each row (num,), float64."""
    with density.floats():
        return _base_and_terms_in_floats(density, z, args, num)


def _base_and_terms_in_floats(
    density: Density,
    z: Tensor,
    args: _Data,
    num: int,
) -> tuple[Tensor, Tensor]:
    """What :func:`_base_and_terms` gives, where the density's floats are set."""
    base = density.log_jacobian(z).double()
    terms = torch.zeros(
        num,
        dtype=torch.float64,
        device=z.device,
    )
    for name, node in density.trace(density.constrain(z), args).items():
        if node["type"] != "sample" or is_subsample(node):
            continue
        if not is_datum(node):
            base = base + log_prob_sum(node)
            continue
        terms_of_site = row_terms(node, num)
        if terms_of_site is None:
            raise Refused(
                f"the log likelihood of {name!r} is not a sum over the {num} rows of the data (first axis), so rows "
                "cannot be added or removed: observe them one by one, in a pyro.plate, or fit again"
            )
        terms = terms + terms_of_site
    return base, terms


def _weighted_gradient(
    rows: Rows,
    density: Density,
    z: Tensor,
    change: Tensor,
    compile: Compile,
) -> Evaluate:
    """The tempered gradient of these weights: that of the last update where its shapes are these."""
    num = len(rows)
    capacity = 1 << len(rows).bit_length()
    args = tuple(_filled(values, capacity) for values in density.args)
    _check_rows(density, z[0], args, num)
    # at β a row has the weight ``start_weights + β · changes``
    changes = torch.nn.functional.pad(change.to(z.device), (0, capacity - num))
    is_row = torch.arange(capacity, device=z.device) < num
    start_weights = (is_row & (changes <= 0)).double()
    data = tuple(values for values in args if values is not None)
    key = (z.shape, z.dtype, str(z.device), *((values.shape, values.dtype) for values in data))
    if rows.shared.get("key") != key:
        rows.shared.update(key=key, step=_gradient_of_any_weights(density, compile))
    return partial(
        rows.shared["step"],
        start_weights=start_weights,
        changes=changes,
        data=data,
    )


def _filled(values: Tensor | None, capacity: int) -> Tensor | None:
    """Rows up to ``capacity``: copies of the last one."""
    if values is None:
        return None
    return torch.cat([values, values[-1:].expand(capacity - len(values), *values.shape[1:])])


def _check_rows(
    density: Density,
    z: Tensor,
    args: _Data,
    num: int,
) -> None:
    """Refuse rows that depend on each other, by what further ones change."""
    base, terms = _base_and_terms(density, z, density.args, num)
    try:
        filled_base, filled_terms = _base_and_terms(density, z, args, len(cast(Tensor, args[1])))
        close = partial(torch.allclose, rtol=1e-3, atol=1e-3)
        same = close(filled_base, base) and close(filled_terms[:num], terms)
    except (RuntimeError, ValueError, IndexError):
        same = False
    if not same:
        raise Refused(
            "the density of a row depends on the other rows (a mean over them, values for each, or their number in the "
            "program): take such numbers from outside, len(y) for the number, or fit again"
        )


def _gradient_of_any_weights(
    density: Density, compile: Compile
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Gradient, base and remainder at particles, over rows of any weights: by Python; compiled when called often."""

    def constant_and_slope(
        z: Tensor,
        start_weights: Tensor,
        changes: Tensor,
        *data: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The log joint at β = 0, and what β multiplies."""
        args = (None,) * (2 - len(data)) + data
        base, terms = _base_and_terms(density, z, args, len(start_weights))
        # a row that counts for nothing may be impossible
        at_start = torch.where(start_weights != 0, terms * start_weights, 0.0).sum()
        slope = torch.where(changes != 0, terms * changes, 0.0).sum()
        return base + at_start, slope

    calls = itertools.count()
    steps = dict[bool, Evaluate]()

    def step(
        z: Tensor,
        beta: Tensor,
        *,
        start_weights: Tensor,
        changes: Tensor,
        data: tuple[Tensor, ...],
    ) -> Any:
        often = compile and next(calls) >= _COMPILE_AFTER
        if often not in steps:
            # at least a tenth is moved: see Tempering._picked
            count = -(-len(z) // 10) if often else len(z)
            evaluate = evaluator(constant_and_slope)
            steps[often] = batched(
                evaluate, z[:count], often, start_weights, changes, *data
            ).evaluate
        return steps[often](z, beta, start_weights, changes, *data)

    return step


def _range_findings(x: Tensor | None, is_new: Tensor) -> list[Finding]:
    """New rows of a table further outside of the old ones' range than it is wide."""
    if x is None or x.dim() != 2 or not bool(is_new.any()):
        return []
    is_new = is_new.to(x.device)
    low, high = x[~is_new].double().aminmax(dim=0)
    is_outside = ((x[is_new] < 2 * low - high) | (x[is_new] > 2 * high - low)).any(1)
    count = int(is_outside.sum())
    return [Finding("rows_outside", {"count": count})] if count else []
