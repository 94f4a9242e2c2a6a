"""Stored posteriors of nets that two samplers agree on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.groups import FUNCTION, POSTERIOR, SAMPLE_DIMS
from pyrobnn.data import Dataset
from pyrobnn.model import BNN
from pyrobnn.references.problems import problems

#: kinds of quantities beside those of the probes
NOISE, DENSITY = "noise", "density"
MOMENTS = ("mean", "mean_error", "sd", "sd_error", "ess_bulk", "ess_tail", "rhat")
_FOLDER = "stored"


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
        record: how it was made: settings and effort of both samplers, and their differences, in the standard error of
            both.

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
        names = [str(name).replace("-", "_").replace(" ", "_") for name in self.summary["quantity"].values]
        rest = np.flatnonzero(~of_function)
        density = {names[index]: (SAMPLE_DIMS, self.draws[:, :, index]) for index in rest}
        tree = xr.DataTree.from_dict({POSTERIOR: xr.Dataset(density), FUNCTION: xr.Dataset(function)})
        tree.attrs |= {"method": "NUTS", "label": f"reference {self.name}", "kind": "chains", "claim": "exact"}
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
    columns: dict[str, Any] = {key: ("quantity", stored[key].astype(np.float64)) for key in MOMENTS}
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
