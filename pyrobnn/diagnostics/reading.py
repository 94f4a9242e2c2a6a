"""Reading a DataTree without assuming anything: what is there, in float64, or None.

Trees come from this library, NumPyro or PyMC; every group but ``posterior`` may be missing. The accessors here
answer None (or a default) for what a tree does not hold, and the checks leave out what they cannot see.
"""

from __future__ import annotations

import json

import numpy as np
import xarray as xr

SAMPLE_DIMS = ("chain", "draw")

_POINT_METHODS = ("MLE", "MAP")


def check_tree(tree: object, name: str = "tree") -> xr.DataTree:
    """`tree` itself, once it is known to be a DataTree with posterior draws.

    Raises:
        TypeError: If it is no ``xarray.DataTree``.
        ValueError: If it has no ``posterior`` group with dims ``chain`` and ``draw``.
    """
    if not isinstance(tree, xr.DataTree):
        raise TypeError(
            f"'{name}' is a {type(tree).__name__}; expected an xarray.DataTree: pass posterior.to_datatree(), "
            "or arviz_base.from_dict(...) for draws from elsewhere."
        )
    if "posterior" not in tree.children:
        raise ValueError(f"'{name}' has groups {sorted(tree.children)} but no 'posterior' group of draws.")
    missing = [dim for dim in SAMPLE_DIMS if dim not in tree["posterior"].sizes]
    if missing:
        raise ValueError(
            f"the 'posterior' group of '{name}' lacks the dims {missing}; expected ('chain', 'draw', …)."
        )
    return tree


def variable(tree: xr.DataTree, group: str, name: str) -> xr.DataArray | None:
    """One variable of one group, or None where either is missing."""
    if group not in tree.children or name not in tree[group].data_vars:
        return None
    return tree[group][name]


def stored_draws(tree: xr.DataTree, group: str, name: str) -> np.ndarray | None:
    """A variable as array (chain, draw, …) in its own precision, or None where it is missing or has no such dims."""
    array = variable(tree, group, name)
    if array is None or any(dim not in array.dims for dim in SAMPLE_DIMS):
        return None
    return array.transpose(*SAMPLE_DIMS, ...).values


def draws_of(tree: xr.DataTree, group: str, name: str) -> np.ndarray | None:
    """As `stored_draws`, in float64."""
    draws = stored_draws(tree, group, name)
    return None if draws is None else draws.astype(np.float64)


def flattened(values: np.ndarray, keep: int) -> np.ndarray:
    """The axes after the first `keep` as one, which NumPy's -1 cannot say of an empty array."""
    return values.reshape(*values.shape[:keep], int(np.prod(values.shape[keep:])))


def values_of(tree: xr.DataTree, group: str, name: str) -> np.ndarray | None:
    """A variable without sample dims as array, or None where it is missing."""
    array = variable(tree, group, name)
    return None if array is None else np.asarray(array.values)


def number(tree: xr.DataTree, name: str, default: float) -> float:
    """A numeric root attribute; `default` where it is missing or no finite number."""
    try:
        value = float(np.asarray(tree.attrs.get(name, default), dtype=np.float64))
    except (TypeError, ValueError):
        return default
    return value if np.isfinite(value) else default


def text(tree: xr.DataTree, name: str, default: str = "") -> str:
    """A string root attribute; anything but a string is written as one."""
    value = tree.attrs.get(name, default)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def json_attr(tree: xr.DataTree, name: str) -> object:
    """A root attribute that holds JSON, decoded; None where it is missing, empty or no JSON."""
    value = tree.attrs.get(name)
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:  # a tree of another library may say "12 s"
            return None
    return value.tolist() if isinstance(value, np.ndarray) else value


def settings(tree: xr.DataTree) -> dict[str, object]:
    """The settings of the run, empty where unknown."""
    found = json_attr(tree, "settings")
    return found if isinstance(found, dict) else {}


def seconds(tree: xr.DataTree, stage: str) -> float | None:
    """How long a stage ("compile", "fit", "predict") took, or None where the tree does not say."""
    timings = json_attr(tree, "timings")
    value = timings.get(stage) if isinstance(timings, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def method(tree: xr.DataTree) -> str:
    """Name of the method, "unknown" where the tree does not say."""
    return text(tree, "method") or "unknown"


def num_chains(tree: xr.DataTree) -> int:
    """Number of chains."""
    return int(tree["posterior"].sizes["chain"])


def num_draws(tree: xr.DataTree) -> int:
    """Number of draws over all chains."""
    return int(tree["posterior"].sizes["chain"] * tree["posterior"].sizes["draw"])


def is_point(tree: xr.DataTree) -> bool:
    """Whether the tree holds one point of parameter space: one draw, or every draw the same."""
    if num_draws(tree) == 1:
        return True
    if method(tree) not in _POINT_METHODS:
        return False
    f = draws_of(tree, "function", "f")
    return f is None or bool(np.all(f == f[:1, :1]))


def is_iid(tree: xr.DataTree) -> bool:
    """Whether the draws are independent by construction, so that R-hat is no evidence for them."""
    unsaid = float(variable(tree, "sample_stats", "log_q") is not None)
    return number(tree, "iid", unsaid) != 0.0


def log_likelihood(tree: xr.DataTree) -> np.ndarray | None:
    """Log-likelihood (chain, draw, obs), all observed variables side by side, as stored; None where missing.

    It is the largest array of a tree: take what is needed of it before going to float64.
    """
    if "log_likelihood" not in tree.children:
        return None
    parts = []
    for name in tree["log_likelihood"].data_vars:
        part = stored_draws(tree, "log_likelihood", str(name))
        if part is not None:
            parts.append(flattened(part, 2))
    if len(parts) > 1:
        return np.concatenate(parts, axis=-1)
    return parts[0] if parts else None


def log_prior(tree: xr.DataTree) -> np.ndarray | None:
    """Log prior density (chain, draw), from the ``log_prior`` or ``function`` group; None where missing."""
    if "log_prior" in tree.children:
        parts = [draws_of(tree, "log_prior", str(name)) for name in tree["log_prior"].data_vars]
        parts = [flattened(part, 2).sum(-1) for part in parts if part is not None]
        if parts:
            return np.sum(parts, axis=0)
    return draws_of(tree, "function", "log_prior")


def matched(draws: np.ndarray, like: np.ndarray) -> np.ndarray | None:
    """`draws` (chain, draw, …) at the draws of `like`, which may be fewer and evenly spaced; None if it cannot be.

    Groups with a value for each pair of draw and datum are stored thinned when there are many pairs.
    """
    if draws.shape[0] != like.shape[0] or draws.shape[1] < like.shape[1]:
        return None
    if draws.shape[1] == like.shape[1]:
        return draws
    return draws[:, np.linspace(0, draws.shape[1] - 1, like.shape[1]).round().astype(int)]


def functions(tree: xr.DataTree) -> np.ndarray | None:
    """Function draws at the probes (chain, draw, probe, output), or None.

    Class scores are taken relative to their mean over classes: a shift of all scores leaves every probability
    as it is, so the likelihood does not identify it.
    """
    f = draws_of(tree, "function", "f")
    if f is None:
        return None
    f = flattened(f, 3)
    if text(tree, "likelihood") == "categorical" and f.shape[-1] > 1:
        f = f - f.mean(axis=-1, keepdims=True)
    return f


def probe_kinds(tree: xr.DataTree, num_probes: int) -> np.ndarray:
    """Kind of each probe ("train", "between", "outside"); all "train" where the tree does not say."""
    kinds = values_of(tree, "function", "probe_kind")
    if kinds is None or len(kinds) != num_probes:
        return np.full(num_probes, "train")
    return np.array([kind.decode() if isinstance(kind, bytes) else str(kind) for kind in kinds])


def probe_name(tree: xr.DataTree, probe: int) -> str:
    """Where a probe lies, in words: ``"x≈1.3"``, or the probe's number where x is unknown."""
    x = values_of(tree, "function", "probe_x")
    if x is None:
        return f"probe {probe}"
    point = np.atleast_1d(np.asarray(x[probe], dtype=np.float64)).ravel()
    if point.size == 1:
        return f"x≈{point[0]:.4g}"
    shown = ", ".join(f"{value:.4g}" for value in point[:3])
    return f"probe {probe}, x≈({shown}{', …' if point.size > 3 else ''})"
