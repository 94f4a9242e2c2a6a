"""The validated problem that every ``fit`` starts from, and the posterior with its provenance that it ends with."""

from __future__ import annotations

import copy
import dataclasses
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import Distribution
from typing import Any, Literal, cast

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
    check_gradient,
    check_signature,
    refuse_random,
    rows_together,
    what_program_says,
)
from pyrobnn.inference.optim.descent import stopped_short
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.dtypes import types_explained
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import Approximation, SampleStats, log_importance
from pyrobnn.posterior.head import Split, split

Callback = Callable[[int, Mapping[str, Any]], bool | None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and its data, checked, on one device.

    ``x`` and ``y`` are the whole data set, of a streamed ``loader`` (else None) the first batch; ``density`` is over
    the whole data set; ``notes`` on the data are kept by the posterior.
    """

    model: BNN | Callable[..., Any]
    density: Density
    x: Any
    y: Any
    num_data: int | None
    device: torch.device
    loader: DataLoader | None = None
    epoch: batches.Epoch | None = None
    notes: list[str | Finding] = field(default_factory=list)

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

    def batches(self, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless mini-batches (x, y) in an order from torch's present random state; all data without a size."""
        return batches.mini_batches(self, batch_size)

    def one_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The checked batches of one pass through the loader."""
        return (
            batches.checked(self.bnn, x, y, self.device, self.loader) for x, y in self.loader or ()
        )

    def held_trunk(self, points: Literal["free", "held"]) -> Split | None:
        """The split of the net before its first parameter that is not held; None where nothing comes before it."""
        held_points = self.density.initial_points if points == "held" else {}
        if not self.is_bnn or self.loader is not None or self.bnn.stochastic_layers():
            return None
        values = self.bnn.initial_values() | held_points
        params = {name: value.detach() for name, value in values.items() if name.startswith(NET)}
        varying = [name for name in params if name not in held_points]
        trunk = split(self.bnn, varying, params, self.x)
        size = trunk.features(self.x[:1]).nbytes * len(self.x)
        # too much to hold is computed as often as it is needed
        return trunk if trunk.path and size < free_bytes(self.device) / 2 else None

    def at_head(self, parts: Split, points: Literal["free", "held"] = "free") -> Problem:
        """The problem of the head of a net, its data the features."""
        if not parts.path:
            return self
        head = parts.head
        features = parts.features(self.x)
        program = partial(head.pyro_model, num_data=self.num_data)
        density = Density(
            program,
            (features, self.y),
            points=points,
            values=parts.params,
        )
        return dataclasses.replace(
            self,
            model=head,
            x=features,
            density=density,
        )

    def at_inputs(self, parts: Split, x: Tensor) -> Problem:
        """The problem of the whole net with the priors of this one of its head; the density stays that of the head."""
        whole = copy.copy(parts.whole)
        whole.priors = self.bnn.priors
        return dataclasses.replace(self, model=whole, x=x) if parts.path else self

    def in_double(self) -> Problem:
        """The problem computed in float64, whatever type the program's own tensors have."""
        return dataclasses.replace(self, density=self.density.double())

    def note(self, remark: str | Finding) -> None:
        """Warn of a remark and keep it for the posterior, once."""
        if remark not in self.notes:
            self.notes.append(remark)
            warn([remark])


def prepare(
    model: BNN | Callable[..., Any],
    x: Any = None,
    y: Any = None,
    *,
    points: Literal["free", "held"],
    device: str | torch.device | None = None,
    values: Mapping[str, Tensor] | None = None,
    stream: bool = False,
    deterministic: bool = True,
    num_draws: int = 0,
    check_derivative: bool = True,
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

    Raises:
        TypeError, ValueError: naming the argument and the remedy.
        NotEnoughMemory: the draws do not fit.
    """
    where = check_device(device)
    loader = x if isinstance(x, DataLoader) else None
    if not isinstance(model, BNN):
        _check_program(model, loader)
        problem, seconds = _program_problem(model, x, y, points, where, values)
        if check_derivative:
            with full_float32(problem.device):
                findings = wrong_derivative(problem.density, seconds)
            for finding in findings:
                problem.note(finding)
        return _checked(problem, points, values, num_draws)
    if deterministic:
        _refuse_stochastic_layers(model)
    x, y, epoch = _read_data(x, y, stream)
    where = where or check_device(x.device if isinstance(x, Tensor) else model.device)
    model = model.to(where)
    values = {name: value.to(where) for name, value in (values or {}).items()}
    x, y = batches.checked(model, x, y, where, loader)
    refuse_random(
        model,
        x,
        deterministic=deterministic,
    )
    num_data = len(x) if epoch is None else epoch.num_data
    program = batches.scaled_program(model, num_data, epoch if stream else None)
    density = Density(
        program,
        (x, y),
        points=points,
        values=values,
    )
    problem = Problem(model, density, x, y, num_data, where, loader if stream else None, epoch)
    loader_notes = () if epoch is None else epoch.notes
    for note in (*loader_notes, *rows_together(model, x), *wrong_gradient(model, x)):
        problem.note(note)
    return _checked(problem, points, values, num_draws)


def _check_program(model: object, loader: DataLoader | None) -> None:
    """TypeError unless the model is a Pyro program whose data are no DataLoader."""
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        raise TypeError(
            f"'model' is a bare net, {type(model).__name__}: pass pb.BNN(net, pb.priors.FanInNormal(), "
            "pb.likelihoods.Categorical()); of a trained one pb.posthoc(net, x, y) makes a posterior"
        )
    if not callable(model) or isinstance(model, type):
        raise TypeError(f"'model' must be a pyrobnn.BNN or a Pyro program fn(x, y), got {model!r}")
    if loader is not None:
        raise TypeError(
            "a plain Pyro program takes its data as fn(x, y): pass tensors, not a DataLoader"
        )


def _refuse_stochastic_layers(model: BNN) -> None:
    """Refuse a net with dropout or batch-norm layers in training mode."""
    layers = model.stochastic_layers()
    if layers:
        raise Refused(
            f"the net is in training mode and its layers {', '.join(layers)} are random or batch-dependent, "
            "so it has no fixed density: call net.eval() before building the BNN"
        )


def _read_data(x: Any, y: Any, stream: bool) -> tuple[Any, Any, batches.Epoch | None]:
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
    return x, y, None


def make_posterior(
    problem: Problem,
    method: Any,
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
        sample_stats, approximation, meta, parts: arguments of :class:`pyrobnn.Posterior`.
    """
    draws = {name: value.detach() for name, value in draws.items()}
    num_chains, num_draws = next(iter(draws.values())).shape[:2]
    fixed = problem.density.initial_points | dict(point_values or {})
    fixed = {name: value.detach() for name, value in fixed.items()}
    for name, value in fixed.items():
        if name not in draws:
            draws[name] = value.expand(num_chains, num_draws, *value.shape)
    meta = dict(meta or {})
    notes = list(notes)
    if not interrupted:
        notes += stopped_short(meta)
    stats: MutableMapping[str, Tensor] = dict(sample_stats or {})
    if approximation is not None and importance:
        density = problem.density.holding(fixed)
        weigh = importance
        if weigh is True:
            weigh = partial(log_importance, density, approximation, draws)
        stats = SampleStats(stats, full_float32(problem.device)(weigh))
    program_meta: dict[str, Any] = {}
    if not problem.is_bnn:
        with full_float32(problem.device):
            values, program_meta, program_notes = what_program_says(problem.density, draws, fixed)
        draws |= values
        notes += program_notes
        program_meta |= _rounded_by_program(problem.density, draws)
    notes = _new_notes(problem, notes)
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


def _new_notes(problem: Problem, notes: Sequence[str | Finding]) -> list[str | Finding]:
    """The notes that the problem does not have yet, each once."""
    new: list[str | Finding] = []
    for note in notes:
        if note not in problem.notes and note not in new:
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
    method: Any,
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


def version_of(package: str) -> str:
    """The version that is installed; "unknown" of a package without its metadata, as PYTHONPATH may find one."""
    distribution = next(iter(Distribution.discover(name=package)), None)
    return "unknown" if distribution is None else distribution.version


def require_net(method: Any, model: Any) -> BNN:
    """The model of a method that trains a network: Refused of a plain program, TypeError of anything else."""
    if isinstance(model, BNN):
        return model
    raise (Refused if callable(model) else TypeError)(
        f"{type(method).__name__} trains a network, so 'model' must be a pyrobnn.BNN, got {model!r}: use SVI, NUTS or "
        "Laplace(curvature='hessian')"
    )


def interruption(
    method: Any,
    done: int,
    total: int,
    unit: str,
    checkpoint: Any = None,
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


def launches(device: torch.device, why: str) -> list[Finding]:
    """Of a run on a GPU whose steps are not compiled."""
    if device.type == "cpu":
        return []
    return [Finding("launched_one_by_one", {"why": why, "device": str(device)})]


def settings(method: Any) -> dict[str, Any]:
    """The configuration of a method as plain values that JSON can hold."""

    def value_of(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [value_of(item) for item in value]
        plain = value is None or isinstance(value, (bool, int, float, str))
        return value if plain else getattr(value, "__name__", None) or repr(value)

    return {
        field.name: value_of(getattr(method, field.name)) for field in dataclasses.fields(method)
    }


def _program_problem(
    program: Callable[..., Any],
    x: Any,
    y: Any,
    points: Literal["free", "held"],
    device: torch.device | None,
    values: Mapping | None,
) -> tuple[Problem, float]:
    """The problem of a program, and the seconds that one gradient of its density takes."""
    check_signature(program)
    tensors = [value for value in (x, y) if isinstance(value, Tensor)]
    target = device
    if target is None and tensors:
        target = check_device(tensors[0].device)
    if target is not None:
        x = x.to(target) if isinstance(x, Tensor) else x
        y = y.to(target) if isinstance(y, Tensor) else y
    values = {name: value.to(target or value.device) for name, value in (values or {}).items()}
    with types_explained(program, {"x": x, "y": y}):
        density = Density(
            program,
            (x, y),
            points=points,
            values=values,
        )
        device = density.device
        if target and target.type != device.type:
            raise Refused(
                f"'device' is {str(target)!r} but the tensors of the program are on {device}: 'device' moves x and y, "
                "not what a program closes over; pass the data, fit(program, x, y), or make them there"
            )
        seconds = check_gradient(density, {"x": x, "y": y})
    if y is not None and not density.observes:
        raise ValueError(
            "'y' is given, and the program observes nothing: pass it to the site of the data, obs=y"
        )
    # data that the program closes over are counted by the plate that subsamples them
    plate = max(density.plate_sizes.values(), default=None)
    num_data = len(tensors[-1]) if tensors and tensors[-1].dim() else plate
    return Problem(program, density, x, y, num_data, device), seconds


def _checked(
    problem: Problem,
    points: str,
    values: Mapping[str, Tensor] | None,
    num_draws: int,
) -> Problem:
    """The problem, if its draws fit; noted where a sampler holds point parameters at values of no earlier fit."""
    size = problem.density.dim
    require(
        2 * num_draws * size * problem.density.dtype.itemsize,  # as flat vectors and by site
        problem.device,
        f"a posterior of {num_draws} draws × {size} parameters",
        "lower num_draws (or the number of chains or members)",
    )
    names = sorted(set(problem.density.initial_points) - set(values or {}))
    if points == "held" and names:
        problem.note(Finding("held_points", {"names": names}))
    return problem


def snapshot(
    problem: Problem,
    method: Any,
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
