"""Convergence of Markov chains, judged in function space, where a Bayesian neural network is identified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from pyrobnn.core.chains import MIN_DRAWS, ess, ess_of_families, rhat
from pyrobnn.core.groups import FUNCTION, POSTERIOR, SAMPLE_DIMS, SAMPLE_STATS
from pyrobnn.diagnostics.evidence import WEIGHTS, Evidence, flattened, labels, spread, statistic

#: how the names of values of the function begin
F_AT = "f at "
#: how the names of norms of layers begin
NORM = "norm of layer"
#: the log joint density of the draws
LOG_DENSITY = "log density"
_MAX_QUANTITIES = 256
_MAX_DATA = 32


@dataclass(frozen=True, eq=False)
class Convergence:
    """R-hat and effective sample sizes of identified quantities.

    Args:
        table: Dataset over ``quantity`` with ``rhat``, ``ess_bulk`` and ``ess_tail``; ``rhat`` is NaN where a single
            chain leaves it undefined. The coordinate names each quantity, e.g. ``"f at x≈1.3"``.
    """

    table: xr.Dataset

    @property
    def of_function(self) -> xr.Dataset:
        """The rows of the table that are values of the function."""
        return self.table.isel(quantity=[name.startswith(F_AT) for name in self.names])

    @property
    def names(self) -> list[str]:
        """The name of each quantity, as the table has it."""
        return [str(name) for name in self.table["quantity"].values]


@statistic
def quantities(evidence: Evidence) -> dict[str, np.ndarray]:
    """The identified scalar quantities of a tree, name → (chain, draw); constant ones are left out.

    Function values at the probes and what else the ``function`` group holds; without it (a program, another library)
    the log-likelihood of a spread of the data. And every named site but the weights of a net with hidden units.
    """
    columns: dict[str, np.ndarray] = {}
    pointwise = evidence.log_likelihood
    if evidence.f is not None:
        columns |= _function_values(evidence, evidence.f)
    elif pointwise is not None:
        for datum in spread(pointwise.shape[2], _MAX_DATA):
            draws = pointwise[:, :, datum].astype(np.float64)
            columns[f"log-likelihood of datum {datum}"] = draws
        columns["log-likelihood"] = pointwise.sum(-1, dtype=np.float64)
    columns |= named_sites(evidence)
    titles = {
        "log_likelihood": "log-likelihood",
        "log_prior": "log prior",
        "layer_norm": NORM,
        "noise": "noise",
    }
    for name, title in titles.items():
        columns |= _numbered(title, evidence.draws(FUNCTION, name))
    columns |= _numbered(LOG_DENSITY, evidence.draws(SAMPLE_STATS, "lp"))
    return {name: draws for name, draws in columns.items() if _varies(draws)}


def _varies(draws: np.ndarray) -> bool:
    return bool(np.isfinite(draws).all()) and float(np.ptp(draws)) > 0.0


def _function_values(evidence: Evidence, f: np.ndarray) -> dict[str, np.ndarray]:
    """Values of the function f (chain, draw, probe, output), at most `_MAX_QUANTITIES`, name → (chain, draw)."""
    num_outputs = f.shape[3]
    columns = {}
    for index in spread(f.shape[2] * num_outputs, _MAX_QUANTITIES):
        probe, output = divmod(int(index), num_outputs)
        suffix = f" (output {output})" if num_outputs > 1 else ""
        name = f"{F_AT}{evidence.probe_name(probe)}{suffix} #{probe}"
        columns[name] = f[:, :, probe, output]
    return columns


def _numbered(title: str, values: np.ndarray | None) -> dict[str, np.ndarray]:
    """The elements of values (chain, draw, …), numbered where there are several."""
    if values is None:
        return {}
    flat = flattened(values, 2)
    if flat.shape[2] == 1:
        return {title: flat[:, :, 0]}
    return {f"{title} {index}": flat[:, :, index] for index in range(flat.shape[2])}


def named_sites(evidence: Evidence) -> dict[str, np.ndarray]:
    """The elements of every site but a net's weights, at most `_MAX_QUANTITIES`, some of each site."""
    computed = evidence.computed
    stored = {}
    for name, draws in evidence.sites.items():
        is_weight = name.startswith(WEIGHTS) and name not in computed
        if evidence.identified_weights or not is_weight:
            stored[name] = draws
    columns = {}
    for name, draws in stored.items():
        flat = flattened(draws, 2).astype(np.float64)
        shape = draws.shape[2:]
        for index in spread(flat.shape[2], max(1, _MAX_QUANTITIES // len(stored))):
            title = f"{name}[{_place(evidence, name, index, shape)}]" if shape else name
            columns[title] = flat[:, :, index]
    return columns


def _place(
    evidence: Evidence,
    name: str,
    index: int,
    shape: tuple[int, ...],
) -> str:
    """Where an element of a site stands, by the labels of its axes, else by their numbers."""
    variable = evidence.variable(POSTERIOR, name)
    dims = [] if variable is None else [dim for dim in variable.dims if dim not in SAMPLE_DIMS]
    words = []
    for position, dim in zip(
        np.unravel_index(index, shape),
        dims,
        strict=True,
    ):
        axis_labels = labels(variable, str(dim))
        words.append(str(position if axis_labels is None else axis_labels[position]))
    return ", ".join(words)


@statistic
def convergence(evidence: Evidence) -> Convergence | None:
    """Rank-normalised split R-hat, and bulk and tail ESS, of every identified quantity.

    Args:
        tree: A DataTree of Markov chains.

    Returns:
        The table, or None where nothing can be computed (fewer than four draws per chain, nothing that varies).

    Caveat:
        Chains that all miss the same mode agree with each other: R-hat is necessary, not sufficient.

    References:
        Rank-normalization, folding, and localization: an improved R-hat (Vehtari et al., 2021).
    """
    columns = quantities(evidence)
    if not columns or next(iter(columns.values())).shape[1] < MIN_DRAWS:
        return None
    draws = np.stack(list(columns.values()))
    ratio = rhat(draws) if draws.shape[1] > 1 else np.full(len(columns), np.nan)
    bulk = ess(draws)
    ancestor = evidence.draws(SAMPLE_STATS, "ancestor")
    if ancestor is not None and ancestor.shape == draws.shape[1:]:
        bulk = np.fmin(bulk, ess_of_families(draws, ancestor))
    table = xr.Dataset(
        {
            "rhat": ("quantity", ratio),
            "ess_bulk": ("quantity", bulk),
            "ess_tail": ("quantity", ess(draws, "tail")),
        },
        coords={"quantity": list(columns)},
    )
    return Convergence(table)
