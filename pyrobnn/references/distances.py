"""Draws of what a net's posterior identifies, their moments, and how far two posteriors are from each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from torch import Tensor

from pyrobnn.core.chains import MIN_DRAWS, ess, rhat
from pyrobnn.data import Dataset
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import log_densities
from pyrobnn.wording import shown

#: kinds beside those of the probes
NOISE, DENSITY = "noise", "density"


@dataclass(frozen=True, eq=False)
class Quantities:
    """Draws of identified quantities.

    Args:
        names: of each, as "f at probe 3, output 1".
        kinds: of each: "train", "between" and "outside" (the function at probes of that kind), "noise" (its sd) or
            "density" (log-likelihood of all data, log prior).
        draws: (chain, draw, quantity), those of the function first, probe by probe.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    draws: np.ndarray


def quantities(posterior: Posterior, data: Dataset, probe_x: Tensor, probe_kinds: list[str]) -> Quantities:
    """The function at the probes, the noise where it is inferred, the log-likelihood and the log prior."""
    prediction = posterior.predict(probe_x)
    f = prediction.f.cpu().double().numpy()
    outputs = f.shape[3]
    names = [
        f"f at probe {probe}" + (f", output {output}" if outputs > 1 else "")
        for probe in range(len(probe_x))
        for output in range(outputs)
    ]
    kinds = [kind for kind in probe_kinds for _ in range(outputs)]
    columns = [f.reshape(*f.shape[:2], -1)]
    likelihood = posterior.bnn.likelihood
    if prediction.task == "gaussian" and (likelihood.own.priors or likelihood.targets.heads > 1):
        scale = prediction.scale.cpu().double().numpy()[..., 0]
        scale = scale if likelihood.targets.heads > 1 else scale[:, :, :1]
        names += [f"noise at probe {k}" for k in range(len(probe_x))] if scale.shape[2] > 1 else ["noise"]
        columns.append(scale)
    log_prior, log_likelihood = log_densities(posterior, data.x, data.y)
    columns += [
        each.cpu().double().numpy()[..., None] for each in (log_likelihood.double().sum(-1), log_prior)
    ]
    kinds += [NOISE] * (len(names) - len(kinds)) + [DENSITY] * 2
    return Quantities((*names, "log-likelihood", "log prior"), tuple(kinds), np.concatenate(columns, 2))


def levels() -> np.ndarray:
    """Of the quantiles: in the middle of a hundred parts of equal weight."""
    return (np.arange(100) + 0.5) / 100


def summarise(draws: np.ndarray, *, iid: bool = False) -> xr.Dataset:
    """Moments of draws with their Monte-Carlo errors.

    Args:
        draws: (chain, draw, quantity).
        iid: whether they are independent, so that their number is their effective sample size.

    Returns:
        Dataset over ``quantity`` with ``mean``, ``mean_error``, ``sd``, ``sd_error``, ``ess_bulk``, ``ess_tail`` and
        ``rhat`` (NaN of a single chain), and ``quantiles`` (level, quantity).
    """
    flat = draws.reshape(-1, draws.shape[2])
    mean, sd = flat.mean(0), flat.std(0, ddof=1) if len(flat) > 1 else np.zeros(draws.shape[2])
    square = (draws - mean) ** 2
    total = np.full(draws.shape[2], float(len(flat)))
    columns = np.moveaxis(draws, 2, 0)
    judged = draws.shape[1] >= MIN_DRAWS and not iid
    worth = ess(columns, "mean") if judged else total
    worth_square = ess(np.moveaxis(square, 2, 0), "mean") if judged else total
    spread = square.reshape(flat.shape).std(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        sd_error = spread / np.sqrt(worth_square) / (2.0 * sd)
    found = {
        "mean": mean,
        "mean_error": sd / np.sqrt(worth),
        "sd": sd,
        "sd_error": np.where(sd > 0.0, sd_error, 0.0),
        "ess_bulk": ess(columns) if judged else total,
        "ess_tail": ess(columns, "tail") if judged else total,
        "rhat": rhat(columns) if judged and len(draws) > 1 else np.full(draws.shape[2], np.nan),
    }
    quantiles = ("level", "quantity"), np.quantile(flat, levels(), axis=0)
    return xr.Dataset({name: ("quantity", value) for name, value in found.items()} | {"quantiles": quantiles})


@dataclass(frozen=True, eq=False)
class Comparison:
    """Distances of a posterior from a reference.

    Args:
        reference: name of the reference.
        table: Dataset over ``quantity`` (coordinates: its name, and ``kind``) with ``mean_difference`` in sd of the
            reference, ``sd_ratio`` over the reference's and ``wasserstein``, the 1-Wasserstein distance in sd of the
            reference; ``mean_error`` and ``sd_error``, the standard errors of the first two, by the effective draws
            of both; ``wasserstein_floor``, what it is expected to be between draws of one posterior.
        evidence_difference: log evidence minus the reference's, nats; None where the posterior has none.
        evidence_error: the standard error of that, nats; the reference's alone where the posterior's is unknown.
    """

    reference: str
    table: xr.Dataset
    evidence_difference: float | None
    evidence_error: float | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of quantities, in their order: "train", "between", "outside", "noise", "density"."""
        return tuple(dict.fromkeys(str(kind) for kind in self.table["kind"].values))

    def of(self, kind: str) -> xr.Dataset:
        """The rows of the table that are of one kind.

        Raises:
            ValueError: no such kind.
        """
        if kind not in self.kinds:
            raise ValueError(f"unknown kind {kind!r}: choose one of {', '.join(self.kinds)}")
        return self.table.isel(quantity=self.table["kind"].values == kind)

    @property
    def largest_z(self) -> float:
        """The largest difference of a mean or an sd, in its standard error.

        Between two runs that both have converged it is about 3 over some dozens of quantities.
        """
        with np.errstate(divide="ignore"):  # a point estimate has no sd, and no error of it
            mean = np.abs(self.table["mean_difference"] / self.table["mean_error"])
            sd = np.abs((self.table["sd_ratio"] - 1.0) / self.table["sd_error"])
        return float(max(mean.max(), sd.max()))

    def __str__(self) -> str:
        lines = [f"from the reference {self.reference}, in its sd"]
        for kind in self.kinds:
            rows = self.of(kind)
            worst = int(np.abs(rows["mean_difference"].values).argmax())
            shift, error = (float(rows[name][worst]) for name in ("mean_difference", "mean_error"))
            low, high = float(rows["sd_ratio"].min()), float(rows["sd_ratio"].max())
            distance, floor = (float(rows[name].mean()) for name in ("wasserstein", "wasserstein_floor"))
            lines.append(
                f"{kind:>9}: largest difference {shift:+.3f} ± {error:.3f}, ratio of sd {low:.2f} to {high:.2f}, "
                f"mean W1 {distance:.3f}, by chance {floor:.3f}"
            )
        if self.evidence_difference is not None:
            lines.append(f"log evidence {self.evidence_difference:+.2f} ± {self.evidence_error:.2f} nats")
        return shown("\n".join(lines))


def compare_summaries(
    name: str, ours: xr.Dataset, theirs: xr.Dataset, evidence: tuple[float | None, float | None]
) -> Comparison:
    """The comparison of two summaries of the same quantities, the second with coordinates and the reference's."""
    scale = theirs["sd"].values
    ratio = ours["sd"].values / scale
    apart = np.abs(ours["quantiles"].values - theirs["quantiles"].values).mean(0) / scale
    each_error = np.hypot(ours["mean_error"].values, theirs["mean_error"].values) / scale
    # expected between effective draws of one distribution: by the errors of its quantiles
    slope = np.gradient(theirs["quantiles"].values, levels(), axis=0)
    variance = 1.0 / ours["ess_bulk"].values + 1.0 / theirs["ess_bulk"].values
    errors = np.sqrt(levels() * (1.0 - levels()))[:, None] * slope * np.sqrt(variance)
    floor = np.sqrt(2.0 / np.pi) * errors.mean(0)
    columns = {
        "mean_difference": (ours["mean"].values - theirs["mean"].values) / scale,
        "mean_error": each_error,
        "sd_ratio": ratio,
        "sd_error": np.hypot(ours["sd_error"].values, ratio * theirs["sd_error"].values) / scale,
        "wasserstein": apart,
        "wasserstein_floor": floor / scale,
    }
    table = xr.Dataset({key: ("quantity", value) for key, value in columns.items()}, coords=theirs.coords)
    return Comparison(name, table, *evidence)
