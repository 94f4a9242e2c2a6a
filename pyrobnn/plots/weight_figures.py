"""What is known of the weights: their covariance as a picture, and the norm of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyrobnn.core.checks import check_choice
from pyrobnn.core.groups import FUNCTION, POSTERIOR
from pyrobnn.diagnostics.evidence import Evidence, Trees, gather
from pyrobnn.plots.style import FITS, INK, empty_panel, interval_row, name_rows, panels, style


class Drawn(Protocol):
    """What is read of a :class:`pyrobnn.Posterior`."""

    draws: Any
    meta: Mapping[str, Any]
    approximation: Any


Source = Drawn | xr.DataTree | Evidence
Matrix = Literal["correlation", "covariance", "precision"]
#: weights whose matrix can be seen, and names that fit beside it
MAX_WEIGHTS, MAX_NAMES = 1000, 12


class _Picture(NamedTuple):
    """A matrix (weight, weight), its sites with their numbers of weights, and how it was computed."""

    matrix: np.ndarray
    sizes: dict[str, int]
    source: str


def covariance(
    posteriors: Source | Mapping[str, Source],
    *,
    matrix: Matrix = "correlation",
    sites: list[str] | None = None,
) -> Figure:
    r"""Which weights vary together: the matrix of an approximation, or of the draws, as a picture.

    A :class:`pyrobnn.Posterior` of SVI, Laplace or SWAG shows its own covariance in unconstrained space, without
    noise; other posteriors, and trees, show that of their draws. The precision of a Laplace approximation is its
    Hessian, prior included; with Kronecker factors every layer is one block, the product of two small matrices.
    Lines part the sites. Weights that were held fixed have no variance and stay white.

    Args:
        posteriors: a Posterior or a DataTree, or a mapping from label to either.
        matrix: ``"correlation"`` (colours from −1 to 1), ``"covariance"``, or ``"precision"``, the inverse of the
            covariance. Colours of the last two end at the largest off-diagonal entry, or at the largest entry of a
            diagonal matrix.
        sites: which sites to show; None shows all.

    Returns:
        A figure with one panel per posterior.

    Raises:
        ValueError: unknown ``matrix`` or site; more than 1000 weights.

    Caveat: n draws determine a covariance of d weights poorly unless n is several times d, and their precision only
    where n exceeds d.
    """
    check_choice("matrix", matrix, ("correlation", "covariance", "precision"))
    if isinstance(posteriors, Mapping) and not isinstance(posteriors, xr.DataTree):
        named = posteriors
    else:
        one: Any = posteriors
        is_tree = isinstance(one, xr.DataTree | Evidence)
        named = {next(iter(gather(one))) if is_tree else str(one.meta["method"]): one}
    with style():
        figure, axes = panels(max(1, len(named)), size=(3.6, 3.3), max_columns=2)
        for (label, source), (ax,) in zip(named.items(), axes, strict=False):
            ax.set_title(label)
            found = _picture(label, source, sites)
            if found is None:
                empty_panel(ax, "no draws of several weights")
            else:
                _show(figure, ax, found, matrix)
        return figure


def _picture(label: str, source: Source, sites: list[str] | None) -> _Picture | None:
    if isinstance(source, xr.DataTree | Evidence):
        evidence = next(iter(gather({label: source}).values()))
        stored = {name: evidence.draws(POSTERIOR, name) for name in evidence.names(POSTERIOR)}
        values = {name: draws for name, draws in stored.items() if draws is not None}
    else:
        approximation = source.approximation
        if hasattr(approximation, "covariance"):
            spans = {s.name: (s.start, s.stop) for s in approximation.layout.sites if s.kind == "latent"}
            chosen = _chosen(label, {name: stop - start for name, (start, stop) in spans.items()}, sites)
            index = np.concatenate([np.arange(*spans[name]) for name in chosen])
            return _Picture(approximation.covariance(index).cpu().numpy(), chosen, "of the approximation")
        values = {name: draws.detach().cpu().double().numpy() for name, draws in source.draws.items()}
    flat = {name: v.reshape(v.shape[0] * v.shape[1], math.prod(v.shape[2:])) for name, v in values.items()}
    chosen = _chosen(label, {name: v.shape[1] for name, v in flat.items()}, sites)
    draws = np.concatenate([flat[name] for name in chosen], 1) if chosen else np.zeros((0, 0))
    if min(draws.shape) < 2:
        return None
    return _Picture(np.cov(draws.T), chosen, f"of {len(draws)} draws")


def _chosen(label: str, sizes: dict[str, int], sites: list[str] | None) -> dict[str, int]:
    if unknown := sorted(set(sites or ()) - set(sizes)):
        raise ValueError(f"'sites' has {unknown}, but {label} has {sorted(sizes)}")
    chosen = {name: size for name, size in sizes.items() if sites is None or name in sites}
    if (total := sum(chosen.values())) > MAX_WEIGHTS:
        raise ValueError(
            f"{label} has {total} weights, and a picture shows at most {MAX_WEIGHTS}: choose with 'sites', "
            f"of {sorted(sizes)}"
        )
    return chosen


def _show(figure: Figure, ax: Axes, found: _Picture, matrix: Matrix) -> None:
    values = _transformed(found.matrix, matrix)
    off = np.abs(values - np.diag(np.diag(values)))
    most = 1.0 if matrix == "correlation" else float(np.nanmax(off)) or float(np.nanmax(np.abs(values)))
    image = ax.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
    ends = np.cumsum(list(found.sizes.values()))
    for end in ends[:-1]:
        ax.axhline(end - 0.5, color=INK, lw=0.4)
        ax.axvline(end - 0.5, color=INK, lw=0.4)
    ax.grid(visible=False)
    centres = ends - (np.array(list(found.sizes.values())) + 1) / 2
    names = [name.removeprefix("net.") for name in found.sizes]
    shown: list[int] = []
    for i, centre in enumerate(centres):  # names that would stand in one another are left out
        if not shown or centre - centres[shown[-1]] >= ends[-1] / MAX_NAMES:
            shown.append(i)
    ax.set_yticks(centres[shown], [names[i] for i in shown])
    ax.set_xticks([])
    ax.set_xlabel(f"{matrix} {found.source}")
    figure.colorbar(image, ax=ax, shrink=0.6)


def _transformed(cov: np.ndarray, matrix: Matrix) -> np.ndarray:
    """The matrix asked for; not a number in rows of weights that do not vary."""
    varies = np.diag(cov) > 0
    both = np.ix_(varies, varies)
    values = np.full_like(cov, np.nan)
    if matrix == "covariance":
        values[both] = cov[both]
    elif matrix == "correlation":
        sd = np.sqrt(np.diag(cov)[varies])
        values[both] = cov[both] / np.outer(sd, sd)
    elif varies.any():
        values[both] = np.linalg.pinv(cov[both], hermitian=True)
    return values


def weight_norms(trees: Trees) -> Figure:
    """Posterior of each layer's weight norm: median, middle half and middle 90 %, one row per layer and method.

    Norms are invariant under permutations of hidden units and so, unlike single weights, comparable between
    chains and methods. A norm that stays at its prior in one method only hints at units that were switched
    off.

    Args:
        trees: one DataTree or a mapping from label to DataTree with ``function.layer_norm``.

    Returns:
        A figure with one axes; a legend names the methods.
    """
    stored = {label: evidence.variable(FUNCTION, "layer_norm") for label, evidence in gather(trees).items()}
    found = {label: norms for label, norms in stored.items() if norms is not None and norms.size}
    with style():
        if not found:
            figure, axes = panels(1, size=(4.6, 1.4))
            empty_panel(axes[0, 0], "no layer norms in these trees")
            return figure
        widest = max(found.values(), key=lambda norms: norms.sizes["layer"])
        layers = widest.sizes["layer"]
        figure, axes = panels(1, size=(4.2, 0.8 + 0.22 * layers * (len(found) + 1)))
        ax = axes[0, 0]
        for index, (label, norms) in enumerate(found.items()):
            colour = FITS[index % len(FITS)]
            values = norms.transpose(..., "layer").values.astype(np.float64)
            for layer in range(values.shape[-1]):
                interval_row(ax, layer + 0.7 * ((index + 0.5) / len(found) - 0.5), values[..., layer], colour)
            dropped = int(np.sum(~np.isfinite(values)))
            ax.plot([], [], color=colour, lw=3, label=f"{label} ({dropped} not finite)" if dropped else label)
        names = map(str, widest["layer"].values if "layer" in widest.coords else range(layers))
        ax.set_xlabel("norm of the layer's weights")
        name_rows(figure, ax, [f"layer {name}" if name.isdigit() else name for name in names])
        return figure
