"""Exact scores of a mixture of normals, the linear floor, and the tables of the records beside published numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from records import mean_and_error
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyrobnn.data import Dataset, Standardizer

METRICS = {
    "log_density": "test log density (nats a point; higher is better)",
    "rmse": "test RMSE (units of the target)",
    "crps": "test CRPS (units of the target)",
    "coverage": "coverage of the 95 % interval",
    "cpu_seconds": "CPU seconds a split (choice of hyper-parameters included)",
}
FLOOR = "linear"
#: splits from which a standard error is given, and the standard errors by which a method beats the linear model
FEWEST, CLEARLY = 3, 5.0

Record = Mapping[str, Any]
#: data set → method → split → value
Values = dict[str, dict[str, dict[int, float]]]

#: components at most for the CRPS, whose cost is the square of their number
MAX_CRPS_COMPONENTS = 256


def mixture_scores(
    loc: Tensor, scale: Tensor, y: Tensor, *, mean: Tensor | None = None, level: float = 0.95
) -> dict[str, float]:
    r"""RMSE, mean log density, mean CRPS and coverage of equal-weight mixtures of normals.

    .. math:: p(y_n) = \frac1S \sum_s N(y_n; \mu_{sn}, \sigma_{sn}^2)

    Args:
        loc, scale: mean and standard deviation of every component, (draw, point), in the units of y.
        y: targets (point,).
        mean: the predictive mean (point,) where it is known better than as the mean of ``loc``.
        level: of the central interval whose coverage is counted.

    Returns:
        ``rmse``, ``log_density`` (nats a point), ``crps`` (units of y), ``coverage`` (share of points inside).

    Raises:
        ValueError: shapes that disagree, or a level outside (0, 1).

    Example:
        >>> scores = mixture_scores(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.0, 3.0]))
        >>> round(scores["log_density"], 4), scores["coverage"]  # -log(2 pi) / 2 - 9 / 4
        (-3.1689, 0.5)
    """
    if loc.shape != scale.shape or loc.dim() != 2 or y.shape != loc.shape[1:]:
        raise ValueError(
            f"'loc' {tuple(loc.shape)} and 'scale' {tuple(scale.shape)} must be (draw, point) and "
            f"'y' {tuple(y.shape)} (point,)"
        )
    if not 0 < level < 1:
        raise ValueError(f"'level' must lie in (0, 1), got {level}")
    loc, scale, y = loc.double(), scale.double(), y.double()
    centre = loc.mean(0) if mean is None else mean.double()
    standard = (y - loc) / scale
    per_draw = -0.5 * standard.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    below = torch.special.ndtr(standard).mean(0)
    tail = (1 - level) / 2
    return {
        "rmse": float((y - centre).square().mean().sqrt()),
        "log_density": float((torch.logsumexp(per_draw, 0) - math.log(len(loc))).mean()),
        "crps": float(mixture_crps(loc, scale, y).mean()),
        "coverage": float(((below > tail) & (below < 1 - tail)).double().mean()),
    }


def mixture_crps(loc: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    r"""Continuous ranked probability score of equal-weight mixtures of normals, in closed form; (point,).

    .. math:: \frac1S\sum_s A(y - \mu_s, \sigma_s^2) - \frac1{2S^2}\sum_{st} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2),
        \quad A(m, v) = E|N(m, v)|

    More than 256 components are thinned evenly.

    Args:
        loc, scale: (draw, point). y: (point,).

    Reference: Calibrated Probabilistic Forecasting Using Ensemble Model Output Statistics (Gneiting et al., 2005);
    Grimit et al. (2006) for mixtures.

    Example:
        >>> crps = mixture_crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
        >>> round(crps.item(), 4)  # (sqrt(2) - 1) / sqrt(pi)
        0.2337
    """
    if len(loc) > MAX_CRPS_COMPONENTS:
        keep = torch.linspace(0, len(loc) - 1, MAX_CRPS_COMPONENTS).round().long()
        loc, scale = loc[keep], scale[keep]
    first = _mean_abs(y - loc, scale.square()).mean(0)
    pairs = torch.zeros_like(first)
    for one, its_scale in zip(loc, scale):  # row by row: S² pairs of N points would not fit
        pairs += _mean_abs(one - loc, its_scale.square() + scale.square()).mean(0)
    return first - pairs / (2 * len(loc))


def _mean_abs(m: Tensor, v: Tensor) -> Tensor:
    """E|N(m, v)|."""
    sd = v.sqrt()
    z = m / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return m * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


@dataclass(frozen=True, eq=False)
class LinearFloor:
    r"""Bayesian linear regression whose prior precision and noise maximise the evidence, on standardised data.

    .. math:: w \sim N(0, \lambda^{-1} I), \quad y \sim N(x^\top w, \alpha^{-1}), \quad
        (\hat\lambda, \hat\alpha) = \arg\max p(y \mid \lambda, \alpha)

    Reference: Bayesian Interpolation (MacKay, 1992).

    Example:
        >>> from pyrobnn.data import diabetes
        >>> mean, scale = LinearFloor.fit(diabetes()).predict(diabetes().x)
        >>> bool((mean - diabetes().y[:, 0]).square().mean().sqrt() < 54)
        True
    """

    ridge: BayesianRidge
    standardizer: Standardizer

    @classmethod
    def fit(cls, train: Dataset) -> LinearFloor:
        """Maximise the evidence on the standardised rows; one output."""
        units = Standardizer.fit(train)
        flat = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
        ridge = BayesianRidge(max_iter=500, tol=1e-12, fit_intercept=False, **flat)
        x, y = units.transform_x(train.x).double(), units.transform_y(train.y)[:, 0].double()
        return cls(ridge.fit(x.numpy(), y.numpy()), units)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in standard units."""
        return float(self.ridge.alpha_) ** -0.5

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y (point,) at inputs (point, feature), in original units."""
        units = self.standardizer
        mean, sd = self.ridge.predict(units.transform_x(x).double().numpy(), return_std=True)
        return torch.as_tensor(mean) * units.y_scale + units.y_mean, torch.as_tensor(sd) * units.y_scale


def published() -> dict[str, Any]:
    """The published numbers, with their sources."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def values_of(records: Sequence[Record], metric: str) -> Values:
    """One metric of every record; of repeated work the last counts."""
    found: Values = {}
    for record in records:
        value = record["scores"].get(metric, record.get(metric))
        splits = found.setdefault(record["dataset"], {}).setdefault(record["method"], {})
        splits[record["split"]] = float(value)
    return found


def overlaps(records: Sequence[Record]) -> dict[str, float]:
    """Test rows over training rows, by data set."""
    return {record["dataset"]: record.get("num_test", 0) / record.get("num_train", 1) for record in records}


def markdown(records: Sequence[Record], metric: str, methods: Sequence[str], table: Mapping[str, Any]) -> str:
    """A row per method and a column per data set, mean ± standard error [splits]; published rows below."""
    values, shares = values_of(records, metric), overlaps(records)
    names = sorted(values)
    lines = [f"| {METRICS[metric]} [splits] | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for method in methods:
        cells = [values[name].get(method) for name in names]
        texts = [
            _text(list(cell.values()), shares[name]) if cell else ""
            for name, cell in zip(names, cells, strict=True)
        ]
        lines += [f"| {method} | {' | '.join(texts)} |"] if any(texts) else []
    for column in table["columns"]:
        entries = [column.get(metric, {}).get(name) for name in names]
        if any(entries):
            facts = ["± sd"] * (column["spread"] != "se") + ["own splits"] * (column["splits"] != "standard")
            facts += ["heteroskedastic"] * (column["noise"] != "homoskedastic")
            label = f"*{column['label']}{', '.join(['', *facts])}*"
            shown = [
                "" if e is None else f"{e[0]:g}" + ("" if e[1] is None else f" ± {e[1]:g}") for e in entries
            ]
            lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _text(values: Sequence[float], overlap: float) -> str:
    mean, error = mean_and_error(values, overlap)
    digits = 1 - math.floor(math.log10(abs(mean))) if 0 < abs(mean) < 0.01 else 3 if abs(mean) < 100 else 0
    spread = f" ± {error:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean:.{digits}f}{spread} [{len(values)}]"


def beats_floor(records: Sequence[Record]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Standard errors by which each method is better than the linear model, paired over splits, and whether enough.

    The smaller of the gains in log density and in RMSE counts; cells of fewer than three splits are not judged.
    """
    shares, found = overlaps(records), {}
    density, rmse = values_of(records, "log_density"), values_of(records, "rmse")
    for name, methods in density.items():
        for method in methods:
            if method == FLOOR or FLOOR not in methods:
                continue
            gains = []
            for values, sign in ((density, 1.0), (rmse, -1.0)):
                one, two = values[name][method], values[name][FLOOR]
                shared = sorted(one.keys() & two.keys())
                mean, error = mean_and_error([sign * (one[k] - two[k]) for k in shared], shares[name])
                gains.append(mean / error if error else math.copysign(math.inf, mean))
            if math.isfinite(min(gains)) or not any(map(math.isnan, gains)):
                found[name, method] = min(gains), min(gains) > CLEARLY
    return found


def best_published(
    records: Sequence[Record], table: Mapping[str, Any]
) -> dict[str, tuple[str, float, float]]:
    """By data set: our best method, its log density, and the best published one of one noise on the same splits."""
    density, found = values_of(records, "log_density"), {}
    for name, methods in density.items():
        peers = [
            column["log_density"][name][0]
            for column in table["columns"]
            if name in column["log_density"]
            and (column["noise"], column["splits"]) == ("homoskedastic", "standard")
            and column["id"] != FLOOR
        ]
        means = {
            m: mean_and_error(list(s.values()))[0]
            for m, s in methods.items()
            if len(s) >= FEWEST and m != FLOOR
        }
        if peers and means:
            best = max(means, key=means.__getitem__)
            found[name] = best, means[best], max(peers)
    return found


def claims(records: Sequence[Record], table: Mapping[str, Any]) -> list[str]:
    """What should hold, and whether it does."""
    floor = beats_floor(records)
    clear = sum(enough for _, enough in floor.values())
    lines = [f"{clear} of {len(floor)} cells beat the linear model by more than {CLEARLY:g} standard errors"]
    lines += [
        f"{'met    ' if ours >= theirs else 'NOT MET'} {name}: {best} {ours:.3f}, best published {theirs:.3f}"
        for name, (best, ours, theirs) in sorted(best_published(records, table).items())
    ]
    return [
        *lines,
        *(f"{column['label']}: {column['citation']} {column['url']}" for column in table["columns"]),
    ]
