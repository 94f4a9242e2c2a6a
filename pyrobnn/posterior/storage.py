"""Posteriors on disk: one netCDF (HDF5) file with JSON attributes, written atomically, read without running code."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core.groups import HISTORY, POSTERIOR, ROWS, SAMPLE_STATS, variable
from pyrobnn.model import BNN, Density
from pyrobnn.model.density import Program
from pyrobnn.posterior.approximation import FAMILIES, RESTORERS, FlatApproximation
from pyrobnn.posterior.posterior import Posterior
from pyrobnn.posterior.rows import Rows

FORMAT = "pyrobnn-posterior"
FORMAT_VERSION = 1
ENGINE: Final = "h5netcdf"


def save(posterior: Posterior, path: str | Path) -> Path:
    """Write a posterior to ``path``; an existing file is replaced only when the new one is complete.

    Groups: posterior (chain, draw, …) and sample_stats as ArviZ reads them, history, the rows of
    the fit, and the tensors of the approximation. The model itself is code and is not stored: :func:`load` takes it.

    Raises:
        ValueError: ``path`` is a folder, or lies in one that cannot be written to.
    """
    groups = {
        POSTERIOR: _dataset(posterior.draws, "chain", "draw"),
        SAMPLE_STATS: _dataset(posterior.sample_stats, "chain", "draw"),
        HISTORY: _dataset(posterior.history),
        ROWS: _dataset(posterior.rows.state() if posterior.rows and posterior.rows.stored else {}),
    }
    tree = xr.DataTree.from_dict({name: data for name, data in groups.items() if data})
    return write_atomically(attach(posterior, tree), path)


def attach(posterior: Posterior, tree: xr.DataTree) -> xr.DataTree:
    """Give ``tree``, which has the posterior's draws, what :func:`load` needs beside them; return it."""
    approximation = posterior.approximation
    family, state = (None, {}) if approximation is None else approximation.state()
    if state:
        tree["approximation"] = xr.DataTree(_dataset(state))
    tree.attrs |= {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "meta": json.dumps(posterior.meta),
        "log_evidence": json.dumps(posterior.log_evidence),
        "family": json.dumps(family),
    }
    return tree


def write_atomically(tree: xr.DataTree, path: str | Path) -> Path:
    """Write a DataTree as netCDF beside ``path`` and move it there, so that ``path`` is never half a file.

    Raises:
        ValueError: ``path`` is a folder, or lies in one that cannot be written to.
        OSError: the disk is full, or the system refuses a file of that size; what stood at ``path`` is as it was.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    check_writable(path.parent)
    # a bit that a disk or a transfer flips is an error at reading; HDF5 has no checksums of strings
    checksums = {node.path: _checksums(node) for node in tree.subtree}
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    # WORKAROUND(h5py<=3.16): HDF5 ends the whole process where a write fails, Python raises: what fits in memory is
    # written by it
    num_bytes = sum(node.to_dataset().nbytes for node in tree.subtree)
    try:
        if num_bytes < 2**30:
            buffer = io.BytesIO()
            tree.to_netcdf(
                buffer,
                engine=ENGINE,
                encoding=checksums,
            )
            beside.write_bytes(buffer.getbuffer())
        else:
            tree.to_netcdf(
                beside,
                engine=ENGINE,
                encoding=checksums,
            )
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _checksums(node: xr.DataTree) -> dict[str, dict[str, bool]]:
    """The encoding of the numeric arrays of a group, by name."""
    encoding = {}
    for name, data in node.variables.items():
        if data.size and data.ndim and data.dtype.kind in "biufc":
            encoding[str(name)] = {"fletcher32": True}
    return encoding


def check_writable(folder: str | Path) -> None:
    """Make ``folder`` and write to it, so that an hour of fitting does not end with nowhere to go.

    Raises:
        ValueError: it cannot be made, is a file, or cannot be written to.
    """
    folder = Path(folder)
    probe = folder / f".{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(2**12))  # an empty file would fit on a full disk
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"cannot write to the folder {str(folder)!r} ({reason}): choose another"
        ) from error


def load(path: str | Path, model: BNN | Program) -> Posterior:
    """Read a posterior written by :func:`save`.

    Args:
        path: the file.
        model: the BNN (or Pyro program) it was fitted with; the draws go where its weights are.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated or foreign, or its sites are not the model's.

    Warns:
        UserWarning: the posterior's approximation is of a family that nobody has registered, and is left out.
    """
    tree = read(path)
    name = repr(str(path))
    if tree.attrs.get("format") != FORMAT:
        raise ValueError(
            f"{name} is netCDF but not a saved posterior: use Posterior.save to write one"
        )
    if tree.attrs["format_version"] > FORMAT_VERSION:
        raise ValueError(f"{name} was written by a newer pyrobnn: upgrade to read it")
    device = getattr(model, "device", torch.device("cpu"))
    draws = _tensors(tree, POSTERIOR, device)
    _check_sites(name, draws, model)
    meta = json.loads(tree.attrs["meta"])
    family = json.loads(tree.attrs["family"])
    posterior = Posterior(
        model,
        draws,
        _tensors(tree, SAMPLE_STATS, device),
        log_evidence=json.loads(tree.attrs["log_evidence"]),
        history=_tensors(tree, HISTORY, device),
        meta=meta,
        rows=Rows.from_state(_tensors(tree, ROWS, device)),
    )
    # of a program log_q of the draws is there; q at other points needs its data
    if family is None or not isinstance(model, BNN):
        return posterior
    if family not in FAMILIES and family not in RESTORERS:
        warnings.warn(
            f"an approximation of the family {family!r} cannot be rebuilt here: predictions put its draws through the "
            "model's network, log_q and the guide are left out. Import pyrobnn.inference, or the module of a method "
            "of your own, before loading (Pyro's guides are code and are not stored)",
            UserWarning,
            stacklevel=3,
        )
        return posterior
    fixed = {name: draws[name][0, 0] for name in meta["point_sites"]}
    layout = Density(
        model.sample_parameters,
        (),
        points="held",
        values=fixed,
    )
    state = _tensors(tree, "approximation", device)
    if family in RESTORERS:
        return RESTORERS[family](posterior, layout, family, state)
    return replace(posterior, approximation=FlatApproximation(layout, family, state))


def _check_sites(name: str, draws: Mapping[str, Tensor], model: BNN | Program) -> None:
    """ValueError where the draws of the file ``name`` do not have the sites of a BNN and their shapes."""
    for site, prior in getattr(model, "priors", {}).items():
        drawn = tuple(draws[site].shape[2:]) if site in draws else None
        shape = tuple(prior.shape())
        if drawn != shape:
            raise ValueError(
                f"{name} was fitted with another model: {site!r} of shape {drawn}, not {shape}"
            )


def read(path: str | Path) -> xr.DataTree:
    """Read a DataTree into memory.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a netCDF file, or a damaged one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist: check the path")
    try:
        with xr.open_datatree(path, engine=ENGINE) as tree:
            tree.load()
            return tree
    except (OSError, ValueError, KeyError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated or not a netCDF file ({reason})") from error


def _dataset(values: Mapping[str, Tensor], *shared: str) -> xr.Dataset:
    """Arrays whose first dimensions are ``shared``."""
    variables = {}
    for site, value in values.items():
        name = variable(site)
        dims = [*shared, *(f"{name}_dim_{i}" for i in range(value.dim() - len(shared)))]
        variables[name] = (dims, value.detach().cpu().numpy(), {"site": site})
    return xr.Dataset(variables)


def _tensors(tree: xr.DataTree, group: str, device: torch.device) -> dict[str, Tensor]:
    if group not in tree.children:
        return {}
    tensors = {}
    for name, data in tree[group].data_vars.items():
        site = data.attrs.get("site", str(name))
        tensors[site] = torch.from_numpy(np.array(data.values)).to(device)
    return tensors
