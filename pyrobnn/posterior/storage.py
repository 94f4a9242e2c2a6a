"""Posteriors on disk: one netCDF (HDF5) file with JSON attributes, written atomically, read without running code."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import warnings
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import torch
import xarray as xr
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyrobnn.core.files import check_seal, seal
from pyrobnn.core.groups import BUFFERS, HISTORY, POSTERIOR, ROWS, SAMPLE_STATS, variable
from pyrobnn.model import BNN, Density
from pyrobnn.model.bnn import NET
from pyrobnn.model.density import Program
from pyrobnn.posterior.approximation import (
    FAMILIES,
    RESTORERS,
    FlatApproximation,
    SampleStats,
    is_stored_once,
)
from pyrobnn.posterior.joined import JoinedDraws, joined_meta, joining_dim
from pyrobnn.posterior.posterior import Posterior
from pyrobnn.posterior.recognition import check_predictions, first_predictions, stored_buffers
from pyrobnn.posterior.rows import Rows

FORMAT = "pyrobnn-posterior"
FORMAT_VERSION = 1
#: group of the values that all draws share, and the size from which they are stored so
ONCE = "once"
_FEWEST_STORED_ONCE = 64
#: bytes of an approximation up to which it is stored however few the draws are
_LARGEST_FACTORS = 2**25
#: bytes of a file whose large arrays are not compressed
_LARGEST_PLAIN = 2**24
#: share of its size below which an array is compressed, and numbers in a piece that this is judged by
_WORTH = 0.75
_PIECE = 2**14
ENGINE: Final = "h5netcdf"

_Value = TypeVar("_Value")


def save(
    posterior: Posterior,
    path: str | Path,
    *,
    rows: bool = False,
) -> Path:
    """Write a posterior to ``path``; an existing file is replaced only when the new one is complete.

    Groups: posterior (chain, draw, …) and sample_stats as ArviZ reads them, history, ``once``, the values that all
    draws share, the net's ``buffers``, and the tensors of the approximation, unless they are larger than 32 MB and than
    the draws. Of a deep net's draws, log_p and log_q are stored where they were asked for before, if their passes over
    the data take more than a tenth of the training. The model itself is code and is not stored: :func:`load` takes it,
    and knows it by what the first draw predicts. The rows of the fit are stored with ``rows`` alone.

    Raises:
        ValueError: ``path`` is a folder, or lies in one that cannot be written to.
    """
    shared = _shared_values(posterior.draws)
    known = posterior.rows
    groups = {
        POSTERIOR: _dataset(_without(posterior.draws, shared), "chain", "draw"),
        ONCE: _dataset(shared),
        SAMPLE_STATS: _dataset(_stats_of_file(posterior), "chain", "draw"),
        HISTORY: _dataset(posterior.history),
        ROWS: _dataset(known.state() if rows and known is not None and known.y is not None else {}),
    }
    tree = xr.DataTree.from_dict({name: data for name, data in groups.items() if data})
    attach(posterior, tree)
    facts = {
        "rows_in_file": ROWS in tree.children,
        "factors_left_out": _leave_out_large_factors(posterior, tree),
    }
    if known is not None:
        tree.attrs["rows_digest"] = known.summary
    meta = _without(posterior.meta, facts)
    # a fact is in the file where it is so, and left out elsewhere
    meta |= {name: True for name, is_so in facts.items() if is_so}
    tree.attrs["meta"] = json.dumps(meta)
    return write_atomically(tree, path)


def _stats_of_file(posterior: Posterior) -> Mapping[str, Tensor]:
    """The statistics of draws that are known, or cost little."""
    stats = posterior.sample_stats
    return stats.of_file if isinstance(stats, SampleStats) else stats


def _shared_values(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that all draws share, site → one draw; not of all sites, as a group says how many draws there are."""
    shared = {}
    for name, value in draws.items():
        is_large = value[0, 0].numel() >= _FEWEST_STORED_ONCE
        if is_large and is_stored_once(value):
            shared[name] = value[0, 0]
    return {} if len(shared) == len(draws) else shared


def _without(values: Mapping[str, _Value], names: Container[str]) -> dict[str, _Value]:
    return {name: value for name, value in values.items() if name not in names}


def _leave_out_large_factors(posterior: Posterior, tree: xr.DataTree) -> bool:
    """Whether the factors of a Gaussian are larger than 32 MB and the draws, and can be computed from the rows."""
    compact = getattr(posterior.approximation, "compact_state", None)
    if compact is None:
        return False
    num_bytes = tree["approximation"].to_dataset().nbytes
    if num_bytes <= max(_LARGEST_FACTORS, tree[POSTERIOR].to_dataset().nbytes):
        return False
    tree["approximation"] = xr.DataTree(_dataset(compact()))
    return True


def attach(posterior: Posterior, tree: xr.DataTree) -> xr.DataTree:
    """Give ``tree``, which has the posterior's draws, what :func:`load` needs beside them; return it."""
    approximation = posterior.approximation
    family, state = (None, {}) if approximation is None else approximation.state()
    if state:
        tree["approximation"] = xr.DataTree(_dataset(state))
    if isinstance(posterior.model, BNN):
        buffers = stored_buffers(posterior)
        if buffers:
            tree[BUFFERS] = xr.DataTree(_dataset(buffers))
        tree.attrs["first_predictions"] = json.dumps(first_predictions(posterior))
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

    It does more than :func:`pyrobnn.core.files.written_whole`, by which other files are written: it also removes what
    killed saves have left, and keeps HDF5 from ending the process.

    Raises:
        ValueError: ``path`` is a folder, or lies in one that cannot be written to.
        OSError: the disk is full, or the system refuses a file of that size; what stood at ``path`` is as it was.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    check_writable(path.parent)
    # of arrays, for readers that know no seal, and for those of parts of a file
    num_bytes = sum(node.to_dataset().nbytes for node in tree.subtree)
    checksums = {
        node.path: _encoding(node, compress=num_bytes > _LARGEST_PLAIN) for node in tree.subtree
    }
    _remove_left_behind(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    # WORKAROUND(h5py<=3.16): HDF5 ends the whole process where a write fails, Python raises: what fits in memory is
    # written by it
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
        seal(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _remove_left_behind(path: Path) -> None:
    """Delete what saves to ``path`` have left that were killed: their processes are gone."""
    for pattern in (f".{glob.escape(path.name)}.*.part", ".*.part"):
        for beside in path.parent.glob(pattern):
            number = beside.name.removesuffix(".part").rpartition(".")[2]
            of_path = beside.name in (f".{path.name}.{number}.part", f".{number}.part")
            if of_path and number.isdigit() and not _is_running(int(number)):
                beside.unlink(missing_ok=True)


def _is_running(number: int) -> bool:
    """Whether there is a process of that number; also where the system does not tell."""
    if os.name != "posix":
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _encoding(node: xr.DataTree, *, compress: bool) -> dict[str, dict[str, Any]]:
    """The encoding of the numeric arrays of a group, by name: checksums, and large ones of a large file compressed.

    Those alone that become much smaller: the digits of fitted weights are random, and take a second for each 30 MB.
    """
    encoding: dict[str, dict[str, Any]] = {}
    for name, data in node.variables.items():
        if data.size and data.ndim and data.dtype.kind in "biufc":
            encoding[str(name)] = {"fletcher32": True}
            if compress and data.nbytes > 2**20 and _compressed_share(data.values) < _WORTH:
                encoding[str(name)] |= {"zlib": True, "complevel": 1, "shuffle": True}
    return encoding


def _compressed_share(values: np.ndarray) -> float:
    """The size of an array compressed as it would be in a file, as a share of its own, by a few pieces of it."""
    flat = np.ravel(values)
    starts = np.linspace(0, max(len(flat) - _PIECE, 0), 4).astype(int)
    pieces = [np.ascontiguousarray(flat[start : start + _PIECE]) for start in starts]
    # a byte of all numbers, then the next one
    shuffled = [piece.view(np.uint8).reshape(len(piece), -1).T.tobytes() for piece in pieces]
    size = sum(len(zlib.compress(piece, 1)) for piece in shuffled)
    return size / sum(map(len, shuffled))


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


@dataclass(frozen=True, eq=False)
class _SiteOfFiles:
    """The draws of a site in several files, joined along a dimension."""

    paths: Sequence[Path]
    group: str
    site: str
    dim: int
    model: BNN | Program

    def __call__(self) -> Tensor:
        device = getattr(self.model, "device", torch.device("cpu"))
        parts = []
        for path in self.paths:
            with opened(path) as tree:
                parts.append(_read_site(tree, self.group, self.site, device))
        if isinstance(self.model, BNN):
            parts = [_for_outputs({self.site: part}, self.model)[self.site] for part in parts]
        first = parts[0]
        if all(is_stored_once(part) and torch.equal(part[0, 0], first[0, 0]) for part in parts):
            shape = list(first.shape)
            shape[self.dim] = sum(part.shape[self.dim] for part in parts)
            return first[:1, :1].expand(shape)
        return torch.cat(parts, self.dim)


def _read_site(
    tree: xr.DataTree,
    group: str,
    site: str,
    device: torch.device,
    *,
    first: bool = False,
) -> Tensor:
    """The values (chain, draw, …) of one site in an open file; of the first draw alone (1, 1, …)."""
    for data in tree[group].data_vars.values():
        if data.attrs.get("site", str(data.name)) == site:
            return _as_tensor(data[:1, :1] if first else data, device)
    shape = (1, 1) if first else _num_draws(tree)
    (value,) = (
        data for data in tree[ONCE].data_vars.values() if data.attrs.get("site", data.name) == site
    )
    constant = _as_tensor(value, device)
    return constant.expand(*shape, *constant.shape)


def _num_draws(tree: xr.DataTree) -> tuple[int, int]:
    """Chains, and draws of each, in an open file."""
    sizes = tree[POSTERIOR].sizes
    return sizes["chain"], sizes["draw"]


def _sites(tree: xr.DataTree) -> dict[str, Tensor]:
    """Site → a tensor without values, of the shape (chain, draw, …) that an open file has of it."""
    shape = _num_draws(tree)
    sites = {}
    for group, leading in ((POSTERIOR, ()), (ONCE, shape)):
        for name, data in tree[group].data_vars.items() if group in tree.children else ():
            site = data.attrs.get("site", str(name))
            sites[site] = torch.empty((*leading, *data.shape), device="meta")
    return sites


class _Contents(NamedTuple):
    """What a file says of its posterior: its ``meta``, its sites without values, the names of its sample statistics.

    ``model`` is the one that was given, with the buffers of the file.
    """

    meta: dict[str, Any]
    sites: dict[str, Tensor]
    stats: set[str]
    model: BNN | Program

    def shapes_beside(self, dim: int) -> dict[str, torch.Size]:
        """The shape of every site without this dimension, along which files are joined."""
        return {
            name: value.shape[:dim] + value.shape[dim + 1 :] for name, value in self.sites.items()
        }


def _contents(path: Path, model: BNN | Program) -> _Contents:
    """What the file has; ValueError where it is not of this model."""
    name = repr(str(path))
    with opened(path, checked=True) as tree:
        _check_format(name, tree)
        meta = json.loads(tree.attrs["meta"])
        sites = _sites(tree)
        has_stats = SAMPLE_STATS in tree.children
        stats = {str(stat) for stat in tree[SAMPLE_STATS].data_vars} if has_stats else set()
        _check_sites(name, _as_model_has(sites, model), model)
        model = _with_buffers_of(name, tree, model)
        if isinstance(model, BNN):
            device = model.device
            first = {site: _read_site(tree, POSTERIOR, site, device, first=True) for site in sites}
            _check_type(name, first, model)
            _check_predictions(name, tree, Posterior(model, _for_outputs(first, model), meta=meta))
    return _Contents(meta, sites, stats, model)


def _with_buffers_of(name: str, tree: xr.DataTree, model: BNN | Program) -> BNN | Program:
    """The model with the buffers that the file ``name`` has of its net."""
    if BUFFERS not in tree.children or not isinstance(model, BNN):
        return model
    buffers = _tensors(tree, BUFFERS, model.device)
    try:
        return model.with_buffers(
            {site.removeprefix(NET): value for site, value in buffers.items()}
        )
    except ValueError as error:
        raise ValueError(f"{name} was fitted with another model: {error}") from error


def _check_predictions(name: str, tree: xr.DataTree, posterior: Posterior) -> None:
    """ValueError where the model predicts otherwise than the file ``name`` says of its first draw."""
    # a file of an earlier version does not say it
    check_predictions(name, posterior, json.loads(tree.attrs.get("first_predictions", "{}")))


def _check_alike(files: Sequence[Path], contents: Sequence[_Contents], dim: int) -> None:
    """ValueError where the draws of a file cannot stand beside those of the first along this dimension."""
    first = contents[0]
    for path, other in zip(files, contents, strict=True):
        is_alike = other.shapes_beside(dim) == first.shapes_beside(dim)
        if not is_alike or other.meta["method"] != first.meta["method"]:
            raise ValueError(
                f"{str(path)!r} and {str(files[0])!r} do not join: they differ in the method, in their sites, or in "
                "the number of draws of each chain"
            )


def load_joined(
    paths: Sequence[str | Path],
    model: BNN | Program,
    *,
    x: Tensor | None = None,
    y: Tensor | None = None,
) -> Posterior:
    """One posterior of the draws in several files; a site is read when it is asked for.

    Arguments and errors as of :meth:`pyrobnn.Posterior.load`.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise ValueError("'path' is an empty list: pass the files that the ranks wrote")
    _refuse_bare_net(model)
    contents = [_contents(path, model) for path in files]
    model = contents[0].model
    metas = [content.meta for content in contents]
    dim = joining_dim(metas[0])
    _check_alike(files, contents, dim)
    device = getattr(model, "device", torch.device("cpu"))
    with opened(files[0]) as tree:
        rows = _rows(repr(str(files[0])), tree, model, device, x, y)

    def of_files(group: str, names: Iterable[str]) -> dict[str, _SiteOfFiles]:
        return {name: _SiteOfFiles(files, group, name, dim, model) for name in names}

    draws: Any = JoinedDraws(of_files(POSTERIOR, contents[0].sites))
    stats = of_files(SAMPLE_STATS, set().union(*(content.stats for content in contents)))
    seeds = [meta["seed"] for meta in metas]
    seed = seeds[0] if len(set(seeds)) == 1 else seeds
    return Posterior(
        model,
        draws,
        SampleStats({}, lambda: {name: source() for name, source in stats.items()}),
        meta=metas[0] | joined_meta(dict(enumerate(metas)), dim) | {"seed": seed},
        rows=rows,
    )


def _as_model_has(draws: Mapping[str, Tensor], model: BNN | Program) -> dict[str, Tensor]:
    return _for_outputs(draws, model) if isinstance(model, BNN) else dict(draws)


def load(
    path: str | Path,
    model: BNN | Program,
    *,
    x: Tensor | None = None,
    y: Tensor | None = None,
) -> Posterior:
    """Read a posterior written by :func:`save`, to where the model's weights are.

    Arguments and errors as of :meth:`pyrobnn.Posterior.load`.

    Warns:
        UserWarning: the posterior's approximation is of a family that nobody has registered, and is left out.
    """
    tree = read(path)
    name = repr(str(path))
    _check_format(name, tree)
    _refuse_bare_net(model)
    device = getattr(model, "device", torch.device("cpu"))
    draws = _stored_draws(tree, device)
    if isinstance(model, BNN):
        draws = _for_outputs(draws, model)
    _check_sites(name, draws, model)
    model = _with_buffers_of(name, tree, model)
    posterior = Posterior(
        model,
        draws,
        _tensors(tree, SAMPLE_STATS, device),
        log_evidence=json.loads(tree.attrs["log_evidence"]),
        history=_tensors(tree, HISTORY, device),
        meta=json.loads(tree.attrs["meta"]),
        rows=_rows(name, tree, model, device, x, y),
    )
    if isinstance(model, BNN):
        _check_type(name, draws, model)
        _check_predictions(name, tree, posterior)
    family = json.loads(tree.attrs["family"])
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
    return _with_approximation(posterior, model, family, _tensors(tree, "approximation", device))


def _check_format(name: str, tree: xr.DataTree) -> None:
    """ValueError where the file ``name`` is no posterior, or one of a later format."""
    if tree.attrs.get("format") != FORMAT:
        raise ValueError(
            f"{name} is netCDF but not a saved posterior: use Posterior.save to write one"
        )
    if tree.attrs["format_version"] > FORMAT_VERSION:
        raise ValueError(f"{name} was written by a newer pyrobnn: upgrade to read it")


def _stored_draws(tree: xr.DataTree, device: torch.device) -> dict[str, Tensor]:
    """The draws (chain, draw, …) of a file, those that it has once for all draws too."""
    draws = _tensors(tree, POSTERIOR, device)
    if ONCE in tree.children:
        shape = next(iter(draws.values())).shape[:2]
        shared = _tensors(tree, ONCE, device)
        draws |= {site: value.expand(*shape, *value.shape) for site, value in shared.items()}
    return draws


def _with_approximation(
    posterior: Posterior,
    model: BNN,
    family: str,
    state: dict[str, Tensor],
) -> Posterior:
    """The posterior of a BNN with its approximation, of this family and these tensors."""
    fixed = {site: posterior.draws[site][0, 0] for site in posterior.meta["point_sites"]}
    layout = Density(
        model.sample_parameters,
        (),
        points="held",
        values=fixed,
    )
    if family in RESTORERS:
        return RESTORERS[family](posterior, layout, family, state)
    return replace(posterior, approximation=FlatApproximation(layout, family, state))


def _rows(
    name: str,
    tree: xr.DataTree,
    model: BNN | Program,
    device: torch.device,
    x: Tensor | None,
    y: Tensor | None,
) -> Rows | None:
    """The rows of the fit: x, y, checked against the file ``name``, else those in it; None without any."""
    if y is None:
        return Rows.from_state(_tensors(tree, ROWS, device))
    rows = Rows.of(model, x, y)
    summary = tree.attrs.get("rows_digest")
    if ROWS in tree.children:
        summary = cast(Rows, Rows.from_state(_tensors(tree, ROWS, device))).summary
    if rows is None or summary is None:
        raise ValueError(
            f"{name} knows of no rows (the fit had a DataLoader, or no tensors): leave out x and y"
        )
    if rows.summary != summary:
        raise ValueError(
            f"'x' and 'y' are not the rows that {name} was fitted to: pass the same rows in the same order"
        )
    return rows


def _for_outputs(draws: Mapping[str, Tensor], model: BNN) -> dict[str, Tensor]:
    """Draws with one value of a learned parameter for each output, where an earlier version had one for all."""
    sized = dict(draws)
    for site, (start, _) in model.likelihood.own.points.items():
        if start.dim() == 1 and site in draws and draws[site].dim() == 2:
            sized[site] = draws[site].unsqueeze(-1).expand(*draws[site].shape, len(start))
    return sized


def _check_sites(name: str, draws: Mapping[str, Tensor], model: BNN | Program) -> None:
    """ValueError where the draws of the file ``name`` do not have the sites of a BNN, and their shapes."""
    for site, prior in getattr(model, "priors", {}).items():
        shape = tuple(prior.shape())
        if site not in draws:
            raise ValueError(
                f"{name} was fitted with another model: it has no draws of {site!r}, shape {shape}"
            )
        drawn = tuple(draws[site].shape[2:])
        if drawn != shape:
            raise ValueError(
                f"{name} was fitted with another model: {site!r} of shape {drawn}, not {shape}"
            )


def _check_type(name: str, draws: Mapping[str, Tensor], model: BNN) -> None:
    """ValueError where the weights in the file ``name`` are of another floating-point type than those of the net."""
    for site in model.priors:
        drawn = draws[site].dtype
        if site.startswith(NET) and drawn != model.dtype:
            words = [str(dtype).removeprefix("torch.") for dtype in (drawn, model.dtype)]
            raise ValueError(
                f"{name} was fitted with another model: {site!r} is {words[0]}, and the net is {words[1]}: give the "
                f"net the type of the fit, net.to(torch.{words[0]}), before building the BNN"
            )


def _refuse_bare_net(model: BNN | Program) -> None:
    """TypeError for a net without the prior and likelihood that it was fitted with; a PyroModule is a program."""
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        raise TypeError(
            f"'model' must be the pyrobnn.BNN or the Pyro program of the fit, got a bare net, {type(model).__name__}: "
            "pass pb.BNN(net, prior, likelihood), as it was fitted"
        )


def read(path: str | Path) -> xr.DataTree:
    """Read a DataTree into memory.

    Raises:
        FileNotFoundError: no such file, or a folder.
        ValueError: not a netCDF file, or a damaged one.
    """
    with opened(path, checked=True) as tree:
        tree.load()
        return tree


@contextlib.contextmanager
def opened(path: str | Path, *, checked: bool = False) -> Iterator[xr.DataTree]:
    """A DataTree whose values are read where they are asked for; errors as of :func:`read`.

    ``checked``: all bytes of the file are compared with its seal first, as HDF5 has checksums of arrays alone.
    """
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} is a folder: give the path of a file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist: check the path")
    if checked:
        check_seal(path)
    try:
        with xr.open_datatree(path, engine=ENGINE) as tree:
            yield tree
    except (OSError, ValueError, KeyError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated or not a netCDF file ({reason})") from error


def _dataset(values: Mapping[str, Tensor], *shared: str) -> xr.Dataset:
    """Arrays whose first dimensions are ``shared``."""
    variables = {}
    for site, value in values.items():
        name = variable(site)
        dims = [*shared, *(f"{name}_dim_{i}" for i in range(value.dim() - len(shared)))]
        attributes = {"site": site}
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # NumPy and HDF5 have no such numbers
            attributes["torch_dtype"] = "bfloat16"
            value = value.float()
        variables[name] = (dims, value.numpy(), attributes)
    return xr.Dataset(variables)


def _as_tensor(data: xr.DataArray, device: torch.device) -> Tensor:
    """The numbers of an array that :func:`_dataset` has made."""
    value = torch.from_numpy(np.array(data.values)).to(device)
    return value.bfloat16() if data.attrs.get("torch_dtype") == "bfloat16" else value


def _tensors(tree: xr.DataTree, group: str, device: torch.device) -> dict[str, Tensor]:
    if group not in tree.children:
        return {}
    tensors = {}
    for name, data in tree[group].data_vars.items():
        site = data.attrs.get("site", str(name))
        tensors[site] = _as_tensor(data, device)
    return tensors
