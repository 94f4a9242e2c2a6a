"""The validated problem that every ``fit`` starts from, and the posterior with its provenance that it ends with."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import platform
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, check_device, check_type
from pyrobnn.core.findings import Finding, as_json, warn
from pyrobnn.core.memory import free_bytes, require
from pyrobnn.data import Dataset
from pyrobnn.inference.fitting import batches
from pyrobnn.inference.fitting.derivative import wrong_derivative, wrong_gradient
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.program import (
    check_signature,
    cut_priors,
    impossible_under_prior,
    refuse_local,
    refuse_random,
    refuse_unobserved,
    rows_together,
    timed_gradient,
    what_program_says,
)
from pyrobnn.inference.fitting.provenance import Recorded
from pyrobnn.inference.fitting.provenance import settings as settings
from pyrobnn.inference.fitting.provenance import version_of as version_of
from pyrobnn.inference.fitting.shares import SharedLoader, Shares
from pyrobnn.inference.optim.descent import stopped_short
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.density import Program
from pyrobnn.model.dtypes import types_explained
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import Approximation, SampleStats, log_importance
from pyrobnn.posterior.head import Split, split
from pyrobnn.posterior.prediction import widest_layer

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pyrobnn.inference.fitting.loaders import Data

#: what a step of a fit reports: numbers by name, and as "snapshot" the function that gives the present posterior
Metrics = Mapping[str, Any]
#: called as ``callback(step, metrics)``; True stops the fit
Callback = Callable[[int, Metrics], bool | None]
#: whether parameters without a prior are optimised, or held where they start
Points = Literal["free", "held"]
#: of the rows that a training sends through the net, those whose passes take a tenth of its time: a gradient takes two
#: or three
SHARE_OF_PASSES = 0.2
#: numbers in the widest layer of rows whose passes take seconds
_NUMBERS_OF_SECONDS = 2**27
#: the density of the fit under way
_OF_FIT: ContextVar[Density | None] = ContextVar("_OF_FIT", default=None)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and its data, checked, on one device.

    ``x`` and ``y`` are the whole data set, of a streamed ``loader`` (else None) the first batch; ``density`` is over
    the whole data set; ``epoch``: what a pass of the loader gave, kept of gathered data too; ``stream`` is it only
    while a loader is read; ``notes`` on the data are kept by the posterior; ``gathered_size``, of the batches of a
    loader whose data a program was given as a whole; ``shares``, where its batches are those of one of several
    ranks; ``output_shape``, what a net returns for a row.
    """

    model: BNN | Program
    density: Density
    x: Any
    y: Any
    num_data: int | None
    device: torch.device
    loader: DataLoader | None = None
    epoch: batches.Epoch | None = None
    notes: list[str | Finding] = field(default_factory=list)
    gathered_size: int | None = None
    shares: Shares | None = None
    output_shape: tuple[int, ...] = ()

    @property
    def is_bnn(self) -> bool:
        """Whether the model is a BNN (otherwise a plain Pyro program)."""
        return isinstance(self.model, BNN)

    @property
    def bnn(self) -> BNN:
        """The model of a problem that ``is_bnn``; TypeError for a plain program."""
        return cast(
            BNN, check_type("model", self.model, BNN, "a pyrobnn.BNN, not a plain Pyro program")
        )

    @property
    def num_rows(self) -> int:
        """``num_data``, and one for a program whose data are not counted: what a loss is divided by."""
        return self.num_data or 1

    @property
    def stream(self) -> batches.Epoch | None:
        """What one pass through the loader gives; None when everything is in memory."""
        return None if self.loader is None else self.epoch

    def batches(self, batch_size: int | None = None) -> batches.Batches[tuple[Tensor, ...]]:
        """Endless mini-batches (x, y) in an order from torch's present random state; all data without a size."""
        return batches.mini_batches(self, batch_size)

    def one_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The checked batches of one pass through the loader."""
        return (
            batches.checked(self.bnn, x, y, self.device, self.loader)[:2]
            for x, y in self.loader or ()
        )

    def of_share(self, seed: int, *, own_noise: bool = True) -> Problem:
        """The problem as this rank's share of every batch has it, by the mean over ranks; itself without ranks.

        ``seed`` is that of the fit; ``own_noise``: what its density draws, it draws for the rows of a batch.
        """
        if not isinstance(self.loader, SharedLoader):
            return self
        ranks = self.loader.ranks
        shares = Shares(
            ranks,
            seed,
            self.device,
            own_noise=own_noise,
        )
        density = self.density.with_programs(
            partial(batches.share_of_program, num_ranks=ranks.count)
        )
        return dataclasses.replace(
            self,
            density=density,
            shares=shares,
        )

    def held_trunk(self, points: Points) -> Split | None:
        """The split of the net before its first parameter that is not held; None where nothing comes before it."""
        if not self.is_bnn or self.loader is not None or self.bnn.stochastic_layers():
            return None
        held_points = self.density.initial_points if points == "held" else {}
        params = weights_of(self.bnn.initial_values() | held_points)
        varying = [name for name in params if name not in held_points]
        trunk = split(self.bnn, varying, params, self.x)
        size = trunk.features(self.x[:1]).nbytes * len(self.x)
        # too much to hold is computed as often as it is needed
        return trunk if trunk.path and size < free_bytes(self.device) / 2 else None

    def at_head(self, net_split: Split, points: Points = "free") -> Problem:
        """The problem of the head of a net, its data the features."""
        if not net_split.path:
            return self
        head = net_split.head
        features = net_split.features(self.x)
        program = partial(head.pyro_model, num_data=self.num_data)
        density = Density(
            program,
            (features, self.y),
            points=points,
            values=net_split.params,
        )
        return dataclasses.replace(
            self,
            model=head,
            x=features,
            density=density,
        )

    def at_inputs(self, net_split: Split, x: Tensor) -> Problem:
        """The problem of the whole net with the priors of this one of its head; the density stays that of the head."""
        whole = copy.copy(net_split.whole)
        whole.priors = self.bnn.priors
        return dataclasses.replace(self, model=whole, x=x) if net_split.path else self

    def whole_slope(self, density: Density) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """z (dim,) → gradient (dim,) and value () of minus a log joint density of this model, given all of its data."""
        if self.is_bnn:
            return batches.in_parts(density, self.x, self.y)
        return torch.func.grad_and_value(lambda z: -density.log_joint(z))

    def in_double(self) -> Problem:
        """The problem computed in float64, whatever type the program's own tensors have."""
        return dataclasses.replace(self, density=self.density.double())

    def note(self, remark: str | Finding) -> None:
        """Warn of a remark and keep it for the posterior, once."""
        if remark not in self.notes:
            self.notes.append(remark)
            warn([remark])


def weights_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the site values that are weights of the net."""
    return {name: value.detach() for name, value in values.items() if name.startswith(NET)}


def prepare(
    model: BNN | Program,
    x: Data = None,
    y: Data = None,
    *,
    points: Points,
    device: str | torch.device | None = None,
    values: Mapping[str, Tensor] | None = None,
    stream: bool = False,
    deterministic: bool = True,
    num_draws: int = 0,
    check_derivative: bool = True,
    noisy: BNN | None = None,
    local_rows: bool = False,
) -> Problem:
    """Check the model and its data before any compute, and build the density.

    Args:
        model, x, y, device: as of :meth:`pyrobnn.inference.method.Method.fit`.
        points: whether point parameters are optimised (``"free"``) or held.
        values: values of held point parameters (an earlier posterior's).
        stream: keep a DataLoader as a stream; otherwise its batches are gathered in memory.
        deterministic: refuse dropout and batch-norm layers in training mode.
        num_draws: of all chains together, that the posterior will hold in memory.
        check_derivative: note where a program's gradient is not its derivative.
        noisy: the model with the noise of its training, where it has one: dropout.
        local_rows: take a latent site with a value for each row of a plate that draws a subsample.

    Raises:
        TypeError, ValueError: naming the argument and the remedy.
        NotEnoughMemory: the draws do not fit.
    """
    terms = _Terms(
        points,
        check_device(device),
        dict(values or {}),
        stream,
        deterministic,
        noisy,
        local_rows,
    )
    if isinstance(model, BNN):
        problem = _net_problem(model, x, y, terms)
    else:
        _check_program(model, x, takes_loader=local_rows)
        problem, seconds = _program_problem(model, x, y, terms)
        if check_derivative:
            with full_float32(problem.device):
                findings = wrong_derivative(problem.density, seconds)
            for finding in findings:
                problem.note(finding)
    return _with_room_for_draws(problem, terms, num_draws)


@dataclass(frozen=True, eq=False)
class _Terms:
    """What a method wants of a problem: arguments of :func:`prepare`, the device checked."""

    points: Points
    device: torch.device | None
    values: dict[str, Tensor]
    stream: bool
    deterministic: bool
    noisy: BNN | None
    local_rows: bool

    def values_on(self, device: torch.device | None) -> dict[str, Tensor]:
        """The values of held point parameters on a device, or where they are."""
        return {name: value.to(device or value.device) for name, value in self.values.items()}


def _net_problem(model: BNN, x: Data, y: Data, terms: _Terms) -> Problem:
    """The problem of a net, with remarks on its data and its gradient."""
    if terms.deterministic:
        _refuse_stochastic_layers(model)
    loader = x if isinstance(x, DataLoader) else None
    inputs, targets, epoch = _read_data(x, y, terms.stream)
    device = terms.device
    if device is None:
        device = check_device(inputs.device if isinstance(inputs, Tensor) else model.device)
    model = model.to(device)
    values = terms.values_on(device)
    inputs, targets, output_shape = batches.checked(model, inputs, targets, device, loader)
    refuse_random(
        model,
        inputs,
        deterministic=terms.deterministic,
    )
    num_data = len(inputs) if epoch is None else epoch.num_data
    streamed_epoch = epoch if terms.stream else None
    noisy = None
    if terms.noisy is not None:
        noisy = batches.scaled_program(terms.noisy.to(device), num_data, streamed_epoch)
    density = Density(
        batches.scaled_program(model, num_data, streamed_epoch),
        (inputs, targets),
        points=terms.points,
        values=values,
        noisy=noisy,
    )
    streamed = loader if terms.stream else None
    problem = Problem(
        model,
        density,
        inputs,
        targets,
        num_data,
        device,
        streamed,
        epoch,
        output_shape=output_shape,
    )
    for note in _remarks(epoch, model, inputs):
        problem.note(note)
    return problem


def _remarks(epoch: batches.Epoch | None, model: BNN, inputs: Tensor) -> list[Finding]:
    """What is to be said of a loader's rows, and of a net and its gradient."""
    loader_notes = () if epoch is None else epoch.notes
    return [*loader_notes, *rows_together(model, inputs), *wrong_gradient(model, inputs)]


def _program_problem(
    program: Program,
    x: Data,
    y: Data,
    terms: _Terms,
) -> tuple[Problem, float]:
    """The problem of a program, and the seconds that one gradient of its density takes."""
    check_signature(program)
    loader_notes: tuple[Finding, ...] = ()
    gathered_size: int | None = None
    if isinstance(x, DataLoader):
        gathered_size = x.batch_size
        x, y, epoch = _read_data(x, y, stream=False)
        loader_notes = () if epoch is None else epoch.notes
    tensors = [value for value in (x, y) if isinstance(value, Tensor)]
    target = terms.device or (check_device(tensors[0].device) if tensors else None)
    x = _moved(x, target)
    y = _moved(y, target)
    with types_explained(program, {"x": x, "y": y}):
        density = Density(
            program,
            (x, y),
            points=terms.points,
            values=terms.values_on(target),
        )
        if target and target.type != density.device.type:
            raise Refused(
                f"'device' is {str(target)!r} but the tensors of the program are on {density.device}: 'device' moves x "
                "and y, not what a program closes over; pass the data, fit(program, x, y), or make them there"
            )
        if not terms.local_rows:
            refuse_local(density)
        seconds = timed_gradient(density, {"x": x, "y": y})
    refuse_unobserved(program, density, x, y)
    if y is not None and not density.observes:
        raise ValueError(
            "'y' is given, and the program observes nothing: pass it to the site of the data, obs=y"
        )
    density = _in_fewer_operations(density)
    num_data = _num_data(tensors, density)
    notes: list[str | Finding] = []
    problem = Problem(
        program,
        density,
        x,
        y,
        num_data,
        density.device,
        notes=notes,
        gathered_size=gathered_size,
    )
    # what a prior on the parameter itself is told of is not told again
    prior_notes = cut_priors(density) or impossible_under_prior(density, seconds)
    for finding in (*loader_notes, *prior_notes):
        problem.note(finding)
    return problem, seconds


@contextlib.contextmanager
def known_to_subfits(density: Density) -> Iterator[None]:
    """Inside, in this thread, fits of the same program and data compute its density as this one does."""
    token = _OF_FIT.set(density)
    try:
        yield
    finally:
        _OF_FIT.reset(token)


def _in_fewer_operations(density: Density) -> Density:
    """The density of a program in fewer operations, as the fit has it that this one is a part of, if it is one."""
    known = _OF_FIT.get()
    as_known = None if known is None else density.merged_as(known)
    return density.in_fewer_operations() if as_known is None else as_known


def _num_data(tensors: Sequence[Tensor], density: Density) -> int | None:
    """Rows of a program's data; of data that it closes over, those of the largest plate; None without any."""
    if tensors and tensors[-1].dim():
        return len(tensors[-1])
    return max(density.plate_sizes.values(), default=None)


def _moved(value: Data, device: torch.device | None) -> Data:
    """A tensor on the device; anything else, or without a device, as it is."""
    return value.to(device) if device and isinstance(value, Tensor) else value


def _check_program(model: Program, x: Data, *, takes_loader: bool) -> None:
    """TypeError unless the model is a Pyro program, whose data are a DataLoader only for a method that takes one."""
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        raise TypeError(
            f"'model' is a bare net, {type(model).__name__}: pass pb.BNN(net, pb.priors.FanInNormal(), "
            "pb.likelihoods.Categorical()); of a trained one pb.posthoc(net, x, y) makes a posterior"
        )
    if not callable(model) or isinstance(model, type):
        raise TypeError(
            f"'model' must be a pyrobnn.BNN or a Pyro program fn(x, y), got {reprlib.repr(model)}"
        )
    if isinstance(x, DataLoader) and not takes_loader:
        raise TypeError(
            "a plain Pyro program takes its data as fn(x, y): pass tensors, not a DataLoader"
        )


def require_room(density: Density, num_draws: int, size: int) -> None:
    """NotEnoughMemory where so many draws of ``size`` parameters that vary do not fit."""
    require(
        2 * num_draws * size * density.dtype.itemsize,  # as flat vectors and by site
        density.device,
        f"a posterior of {num_draws} draws × {size} parameters",
        "lower num_draws (or the number of chains or members)",
    )


def _with_room_for_draws(problem: Problem, terms: _Terms, num_draws: int) -> Problem:
    """The problem, if its draws fit; noted where a sampler holds point parameters at values of no earlier fit."""
    require_room(problem.density, num_draws, problem.density.dim)
    names = sorted(set(problem.density.initial_points) - set(terms.values))
    if terms.points == "held" and names:
        problem.note(Finding("held_points", {"names": names}))
    return problem


def _refuse_stochastic_layers(model: BNN) -> None:
    """Refuse a net with dropout or batch-norm layers in training mode."""
    layers = model.stochastic_layers()
    if layers:
        raise Refused(
            f"the net is in training mode and its layers {', '.join(layers)} are random or batch-dependent, "
            "so it has no fixed density: call net.eval() before building the BNN, or take MAP, DeepEnsemble, SVI or "
            "SGHMC, which train such a net"
        )


def _read_data(x: Data, y: Data, stream: bool) -> tuple[ArrayLike, ArrayLike, batches.Epoch | None]:
    """The inputs and targets of a BNN; of a DataLoader its batches, and what one pass through it gives."""
    if isinstance(x, (Dataset, torch.utils.data.Dataset)):
        raise TypeError(
            "'x' is a data set: pass its parts, fit(model, data.x, data.y), or torch's in a DataLoader"
        )
    if isinstance(x, DataLoader):
        if y is not None:
            raise TypeError("'y' must be left out when 'x' is a DataLoader: its batches are (x, y)")
        return batches.read(x, gather=not stream)
    if x is None or y is None:
        raise TypeError(
            "'x' and 'y' are needed: pass fit(model, x, y), or fit(model, loader) with a DataLoader"
        )
    return cast("ArrayLike", x), cast("ArrayLike", y), None


def make_posterior(
    problem: Problem,
    method: Recorded,
    draws: Mapping[str, Tensor],
    *,
    seed: int,
    timings: Mapping[str, float],
    sample_stats: Mapping[str, Tensor] | None = None,
    approximation: Approximation | None = None,
    point_values: Mapping[str, Tensor] | None = None,
    meta: Mapping[str, Any] | None = None,
    notes: Sequence[str | Finding] = (),
    interrupted: bool = False,
    importance: bool | Callable[[], Mapping[str, Tensor]] = True,
    rows_seen: int | None = None,
    **parts: Any,
) -> Posterior:
    r"""Assemble a posterior with its provenance.

    Args:
        problem: what was fitted.
        method: the configuration (a frozen dataclass); its fields and facts are recorded.
        draws: site → (chain, draw, \*shape).
        point_values: fitted point parameters, site → value; they join the draws, constant over them.
        timings: seconds of ``compile`` and ``fit``.
        notes: what the user has to know of this fit: warned of, kept in ``meta["warnings"]`` and, as codes, in
            ``meta["findings"]``.
        interrupted: the fit was stopped by Ctrl-C and holds what it had by then.
        importance: whether log_p and log_q of an approximation's draws (k-hat and LOO need them) can be had when they
            are asked for, or the function that gives them.
        rows_seen: that a training has sent through the net: where they would take more than a tenth of its time, they
            are not computed because the posterior is saved. None: they are.
        sample_stats, approximation, meta, parts: arguments of :class:`pyrobnn.Posterior`.
    """
    fixed = problem.density.initial_points | dict(point_values or {})
    fixed = {name: value.detach() for name, value in fixed.items()}
    draws = _with_points({name: value.detach() for name, value in draws.items()}, fixed)
    meta = dict(meta or {})
    notes = list(notes)
    if not interrupted:
        notes += stopped_short(meta)
    stats: MutableMapping[str, Tensor] = dict(sample_stats or {})
    if approximation is not None and importance:
        if importance is True:
            density = problem.density.holding(fixed)
            importance = partial(log_importance, density, approximation, draws)
        # the context manager as a decorator: the pass runs later, when it is asked for
        num_draws = next(iter(draws.values())).shape[:2].numel()
        stats = SampleStats(
            stats,
            full_float32(problem.device)(importance),
            is_dear=rows_seen is not None and _passes_are_dear(problem, num_draws, rows_seen),
        )
    program_meta: dict[str, Any] = {}
    if not problem.is_bnn:
        with full_float32(problem.device):
            derived = what_program_says(problem.density, draws, fixed)
        draws |= derived.values
        notes += derived.notes
        program_meta = derived.meta | _rounded_by_program(problem.density, draws)
    notes = _new_notes(problem.notes, notes)
    remarks = [*problem.notes, *notes]
    record = _provenance(problem, method, seed, timings) | {
        "point_sites": sorted(fixed),
        "interrupted": interrupted,
        "findings": as_json(remarks),
        "warnings": [*map(str, remarks), *meta.pop("warnings", ())],
        **program_meta,
        **meta,
    }
    if interrupted:
        record["stopped"] = "interrupt"
    warn(notes)
    return Posterior(
        problem.model,
        draws,
        stats,
        approximation=approximation,
        meta=record,
        **parts,
    )


def _passes_are_dear(problem: Problem, num_passes: int, rows_seen: int) -> bool:
    """Whether so many passes over all rows take seconds, and more than a tenth of a training."""
    if not problem.is_bnn:
        return False
    num_rows = num_passes * problem.num_rows
    is_long = num_rows * widest_layer(problem.bnn, problem.x) > _NUMBERS_OF_SECONDS
    return is_long and num_rows > SHARE_OF_PASSES * rows_seen


def posterior_with_notes(posterior: Posterior, notes: Sequence[Finding]) -> Posterior:
    """The posterior with what was noticed after it was made, warned of and kept in its ``meta``."""
    if not notes:
        return posterior
    warn(notes)
    meta = posterior.meta
    added = {
        "findings": [*meta["findings"], *as_json(notes)],
        "warnings": [*meta["warnings"], *map(str, notes)],
    }
    return dataclasses.replace(posterior, meta=meta | added)


def _with_points(draws: dict[str, Tensor], fixed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws by site, with point parameters that they lack as constants over them."""
    shape = next(iter(draws.values())).shape[:2]
    points = {
        name: value.expand(*shape, *value.shape)
        for name, value in fixed.items()
        if name not in draws
    }
    return draws | points


def _new_notes(
    known: Sequence[str | Finding], notes: Sequence[str | Finding]
) -> list[str | Finding]:
    """The notes that are not known yet, each once."""
    new: list[str | Finding] = []
    for note in notes:
        if note not in known and note not in new:
            new.append(note)
    return new


def _rounded_by_program(density: Density, draws: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entry of ``meta`` that has the types of those sites whose draws are finer than the program has them."""
    coarser = {
        name: dtype
        for name, dtype in density.own_dtypes.items()
        if name in draws and draws[name].dtype != dtype
    }
    if not coarser:
        return {}
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in coarser.items()}
    return {"program_dtypes": names}


def _provenance(
    problem: Problem,
    method: Recorded,
    seed: int,
    timings: Mapping[str, float],
) -> dict[str, Any]:
    """Where a posterior comes from: the method with its settings and facts, the data, the device, the versions."""
    return {
        "method": type(method).__name__,
        "settings": settings(method),
        "seed": seed,
        "num_data": problem.num_data,
        "input_shape": list(problem.x.shape[1:]) if problem.is_bnn else None,
        "timings": {name: round(value, 6) for name, value in timings.items()},
        "kind": method.kind,
        "claim": method.claim,
        "remedy": method.remedy,
        "iid": method.kind != "chains",
        "temperature": 1.0,
        "likelihood": problem.bnn.likelihood.task if problem.is_bnn else None,
        "noise": problem.bnn.likelihood.own.kinds if problem.is_bnn else None,
        "device": str(problem.device),
        "versions": {
            "python": platform.python_version(),
            "pyrobnn": import_module("pyrobnn").__version__,
        }
        | {name: version_of(name) for name in ("torch", "pyro-ppl", "tyxe", "arviz-stats")},
    }


def require_net(method: Recorded, model: BNN | Program) -> BNN:
    """The model of a method that trains a network: Refused of a plain program, TypeError of anything else."""
    if isinstance(model, BNN):
        return model
    raise (Refused if callable(model) else TypeError)(
        f"{type(method).__name__} trains a network, so 'model' must be a pyrobnn.BNN, got {model!r}: use MAP, SVI, "
        "Laplace, NUTS or SMC, which take any Pyro program"
    )


def run_subfit(search: Callable[[], Posterior], owner: str) -> Posterior:
    """A fit that another one begins with, which reports what is in its ``meta``; KeyboardInterrupt if it was cut."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = search()
    for warning in caught:
        if str(warning.message) not in posterior.meta["warnings"]:
            warnings.warn_explicit(
                str(warning.message), warning.category, warning.filename, warning.lineno
            )
    if posterior.meta["interrupted"]:
        raise KeyboardInterrupt(
            f"the search was interrupted by Ctrl-C while {owner} looked for its start: there is nothing to return yet"
        )
    return posterior


def snapshot(
    problem: Problem,
    method: Recorded,
    draws: Mapping[str, Tensor],
    *,
    seed: int,
    **options: Any,
) -> Posterior:
    """A posterior of the draws there are on the way, which says nothing: its fit will, at its end."""
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        return make_posterior(
            problem,
            method,
            draws,
            seed=seed,
            timings={},
            importance=False,
            **options,
        )


def interruption(
    method: Recorded,
    done: int,
    total: int,
    unit: str,
    checkpoint: str | Path | None = None,
) -> Finding:
    """A fit that Ctrl-C ended after ``done`` of ``total`` steps or draws (``unit``); where it can go on from."""
    values = {
        "method": type(method).__name__,
        "done": done,
        "total": total,
        "unit": unit,
    }
    if checkpoint is not None:
        values["checkpoint"] = str(checkpoint)
    return Finding("interrupted", values)


def launches(device: torch.device, why: str) -> list[Finding]:
    """That the steps of a run on a GPU are not compiled, and why; nothing on a CPU."""
    if device.type == "cpu":
        return []
    return [Finding("launched_one_by_one", {"why": why, "device": str(device)})]
