"""ArviZ's own figures of chains, by the question that they answer, where ``arviz_plots`` is installed.

They show few quantities and at most 200 draws of each chain: enough for the eye, and the page stays small.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from pyrobnn.core.groups import (
    LOG_LIKELIHOOD,
    OBSERVED_DATA,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)
from pyrobnn.diagnostics.convergence import (
    F_AT,
    LOG_DENSITY,
    convergence,
    named_sites,
    quantities,
)
from pyrobnn.diagnostics.evidence import Evidence, spread
from pyrobnn.diagnostics.labels import output_names
from pyrobnn.diagnostics.leave_one_out import loo
from pyrobnn.diagnostics.points import is_censored
from pyrobnn.diagnostics.verdict import said
from pyrobnn.plots.look import style
from pyrobnn.report.figures import Block, as_image

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

#: an option of one of ArviZ's plots
_Option: TypeAlias = "int | str | Sequence[float] | Mapping[str, Mapping[str, int]]"
#: what a page says where the figures cannot be drawn
MISSING = (
    "ArviZ draws traces, ranks, energies and predictive checks of these chains here once its plots "
    "are installed: pip install arviz-plots"
)
_MAX_QUANTITIES = 4
_MAX_SITES = 1  # beside values of the function
_MAX_INTERVALS = 6  # of values of the function
_MAX_DRAWS = 200  # of each chain
_MAX_DATA = 500
_NUM_REPLICATES = 30
_NUM_SIMULATIONS = 300  # of the band that chains of one distribution keep to
_COLUMNS = 4


@dataclass(frozen=True)
class Fold:
    """The figures of one run that answer one question: folded away on the page, under these words."""

    label: str
    question: str
    blocks: list[Block]

    @property
    def titles(self) -> str:
        """The headings of the figures, for the line that unfolds them."""
        return ", ".join(block.title for block in self.blocks)


@dataclass(frozen=True)
class _ChainFigure:
    """One kind of figure: its heading, how to read it, and what draws it; None where a run lacks what it needs."""

    title: str
    how: str
    draw: Callable[[Evidence], Figure | None]


def are_installed() -> bool:
    """Whether ArviZ's plots can be imported."""
    return find_spec("arviz_plots") is not None


def runs_of_chains(trees: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """The runs of Markov chains, label → evidence: what has draws that depend on each other."""
    return {
        label: evidence
        for label, evidence in trees.items()
        if not evidence.is_iid and not evidence.is_point and POSTERIOR in evidence.tree.children
    }


def build_folds(trees: Mapping[str, Evidence]) -> list[Fold]:
    """The figures of every run of chains, a fold for each question; none where ArviZ's plots are not installed."""
    if not are_installed():
        return []
    folds = []
    for label, evidence in runs_of_chains(trees).items():
        for question, specs in SPECS.items():
            drawn = (_block(spec, evidence) for spec in specs)
            blocks = [block for block in drawn if block is not None]
            if blocks:
                folds.append(Fold(label, question, blocks))
    return folds


def _block(spec: _ChainFigure, evidence: Evidence) -> Block | None:
    """A figure under its heading, or why ArviZ did not draw it; None where the run lacks what it needs."""
    try:
        with _drawing():
            figure = spec.draw(evidence)
            if figure is None:
                return None
            return Block(spec.title, spec.how, as_image(figure), figure.get_figwidth())
    except Exception as error:
        return Block(
            spec.title,
            "",
            note=f"Not drawn: {said(error)}.",
        )


@contextmanager
def _drawing() -> Iterator[None]:
    """The look of the page's other figures; afterwards pyplot, which ArviZ draws by, has the figures that it had."""
    import matplotlib.pyplot as plt

    opened_before = set(plt.get_fignums())
    layout = {"figure.constrained_layout.use": True}
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            np.errstate(all="ignore"),
            style(),
            matplotlib.rc_context(layout),
        ):
            yield
    finally:
        for number in set(plt.get_fignums()) - opened_before:
            plt.close(number)


def _arviz(
    name: str,
    data: xr.DataTree | ELPDData,
    size: tuple[float, float],
    **options: _Option,
) -> Figure:
    """What ``arviz_plots.NAME`` draws of the data, as a figure of this size in inches."""
    import arviz_plots

    collection = getattr(arviz_plots, name)(
        data,
        backend="matplotlib",
        figure_kwargs={"figsize": size, "figsize_units": "inches"},
        **options,
    )
    return collection.viz["figure"].item()


# what is drawn


def shown_quantities(evidence: Evidence) -> dict[str, np.ndarray]:
    """The quantities that are drawn, at most four, name → (chain, draw).

    The log density; the sites and values of the function with the highest R-hat, where there are more. A net's weights
    are not among them: they are not identified.
    """
    values = _worst_first(evidence)
    function_values = [name for name in values if name.startswith(F_AT)]
    sites = named_sites(evidence)
    parameters = [name for name in values if name in sites]
    chosen = [LOG_DENSITY] if LOG_DENSITY in values else []
    chosen += parameters[:_MAX_SITES] if function_values else parameters
    chosen += function_values
    return {name: values[name] for name in chosen[:_MAX_QUANTITIES]}


def _worst_first(evidence: Evidence) -> dict[str, np.ndarray]:
    """The identified quantities by R-hat, the highest first, name → (chain, draw)."""
    values = quantities(evidence)
    rhats = _rhats(evidence)
    return {name: values[name] for name in sorted(values, key=lambda name: -rhats.get(name, 0.0))}


def _rhats(evidence: Evidence) -> dict[str, float]:
    """The finite R-hats, name → R-hat."""
    estimates = convergence(evidence)
    if estimates is None:
        return {}
    ratios = zip(estimates.names, estimates.table["rhat"].values, strict=True)
    return {name: float(ratio) for name, ratio in ratios if np.isfinite(ratio)}


def _as_titles(names: list[str]) -> list[str]:
    """The names without the number of their point, where it tells no two apart, and with bars for slashes."""
    short = [name.partition(" #")[0] for name in names]
    titles = short if len(set(short)) == len(short) else names
    return [title.replace("/", "|") for title in titles]


def _chains(values: Mapping[str, np.ndarray]) -> xr.DataTree:
    """Quantities (chain, draw) as a tree of draws, evenly thinned."""
    thinned = {}
    for title, draws in zip(
        _as_titles(list(values)),
        values.values(),
        strict=True,
    ):
        thinned[title] = (SAMPLE_DIMS, draws[:, spread(draws.shape[1], _MAX_DRAWS)])
    return xr.DataTree.from_dict({POSTERIOR: _with_numbered_axes(thinned)})


def _grid_size(num_panels: int) -> tuple[float, float]:
    """Inches of panels in a row."""
    return 2.5 * min(num_panels, _COLUMNS), 2.1


def _trace(evidence: Evidence) -> Figure | None:
    values = shown_quantities(evidence)
    if not values:
        return None
    return _arviz(
        "plot_trace",
        _chains(values),
        _grid_size(len(values)),
        col_wrap=_COLUMNS,
    )


def _rank(evidence: Evidence) -> Figure | None:
    values = shown_quantities(evidence)
    if not values or evidence.num_chains < 2:
        return None
    return _arviz(
        "plot_rank",
        _chains(values),
        _grid_size(len(values)),
        col_wrap=_COLUMNS,
        stats={"ecdf_pit": {"n_simulations": _NUM_SIMULATIONS}},
    )


def _energy(evidence: Evidence) -> Figure | None:
    energy = evidence.draws(SAMPLE_STATS, "energy")
    if energy is None or not np.isfinite(energy).all() or energy.shape[1] < 4:
        return None
    dataset = xr.Dataset({"energy": (SAMPLE_DIMS, energy)})
    dataset = dataset.assign_coords({"chain": np.arange(len(energy))})
    return _arviz("plot_energy", xr.DataTree.from_dict({SAMPLE_STATS: dataset}), (7.2, 2.6))


def _forest(evidence: Evidence) -> Figure | None:
    values = _worst_first(evidence)
    # values of the function alone are in one unit
    function_values = [name for name in values if name.startswith(F_AT)][:_MAX_INTERVALS]
    parameters = [name for name in shown_quantities(evidence) if name != LOG_DENSITY]
    names = function_values or parameters
    if not names:
        return None
    return _arviz(
        "plot_forest",
        _chains({name: values[name] for name in names}),
        (6.4, 1.0 + 0.3 * len(names)),
        ci_kind="eti",
        ci_probs=(0.5, 0.94),
    )


def _outcomes(evidence: Evidence) -> xr.DataTree | None:
    """Replicates, outcomes and log-likelihood of the training data, thinned; None of classes and censored rows."""
    pair = evidence.replicates(whole=True)
    pointwise = evidence.log_likelihood
    if pair is None or pointwise is None or evidence.has_classes or is_censored(evidence):
        return None
    replicates, y = pair
    num_chains, num_draws, num_data = pointwise.shape
    if replicates.shape[:2] != (num_chains * num_draws, num_data):
        return None
    names = [name.replace("/", "|") for name in output_names(evidence, y.shape[1])]
    by_output = np.moveaxis(replicates, 2, 0).reshape(len(names), *pointwise.shape)
    return _outcome_groups(dict(zip(names, by_output, strict=True)), y, pointwise)


def _outcome_groups(
    replicates: Mapping[str, np.ndarray],
    y: np.ndarray,
    pointwise: np.ndarray,
) -> xr.DataTree:
    """What ArviZ's checks of a model read, evenly thinned; each output is a variable of its own.

    Args:
        replicates: name of an output → its replicates (chain, draw, row).
        y: outcomes (row, output).
        pointwise: log likelihood (chain, draw, row).
    """
    num_chains, num_draws, num_data = pointwise.shape
    rows = spread(num_data, _MAX_DATA)
    thinned = np.ix_(np.arange(num_chains), spread(num_draws, _MAX_DRAWS), rows)
    dims = (*SAMPLE_DIMS, "row")
    log_likelihood = (dims, pointwise[thinned].astype(np.float64))
    shared = _with_numbered_axes(dict.fromkeys(replicates, log_likelihood))
    observed = {name: (("row",), y[rows, output]) for output, name in enumerate(replicates)}
    predictive = {name: (dims, draws[thinned]) for name, draws in replicates.items()}
    groups = {
        POSTERIOR_PREDICTIVE: _with_numbered_axes(predictive),
        OBSERVED_DATA: _with_numbered_axes(observed),
        LOG_LIKELIHOOD: shared,
        # ArviZ reads from it how many chains there are
        POSTERIOR: shared,
    }
    return xr.DataTree.from_dict(groups)


def _with_numbered_axes(variables: Mapping[str, tuple[tuple[str, ...], np.ndarray]]) -> xr.Dataset:
    """Variables by name, (dims, values), with the numbers along each dimension, which ArviZ asks for."""
    dataset = xr.Dataset(variables)
    return dataset.assign_coords({dim: np.arange(size) for dim, size in dataset.sizes.items()})


def _posterior_predictive(evidence: Evidence) -> Figure | None:
    tree = _outcomes(evidence)
    if tree is None:
        return None
    replicates = tree[POSTERIOR_PREDICTIVE].to_dataset()
    per_chain = -(-_NUM_REPLICATES // replicates.sizes["chain"])
    replicates = replicates.isel(draw=spread(replicates.sizes["draw"], per_chain))
    drawn = {
        POSTERIOR_PREDICTIVE: replicates,
        OBSERVED_DATA: tree[OBSERVED_DATA].to_dataset(),
    }
    names = list(replicates.data_vars)
    whole = all(replicates[name].dtype.kind in "iub" for name in names)
    return _arviz(
        "plot_ppc_dist",
        xr.DataTree.from_dict(drawn),
        (3.6 * min(len(names), _COLUMNS), 2.6 * -(-len(names) // _COLUMNS)),
        kind="ecdf" if whole else "kde",
        num_samples=replicates.sizes["draw"] * replicates.sizes["chain"],
        col_wrap=_COLUMNS,
    )


def _loo_pit(evidence: Evidence) -> Figure | None:
    tree = _outcomes(evidence)
    if tree is None or loo(evidence) is None:
        return None
    num_outputs = len(tree[OBSERVED_DATA].data_vars)
    return _arviz("plot_loo_pit", tree, (3.6 * num_outputs, 2.6))


def _khat(evidence: Evidence) -> Figure | None:
    estimate = loo(evidence)
    if estimate is None:
        return None
    return _arviz(
        "plot_khat",
        estimate,
        (3.6, 2.6),
        hline_values=[estimate.good_k],
        visuals={"hlines": {}},
    )


#: question → the figures that answer it, in the order of the page
SPECS = {
    "Are these draws the posterior of this model?": (
        _ChainFigure(
            "Trace",
            "One colour for each chain. Chains that have converged lie over each other and show no trend.",
            _trace,
        ),
        _ChainFigure(
            "Rank",
            "Ranks of each chain's draws among those of all chains, less what is expected. Chains of one distribution "
            "stay in the grey band (99 %).",
            _rank,
        ),
        _ChainFigure(
            "Energy",
            "Left: the share of the energy's variation that a transition covers (BFMI), above the dashed line where it "
            "is large enough. Right: energies of the draws and their changes; the curves should be equally wide.",
            _energy,
        ),
        _ChainFigure(
            "Forest",
            "Median, 50 % and 94 % intervals of each chain, one line a chain: lines of one quantity should agree.",
            _forest,
        ),
    ),
    "Does this model fit these data?": (
        _ChainFigure(
            "Posterior predictive check",
            "Black: the training outcomes. Blue: outcomes simulated from the posterior; the black curve should look "
            "like one of them.",
            _posterior_predictive,
        ),
        _ChainFigure(
            "LOO-PIT",
            "Where each outcome lies in the prediction that has not seen it, less what is expected. A calibrated model "
            "stays in the grey band (99 %).",
            _loo_pit,
        ),
        _ChainFigure(
            "k-hat",
            "Pareto k-hat of leaving each observation out: above the line the observation dominates the fit, and LOO "
            "and LOO-PIT are unreliable there.",
            _khat,
        ),
    ),
}
