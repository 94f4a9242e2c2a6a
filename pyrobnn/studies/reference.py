"""Stored posteriors of nets that two samplers agree on: nets, priors, likelihoods and data, and the draws."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from torch import Tensor

from pyrobnn import likelihoods
from pyrobnn.core.groups import FUNCTION, POSTERIOR, SAMPLE_DIMS
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.data import Dataset, Standardizer, breast_cancer, diabetes, digits, gap, polynomial
from pyrobnn.data.bundled import bundled
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors

#: kinds of quantities beside those of the probes
NOISE = "noise"
DENSITY = "density"
SUMMARY_COLUMNS = ("mean", "mean_error", "sd", "sd_error", "ess_bulk", "ess_tail", "rhat")
_FOLDER = "stored"


@dataclass(frozen=True)
class Problem:
    """A net with its prior and likelihood, and the data that it learns from.

    Args:
        source: of all rows, in their own units.
        num_data: rows that the net learns from, evenly spread over the source; at most 100 others are held out.
        hidden: width of each hidden layer, of tanh units.
        likelihood: a fresh one.
        num_outputs: width of the net's output.
        prior_scale: of :class:`pyrobnn.priors.FanInNormal`; biases have scale 1.
        standard_y: whether targets are standardised, as inputs are, by the rows that the net learns from.
    """

    source: Callable[[], Dataset]
    num_data: int
    hidden: tuple[int, ...]
    likelihood: Callable[[], likelihoods.Likelihood]
    num_outputs: int = 1
    prior_scale: float = 1.0
    standard_y: bool = True

    @property
    def about(self) -> str:
        """What net on what data, in a few words."""
        return f"{' and '.join(map(str, self.hidden))} tanh units on {self.source().name}, {self.likelihood()!r}"

    def data(self) -> tuple[Dataset, Dataset]:
        """What the net learns from and what is held out, in standard units."""
        rows = self.source()
        chosen = evenly_spaced(rows.num_data, self.num_data, torch.float64)
        unused = torch.tensor(sorted(set(range(rows.num_data)) - set(chosen.tolist())))
        train = rows.subset(chosen)
        picked = evenly_spaced(len(unused), min(100, len(unused)), torch.float64)
        held_out = rows.subset(unused[picked])
        units = Standardizer.fit(train)
        if not self.standard_y:
            units = replace(
                units,
                y_mean=torch.zeros_like(units.y_mean),
                y_scale=torch.ones_like(units.y_scale),
            )
        return units.transform(train), units.transform(held_out)

    def model(self) -> BNN:
        """The net's program in standard units, its initial weights always the same."""
        net = networks.mlp(
            self.data()[0].x.shape[1],
            self.hidden,
            self.num_outputs,
            activation="tanh",
            seed=0,
        )
        return BNN(net, priors.FanInNormal(self.prior_scale), self.likelihood())


def _moons() -> Dataset:
    from sklearn import datasets

    x, y = datasets.make_moons(
        400,
        noise=0.25,
        random_state=0,
    )
    return Dataset(
        x.astype("float32"), y, "moons", "classification", ("x1", "x2"), "moon", ("upper", "lower")
    )


def _small_digits() -> Dataset:
    """Digits 0 to 4, their 8 × 8 pixels averaged to 4 × 4."""
    all_digits = digits()
    images = all_digits.subset(torch.nonzero(all_digits.y < 5)[:, 0])
    pixels = torch.nn.functional.avg_pool2d(images.x, 2).flatten(1)
    return Dataset(pixels, images.y, "digits", "classification", (), "digit", tuple("01234"))


def problems() -> dict[str, Problem]:
    """The problems by name."""
    return _regressions() | _classifications()


def _regressions() -> dict[str, Problem]:
    inferred = partial(likelihoods.HomoskedasticGaussian, dist.HalfNormal(1.0))
    fixed = partial(likelihoods.HomoskedasticGaussian, 0.4)
    varying = partial(likelihoods.HeteroskedasticGaussian, 0.05)
    long_gap = partial(gap, 480)
    hetero = partial(polynomial, 300, noise="heteroskedastic")
    on_gap: dict[str, Any] = {"prior_scale": 2.0, "standard_y": False}
    return {
        "gap_1": Problem(long_gap, 60, (1,), inferred, **on_gap),
        "gap_5": Problem(long_gap, 240, (5,), fixed, **on_gap),
        "gap_50": Problem(long_gap, 60, (50,), inferred, **on_gap),
        "gap_3x50": Problem(
            long_gap,
            40,
            (50, 50, 50),
            fixed,
            prior_scale=1.5,
            standard_y=False,
        ),
        "polynomial_hetero_10": Problem(hetero, 100, (10,), varying, 2),
        "diabetes_10": Problem(diabetes, 60, (10,), inferred),
        "diabetes_hetero_5": Problem(diabetes, 60, (5,), varying, 2),
    }


def _classifications() -> dict[str, Problem]:
    return {
        "iris_5": Problem(lambda: bundled("iris", "class"), 100, (5,), likelihoods.Categorical, 3),
        "wine_10": Problem(lambda: bundled("wine", "class"), 60, (10,), likelihoods.Categorical, 3),
        "breast_cancer_5": Problem(breast_cancer, 60, (5,), likelihoods.Bernoulli),
        "moons_2x10": Problem(
            _moons,
            60,
            (10, 10),
            likelihoods.Bernoulli,
            prior_scale=2.0,
        ),
        "digits_10": Problem(_small_digits, 60, (10,), likelihoods.Categorical, 5),
    }


@dataclass(frozen=True, eq=False)
class Reference:
    """The posterior of a small net, by long runs of NUTS and of sequential Monte Carlo that agree.

    Args:
        name: of the reference.
        about: what net on what data, in a sentence.
        data: what the net learns from, in standard units.
        held_out: other rows of the same source, in the same units.
        probe_x: inputs (probe, feature) where functions are compared, those of :func:`pyrobnn.to_datatree`.
        probe_kinds: of each probe: "train", "between" (the data) or "outside" (of them).
        summary: Dataset over ``quantity`` (coordinates: its name, and ``kind``: that of its probe, "noise" or
            "density") with ``mean``, ``sd``, their standard errors ``mean_error`` and ``sd_error``, ``ess_bulk``,
            ``ess_tail``, ``rhat`` and ``quantiles`` (level, quantity) at 0.5 %, 1.5 %, … of all draws of NUTS.
        draws: a few hundred of them, evenly spread, (chain, draw, quantity).
        log_evidence: log marginal likelihood, nats, by sequential Monte Carlo.
        log_evidence_error: its standard error, nats.
        record: how it was made: settings and effort of both samplers, and their differences, in standard errors.

    Example:
        >>> import pyrobnn as pb
        >>> reference = pb.references.load("gap_1")
        >>> reference.model()
        BNN(Sequential, FanInNormal, HomoskedasticGaussian(inferred scale), 4 weights)
        >>> len(reference.data.x), bool(reference.summary["rhat"].max() <= 1.01)
        (60, True)
        >>> data, method = reference.data, pb.Laplace(num_steps=200, compile=False)
        >>> laplace = method.fit(reference.model(), data.x, data.y, num_draws=500)
        >>> tree = laplace.to_datatree(data.x, data.y)
        >>> far = pb.diagnostics.fidelity(tree, reference.to_datatree()).per_point
        >>> bool(far["wasserstein"].mean() < 1)  # of the function, in the reference's sd
        True
    """

    name: str
    about: str
    data: Dataset
    held_out: Dataset
    probe_x: Tensor
    probe_kinds: tuple[str, ...]
    summary: xr.Dataset
    draws: np.ndarray
    log_evidence: float
    log_evidence_error: float
    record: Mapping[str, Any]

    def model(self) -> BNN:
        """The net with its prior and likelihood, in standard units; its initial weights are always the same."""
        return problems()[self.name].model()

    def to_datatree(self) -> xr.DataTree:
        """The function's draws as DataTree: ``pb.diagnose(tree, reference=reference.to_datatree())``, and so for
        :func:`pyrobnn.diagnostics.fidelity`.
        """
        of_function = ~np.isin(self.summary["kind"].values, (NOISE, DENSITY))
        f = self.draws[:, :, of_function].reshape(*self.draws.shape[:2], len(self.probe_x), -1)
        function = {
            "f": ((*SAMPLE_DIMS, "probe", "output"), f),
            "probe_x": (("probe", "feature"), self.probe_x.reshape(len(self.probe_x), -1).numpy()),
            "probe_kind": (("probe",), np.array(self.probe_kinds)),
        }
        names = [
            str(name).replace("-", "_").replace(" ", "_")
            for name in self.summary["quantity"].values
        ]
        scalar_columns = np.flatnonzero(~of_function)
        scalar_draws = {
            names[index]: (SAMPLE_DIMS, self.draws[:, :, index]) for index in scalar_columns
        }
        tree = xr.DataTree.from_dict(
            {POSTERIOR: xr.Dataset(scalar_draws), FUNCTION: xr.Dataset(function)}
        )
        tree.attrs |= {
            "method": "NUTS",
            "label": f"reference {self.name}",
            "kind": "chains",
            "claim": "exact",
        }
        tree.attrs |= {"iid": 0, "likelihood": self.model().likelihood.task}
        return tree


def names() -> tuple[str, ...]:
    """The names that :func:`load` knows."""
    stored = {entry.name for entry in files(__package__).joinpath(_FOLDER).iterdir()}
    return tuple(name for name in problems() if f"{name}.npz" in stored)


def load(name: str) -> Reference:
    """A reference by its name.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> load("gap_5").data.num_data
        240
    """
    if name not in names():
        raise ValueError(f"unknown reference {name!r}: choose one of {', '.join(names())}")
    with as_file(files(__package__).joinpath(_FOLDER, f"{name}.npz")) as path:
        return read(path, name)


def read(path: Path, name: str) -> Reference:
    """The reference `name` from its file."""
    with np.load(path, allow_pickle=False) as file:
        stored = {key: file[key] for key in file.files}
    record = json.loads(str(stored["record"]))
    coords = {key: ("quantity", stored[key]) for key in ("quantity", "kind")}
    columns: dict[str, Any] = {
        key: ("quantity", stored[key].astype(np.float64)) for key in SUMMARY_COLUMNS
    }
    columns["quantiles"] = ("level", "quantity"), stored["quantiles"].astype(np.float64)
    problem = problems()[name]
    train, held_out = problem.data()
    return Reference(
        name=name,
        about=problem.about,
        data=train,
        held_out=held_out,
        probe_x=torch.from_numpy(stored["probe_x"]),
        probe_kinds=tuple(map(str, stored["probe_kind"])),
        summary=xr.Dataset(columns, coords=coords),
        draws=stored["draws"].astype(np.float64),
        log_evidence=record.pop("log_evidence"),
        log_evidence_error=record.pop("log_evidence_error"),
        record=record,
    )
