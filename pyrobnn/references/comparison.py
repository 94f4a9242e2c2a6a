"""How far a posterior is from a reference, with the Monte-Carlo error of every distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from pyrobnn.references.summary import LEVELS
from pyrobnn.signs import shown


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
        lines = [
            f"from the reference {self.reference}, in its sd",
            f"{'':>9} {'largest difference':>20} {'ratio of sd':>14} {'mean W1':>9} {'by chance':>10}",
        ]
        for kind in self.kinds:
            rows = self.of(kind)
            worst = int(np.abs(rows["mean_difference"].values).argmax())
            shift, error = (float(rows[name][worst]) for name in ("mean_difference", "mean_error"))
            low, high = float(rows["sd_ratio"].min()), float(rows["sd_ratio"].max())
            distance, floor = (float(rows[name].mean()) for name in ("wasserstein", "wasserstein_floor"))
            ratio = f"{low:.2f} to {high:.2f}"
            lines.append(
                f"{kind:>9} {f'{shift:+.3f} ± {error:.3f}':>20} {ratio:>14} {distance:>9.3f} {floor:>10.3f}"
            )
        if self.evidence_difference is not None:
            lines.append(f"log evidence {self.evidence_difference:+.2f} ± {self.evidence_error:.2f} nats")
        return shown("\n".join(lines))


def compared(
    name: str, ours: xr.Dataset, theirs: xr.Dataset, evidence: tuple[float | None, float | None]
) -> Comparison:
    """The comparison of two summaries of the same quantities, the second with coordinates and the reference's."""
    scale = theirs["sd"].values
    ratio = ours["sd"].values / scale
    apart = np.abs(ours["quantiles"].values - theirs["quantiles"].values).mean(0) / scale
    each_error = np.hypot(ours["mean_error"].values, theirs["mean_error"].values) / scale
    columns = {
        "mean_difference": (ours["mean"].values - theirs["mean"].values) / scale,
        "mean_error": each_error,
        "sd_ratio": ratio,
        "sd_error": np.hypot(ours["sd_error"].values, ratio * theirs["sd_error"].values) / scale,
        "wasserstein": apart,
        "wasserstein_floor": _floor(ours, theirs) / scale,
    }
    table = xr.Dataset({key: ("quantity", value) for key, value in columns.items()}, coords=theirs.coords)
    return Comparison(name, table, *evidence)


def _floor(ours: xr.Dataset, theirs: xr.Dataset) -> np.ndarray:
    """Expected 1-Wasserstein distance of effective draws of one distribution: that of its quantiles' own errors."""
    quantiles = theirs["quantiles"].values
    slope = np.gradient(quantiles, LEVELS, axis=0)
    variance = 1.0 / ours["ess_bulk"].values + 1.0 / theirs["ess_bulk"].values
    error = np.sqrt(LEVELS * (1.0 - LEVELS))[:, None] * slope * np.sqrt(variance)
    return np.sqrt(2.0 / np.pi) * error.mean(0)
