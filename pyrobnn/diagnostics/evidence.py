"""`Evidence`: what a DataTree holds and what follows from it, each read or computed once.

Trees come from this library, NumPyro or PyMC; every group but ``posterior`` may be missing. What a tree does not hold
reads as None (or a default), and the checks leave out what they cannot see.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import xarray as xr

from pyrobnn.core.checks import check_type
from pyrobnn.core.groups import (
    COUNTED,
    EVENTS,
    FUNCTION,
    LOG_LIKELIHOOD,
    OBSERVED_DATA,
    ONE_STEP,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    REPLICATES,
    SAMPLE_DIMS,
    SAMPLE_STATS,
    SELECTED,
)

#: joint events from which on each is judged as a row
_FEWEST_EVENTS = 20
#: groups that have a variable for each observed one
_OF_OUTCOMES = (COUNTED, LOG_LIKELIHOOD, OBSERVED_DATA, ONE_STEP, POSTERIOR_PREDICTIVE)
#: rates at which a check of a right model may warn, and fail: this library's convention
RATES = 2e-3, 1e-4
#: replicates from which on a predictive distribution is read
FEWEST_DRAWS = 25
#: sds of the function by which a linearised net may differ from the net and still be it: of the shifts that pass less
#: than half
_LINEARIZATION_LIMIT = 0.1
#: likelihoods of labels
_CLASSES = ("categorical", "bernoulli", "ordinal", "dense_categorical")
#: how the names of a net's weights begin
WEIGHTS = "net."

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

#: how libraries write the names that ArviZ's converters give them
_LIBRARIES = {
    "numpyro": "NumPyro",
    "pymc": "PyMC",
    "pyro": "Pyro",
    "cmdstanpy": "CmdStan",
    "stan": "Stan",
}


class Evidence:
    """A DataTree with a memory: every check, figure and table that reads it shares what was computed for the others.

    Statistics are functions marked with `statistic`; they take a DataTree or an Evidence, and are computed once per
    Evidence. The tree must not change while it is judged.

    Args:
        tree: the DataTree; only ``posterior`` is required of it, and not before a check asks.
        name: how an error message calls it.

    Raises:
        TypeError: If it is not an ``xarray.DataTree``.

    Example:
        >>> tree = xr.DataTree.from_dict({"posterior": xr.Dataset({"w": (("chain", "draw"), np.zeros((4, 100)))})})
        >>> evidence = Evidence(tree)
        >>> evidence.num_draws, evidence.method, evidence.f is None
        (400, 'unknown', True)
    """

    def __init__(self, tree: xr.DataTree, name: str = "tree") -> None:
        self.tree: xr.DataTree = check_type(
            name, tree, xr.DataTree, "a DataTree, posterior.to_datatree(x, y)"
        )
        self._results: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, tree: xr.DataTree | Evidence, name: str = "tree") -> Evidence:
        """`tree` itself if it is an Evidence, else a new one of it."""
        return tree if isinstance(tree, Evidence) else cls(tree, name)

    def require_draws(self, name: str = "tree") -> None:
        """ValueError unless the tree has a ``posterior`` group with dims ``chain`` and ``draw``."""
        if POSTERIOR not in self.tree.children:
            raise ValueError(
                f"'{name}' has no 'posterior' group of draws, only {sorted(self.tree.children)}"
            )
        missing = [dim for dim in SAMPLE_DIMS if dim not in self.tree[POSTERIOR].sizes]
        if missing:
            raise ValueError(f"the 'posterior' group of '{name}' lacks the dims {missing}")

    # groups

    def names(self, group: str) -> list[str]:
        """The variables of a group; none where it is missing."""
        if group not in self.tree.children:
            return []
        return [str(name) for name in self.tree[group].data_vars]

    def variable(self, group: str, name: str) -> xr.DataArray | None:
        """One variable of one group, or None where either is missing."""
        if group not in self.tree.children or name not in self.tree[group].data_vars:
            return None
        return self.tree[group].dataset[name]

    def stored(self, group: str, name: str) -> np.ndarray | None:
        """A variable as array (chain, draw, …) in its own precision; None where missing or without such dims."""
        array = self.variable(group, name)
        if array is None or any(dim not in array.dims for dim in SAMPLE_DIMS):
            return None
        return array.transpose(*SAMPLE_DIMS, ...).values

    def draws(self, group: str, name: str) -> np.ndarray | None:
        """As `stored`, in float64."""
        draws = self.stored(group, name)
        return None if draws is None else draws.astype(np.float64)

    @property
    def sites(self) -> dict[str, np.ndarray]:
        """Draws of every site as stored, name → (chain, draw, …)."""
        sites = {name: self.stored(POSTERIOR, name) for name in self.names(POSTERIOR)}
        return {name: draws for name, draws in sites.items() if draws is not None}

    def values(self, group: str, name: str) -> np.ndarray | None:
        """A variable without sample dims as array, or None where it is missing."""
        array = self.variable(group, name)
        return None if array is None else np.asarray(array.values)

    # attributes

    def number(self, name: str, default: float) -> float:
        """A numeric root attribute; `default` where it is missing or not finite."""
        try:
            value = float(np.asarray(self.tree.attrs.get(name, default), dtype=np.float64))
        except (TypeError, ValueError):
            return default
        return value if np.isfinite(value) else default

    def text(self, name: str, default: str = "") -> str:
        """A string root attribute; anything but a string is written as one."""
        value = self.tree.attrs.get(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def json(self, name: str) -> object:
        """A root attribute that holds JSON, decoded; None where it is missing, empty or not JSON."""
        value = self.tree.attrs.get(name)
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:  # a tree of another library may say "12 s"
                return None
        return value.tolist() if isinstance(value, np.ndarray) else value

    def seconds(self, stage: str) -> float | None:
        """How long a stage ("compile", "fit", "predict") took, or None where the tree does not say."""
        timings = self.json("timings")
        value = timings.get(stage) if isinstance(timings, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, empty where unknown."""
        settings = self.json("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def method(self) -> str:
        """Name of the method, else of the library that made the tree (as ArviZ's converters note it), or "unknown"."""
        library = self.tree.attrs.get("inference_library")
        if not library and POSTERIOR in self.tree.children:
            library = self.tree[POSTERIOR].attrs.get("inference_library")
        name = str(library or "")
        return self.text("method") or _LIBRARIES.get(name.lower(), name) or "unknown"

    @property
    def label(self) -> str:
        """Name of the run, else of its method."""
        return self.text("label") or self.method

    @property
    def computed(self) -> list[str]:
        """Sites that a program computes from its latent ones (``pyro.deterministic``)."""
        names = self.json("deterministic_sites")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def likelihood(self) -> str:
        """Kind of the likelihood, empty where the tree does not say."""
        return self.text("likelihood")

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return int(self.tree[POSTERIOR].sizes["chain"])

    @property
    def draws_per_chain(self) -> int:
        """Number of draws of each chain."""
        return int(self.tree[POSTERIOR].sizes["draw"])

    @property
    def num_draws(self) -> int:
        """Number of draws over all chains."""
        return self.num_chains * self.draws_per_chain

    @property
    def is_foreign(self) -> bool:
        """Whether another library made the tree: what this one makes says whether its draws are independent."""
        return "iid" not in self.tree.attrs

    @functools.cached_property
    def is_point(self) -> bool:
        """Whether the tree holds one point of parameter space: one draw, or every draw the same."""
        if self.num_draws == 1:
            return True
        kind = self.text("kind")
        f = self.stored(FUNCTION, "f")
        # a tree of another kind, or of chains, is no point; independent draws without a kind are judged by the function
        if kind != "point" and (kind or not self.is_iid):
            return False
        return bool(kind) if f is None else bool(np.all(f == f[:1, :1]))

    @functools.cached_property
    def is_iid(self) -> bool:
        """Whether the draws are independent by construction, so that R-hat says nothing about them."""
        return self.number("iid", float(self.variable(SAMPLE_STATS, "log_q") is not None)) != 0.0

    @property
    def is_linearized(self) -> bool:
        """Whether the predictions are those of a linearised net that is not known to be the net itself."""
        # a program is never linearised
        of_net = any(name.startswith(WEIGHTS) for name in self.names(POSTERIOR))
        if not of_net or self.settings.get("predictive") != "linearized":
            return False
        error = self.values(FUNCTION, "linearization_error")
        return error is None or not float(error) <= _LINEARIZATION_LIMIT

    @property
    def held_sites(self) -> list[str]:
        """Sites with a prior that were held at one value; an older tree says only that a subset varied."""
        names = self.json("held_sites")
        if isinstance(names, list):
            return [str(name) for name in names]
        return [] if self.settings.get("subset", "all") == "all" else ["the others"]

    @property
    def remedy(self) -> str:
        """What to do where the draws are far from the posterior, as the method says; a tree may not say."""
        return (
            self.text("remedy")
            or "Use a richer guide (low_rank, full_rank), or run NUTS and compare."
        )

    @property
    def more_draws(self) -> str:
        """What gives a run more draws, in words: what stopped it, where it was stopped before it had all of them."""
        if self.text("stopped") == "max_seconds":
            return "max_seconds, of which it has spent all"
        return "num_draws" if self.variable(SAMPLE_STATS, "ancestor") is None else "num_particles"

    @functools.cached_property
    def claim(self) -> str:
        """What the draws are: "exact" (of the posterior, once converged), "approximate", "none", or "predictions".

        The last is of no draws at all: a tree made by `judge`.
        Of a tree that does not say by what such runs leave: divergences, or the kind of their evidence.
        """
        claim = self.text("claim")
        if claim:
            return claim
        if not self.is_iid and self.variable(SAMPLE_STATS, "diverging") is not None:
            return "exact"
        return "approximate" if self.text("log_evidence_kind") else "none"

    @property
    def rates(self) -> tuple[float, float]:
        """`RATES`; of predictions alone, whose checks are few, ten times as many may warn."""
        return (2e-2, RATES[1]) if self.claim == PREDICTIONS else RATES

    @functools.cached_property
    def has_hidden_units(self) -> bool:
        """Whether the posterior holds a net of more than one layer, whose weights are not identified."""
        weights = [name for name in self.names(POSTERIOR) if name.startswith(WEIGHTS)]
        layers = {name.rpartition(".")[0] for name in weights}
        return len(layers) > 1

    @functools.cached_property
    def identified_weights(self) -> bool:
        """Whether the posterior holds a net of one layer, from inputs to outputs, whose weights are identified."""
        names = [name for name in self.names(POSTERIOR) if name.startswith(WEIGHTS)]
        weights = [name for name in names if name.endswith("weight")]
        x = self.values(FUNCTION, "probe_x")
        f = self.f
        if len(weights) != 1 or len(names) > 2 or x is None or x.ndim != 2 or f is None:
            return False
        draws = self.stored(POSTERIOR, weights[0])
        return draws is not None and draws.shape[2:] == (f.shape[3], x.shape[1])

    @functools.cached_property
    def common_start(self) -> bool:
        """Whether all chains are said to have started around one point."""
        return self.number("common_start", float(self.settings.get("init") == "map")) != 0.0

    # what most checks read

    @functools.cached_property
    def f(self) -> np.ndarray | None:
        """Function draws at the probes (chain, draw, probe, output), or None; class scores relative to their mean.

        A shift of all scores leaves every probability as it is, so the likelihood does not identify it.
        """
        f = self.draws(FUNCTION, "f")
        if f is None:
            return None
        f = flattened(f, 3)
        if self.likelihood == "categorical" and f.shape[-1] > 1:
            f = f - f.mean(axis=-1, keepdims=True)
        return f

    @functools.cached_property
    def log_likelihood(self) -> np.ndarray | None:
        """Log-likelihood (chain, draw, obs), all observed variables side by side, as stored; None where missing.

        It is the largest array of a tree: take what is needed of it before going to float64.
        """
        variables = [self.stored(LOG_LIKELIHOOD, name) for name in self.names(LOG_LIKELIHOOD)]
        terms = [flattened(variable, 2) for variable in variables if variable is not None]
        if len(terms) > 1:
            return np.concatenate(terms, axis=-1)
        return terms[0] if terms else None

    @functools.cached_property
    def log_target(self) -> np.ndarray | None:
        """Log density (chain, draw) of the model that the draws predict with, or None.

        Of a linearised net this is not the model's own: a Gauss-Newton Gaussian is the posterior of that net, whatever
        the posterior of the net itself is. A pass then says nothing of the draws
        (:func:`~pyrobnn.diagnostics.judge.diagnose`).
        """
        stored = self.draws(SAMPLE_STATS, "log_p")
        if stored is None or not self.is_linearized:
            return stored
        prior = self.draws(FUNCTION, "log_prior")
        likelihood = self.draws(FUNCTION, "log_likelihood")
        if prior is None or likelihood is None:
            return stored
        alike = prior.shape == likelihood.shape == stored.shape
        return prior + likelihood if alike else stored

    @property
    def predicts_classes(self) -> bool:
        """Whether the tree predicts class probabilities."""
        return self.variable(PREDICTIONS, "probs") is not None

    @property
    def has_classes(self) -> bool:
        """Whether the outcome is a label: the tree predicts probabilities, or its likelihood is one of classes."""
        return self.predicts_classes or self.likelihood in _CLASSES

    @property
    def outcome(self) -> str | None:
        """Name of the observed variable: ``y``, or whatever it is called where it is the only one."""
        return _only(self.names(OBSERVED_DATA))

    @property
    def outcome_and_replicates(self) -> tuple[xr.DataArray, xr.DataArray] | None:
        """The outcome of the training data and its replicates: ``y``, or under whatever name if it is the only one."""
        replicated = self.names(POSTERIOR_PREDICTIVE)
        name = _only([name for name in self.names(OBSERVED_DATA) if name in replicated])
        if name is None:
            return None
        y = self.variable(OBSERVED_DATA, name)
        draws = self.variable(POSTERIOR_PREDICTIVE, name)
        if y is None or draws is None or not set(SAMPLE_DIMS) <= set(draws.dims):
            return None
        return y, draws

    def replicates(self, *, whole: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
        """Training replicates (draw, obs, output) and observed y (obs, output) of a regression; None where too few.

        With `whole` also those of a classifier's labels. Values that have a log-likelihood each are a row each. None
        where the outcome is a few events whose values depend on each other: `one_step` has those; and where rows may
        have been chosen by their outcome. What a program masks is no datum, and is left out.
        """
        pair = self.outcome_and_replicates
        if pair is None or self.is_joint or self.is_selected:
            return None
        y = pair[0].values
        draws = self._replicate_draws(pair[1])
        kinds = "fiub" if whole or not self.has_classes else "f"
        if y.dtype.kind not in kinds or not _are_replicates(draws, y):
            return None
        terms = self.variable(LOG_LIKELIHOOD, str(pair[0].name))
        counted = self.counted
        has_term_each = terms is not None and terms[{"chain": 0, "draw": 0}].shape == y.shape
        if has_term_each or (counted is not None and counted.shape == y.shape):
            y = y.reshape(-1)
            draws = draws.reshape(len(draws), -1)
        if counted is not None:
            rows = counted.reshape(-1)
            if len(rows) != len(y) or not rows.any():
                return None
            y = y[rows]
            draws = draws[:, rows]
        return draws.reshape(len(draws), len(y), -1), y.reshape(len(y), -1)

    @property
    def counted(self) -> np.ndarray | None:
        """Which data of the outcome count, bool in their shape; None where all do."""
        stored = self.values(COUNTED, self.outcome or "")
        return None if stored is None else stored.astype(bool)

    def _replicate_draws(self, stored: xr.DataArray) -> np.ndarray:
        """The stored replicates (draw, …), or those with several of each draw where they are too few."""
        draws = draws_first(stored)
        several = self.values(REPLICATES, "y")
        if several is None:
            # where files of 0.2 have them
            several = self.values(POSTERIOR_PREDICTIVE, "y_sample")
        return several if several is not None and len(draws) < FEWEST_DRAWS else draws

    @property
    def is_joint(self) -> bool:
        """Whether the outcome is one event, or few, of values that depend on each other given the parameters."""
        y = self.variable(OBSERVED_DATA, self.outcome or "")
        events = None if y is None else y.attrs.get(EVENTS)
        return events is not None and int(events) < _FEWEST_EVENTS

    @property
    def is_selected(self) -> bool:
        """Whether the rows of the outcome may have been chosen by it, as by censoring: replicates are of all rows."""
        y = self.variable(OBSERVED_DATA, self.outcome or "")
        return y is not None and SELECTED in y.attrs

    @property
    def one_step(self) -> tuple[np.ndarray, np.ndarray] | None:
        """PIT (value, 1) and predictive mean (value,) of each value of a joint event, given the values before it."""
        name = self.outcome or ""
        pit = self.values(ONE_STEP, name)
        mean = self.values(ONE_STEP, f"{name}_mean")
        if not self.is_joint or pit is None or mean is None:
            return None
        return pit.reshape(-1, 1), mean

    @functools.cached_property
    def by_outcome(self) -> list[Evidence]:
        """The tree for each of its observed variables alone; itself where there is one."""
        replicated = self.names(POSTERIOR_PREDICTIVE)
        names = [name for name in self.names(OBSERVED_DATA) if name in replicated]
        if len(names) < 2:
            return [self]
        return [self._of_outcome(name) for name in names]

    def _of_outcome(self, name: str) -> Evidence:
        """The tree with one of its observed variables."""
        groups = {}
        for child, node in self.tree.children.items():
            dataset = node.to_dataset()
            if child in _OF_OUTCOMES:
                # beside the steps of an event stand their means
                names = (name, f"{name}_mean") if child == ONE_STEP else (name,)
                dataset = dataset[[variable for variable in names if variable in dataset]]
            groups[child] = dataset
        tree = xr.DataTree.from_dict(groups)
        tree.attrs.update(self.tree.attrs)
        return Evidence(tree)

    def point_kinds(self, num_points: int, at: str) -> np.ndarray:
        """Kind of each point of a function: at "probes" that of the probe, elsewhere "train"."""
        return self.probe_kinds(num_points) if at == "probes" else np.full(num_points, "train")

    def probe_kinds(self, num_probes: int) -> np.ndarray:
        """Kind of each probe ("train", "between", "outside"); all "train" where the tree does not say."""
        kinds = self.values(FUNCTION, "probe_kind")
        if kinds is None or len(kinds) != num_probes:
            return np.full(num_probes, "train")
        return np.array([_as_text(kind) for kind in kinds])

    def probe_name(self, probe: int) -> str:
        """Where a probe lies, in words: ``"x≈1.3"``, or the probe's number where x is unknown."""
        x = self.values(FUNCTION, "probe_x")
        if x is None:
            return f"probe {probe}"
        point = np.atleast_1d(np.asarray(x[probe], dtype=np.float64)).ravel()
        names = labels(self.variable(FUNCTION, "probe_x"), "feature") or []
        shown = [f"{float(f'{value:.4g}'):g}" for value in point[:3]]
        if point.size == 1:
            return f"{names[0] if names else 'x'}≈{shown[0]}"
        named = [f"{name}≈{value}" for name, value in zip(names[:3], shown, strict=False)]
        ellipsis = ", …" if point.size > 3 else ""
        return f"probe {probe}, {', '.join(named or shown)}{ellipsis}"


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _only(names: list[str]) -> str | None:
    """``y``, or the only name where there is one."""
    if "y" in names:
        return "y"
    return names[0] if len(names) == 1 else None


def draws_first(array: xr.DataArray) -> np.ndarray:
    """Chains and draws merged into one leading axis: shape (sample, ...)."""
    ordered = array.transpose(*SAMPLE_DIMS, ...).values
    return ordered.reshape(ordered.shape[0] * ordered.shape[1], *ordered.shape[2:])


def statistic(
    function: Callable[Concatenate[Evidence, _Options], _Result],
) -> Callable[Concatenate[xr.DataTree | Evidence, _Options], _Result]:
    """A function of an Evidence as one of a DataTree or an Evidence, computed once per Evidence and options.

    What it finds is shared: callers must not change it. Errors are not remembered.
    """
    signature = inspect.signature(function)
    subject, *options = signature.parameters.values()

    @functools.wraps(function)
    def once(
        tree: xr.DataTree | Evidence, *args: _Options.args, **kwargs: _Options.kwargs
    ) -> _Result:
        evidence = Evidence.of(tree)
        bound = signature.bind(evidence, *args, **kwargs)
        bound.apply_defaults()
        key = (function.__module__, function.__qualname__, *list(bound.arguments.values())[1:])
        if key not in evidence._results:
            evidence._results[key] = function(*bound.args, **bound.kwargs)
        return evidence._results[key]

    tree = subject.replace(name="tree", annotation="xr.DataTree | Evidence")
    vars(once)["__signature__"] = signature.replace(parameters=[tree, *options])
    return once


Trees = xr.DataTree | Evidence | Mapping[str, xr.DataTree | Evidence]


def gather(trees: Trees) -> dict[str, Evidence]:
    """One tree or a mapping of them, as a dict from label to Evidence, in the caller's order.

    Raises:
        TypeError: if something else than a DataTree was given.
        ValueError: if the mapping is empty.
    """
    if isinstance(trees, Mapping) and not isinstance(trees, xr.DataTree):
        if not trees:
            raise ValueError(
                "'trees' is empty; give at least one, e.g. {'nuts': posterior.to_datatree(x, y)}"
            )
        return {str(label): Evidence.of(tree, f"trees[{label!r}]") for label, tree in trees.items()}
    evidence = Evidence.of(trees, "trees")
    attrs = evidence.tree.attrs
    return {str(attrs.get("label") or attrs.get("method") or "model"): evidence}


def labels(array: xr.DataArray | None, dim: str) -> list[str] | None:
    """The names along a dimension, as its coordinate holds them; None where there are none, or only numbers."""
    if array is None or dim not in array.coords:
        return None
    values = np.atleast_1d(array.coords[dim].values)
    if values.dtype.kind not in "USO":
        return None
    return [_as_text(value) for value in values]


def _are_replicates(draws: np.ndarray, y: np.ndarray) -> bool:
    """Whether draws (draw, …) are enough replicates of outcomes y."""
    if y.ndim == 0 or len(y) == 0:
        return False
    return len(draws) >= FEWEST_DRAWS and draws.shape[1:] == y.shape


def spread(count: int, max_count: int) -> np.ndarray:
    """At most `max_count` of the indices below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, max_count)).astype(int))


def flattened(values: np.ndarray, keep: int) -> np.ndarray:
    """The axes after the first `keep` as one, which NumPy's -1 cannot say of an empty array."""
    return values.reshape(*values.shape[:keep], int(np.prod(values.shape[keep:])))


def matched(draws: np.ndarray, like: np.ndarray) -> np.ndarray | None:
    """`draws` (chain, draw, …) at the draws of `like`, which may be fewer and evenly spaced; None if it cannot be.

    Groups with a value for each pair of draw and datum are stored thinned when there are many pairs.
    """
    if draws.shape[0] != like.shape[0] or draws.shape[1] < like.shape[1]:
        return None
    return draws[:, np.linspace(0, draws.shape[1] - 1, like.shape[1]).round().astype(int)]
