"""Split conformal prediction: sets that hold a new outcome as often as they say, whether or not the model is right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, as_tensor, check_finite, check_number
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.wording.findings import Finding, warn

__all__ = ["conformal_interval", "conformal_set"]

Rows = tuple[Tensor, Tensor]


def conformal_interval(posterior: Posterior, x: Tensor, *, calibration: Rows, alpha: float = 0.1) -> Rows:
    r"""Intervals that hold a new outcome with probability 1 − α or more, from rows that the fit has not seen.

    With the predictive median m and the quantiles l, u of α/2 and 1 − α/2, the interval is
    [m − q (m − l), m + q (u − m)], where q is the ⌈(1 − α)(n + 1)⌉-th smallest of the n calibration rows'

    .. math:: s_i = \max\left(\frac{m_i - y_i}{m_i - l_i}, \frac{y_i - m_i}{u_i - m_i}\right)

    so that it follows the model's noise and its skewness: q is 1 where the model is right.

    Args:
        posterior: of a BNN that predicts one number, by any method.
        x: inputs (point, …) in the units of the data.
        calibration: (x, y), rows (n, …) and (n,) or (n, 1) that the fit has not seen.
        alpha: share of the outcomes that the intervals may miss, in (0, 1).

    Returns:
        Their lower and their upper ends, each (point,) in the units of y.

    Raises:
        Refused: several outputs, censored targets.
        TypeError, ValueError: naming the argument; a likelihood of classes.

    Warns:
        UserWarning: the rows are fewer than 1/α − 1, so that nothing can be left out: the intervals are infinite.

    Caveats: the share holds on average over rows and new points, not at each x, and only where both are exchangeable
    (no drift, no copies of training rows among the calibration rows).

    Reference: Distribution-free predictive inference for regression (Lei et al., 2018) https://arxiv.org/abs/1604.04173;
    Conformalized quantile regression (Romano, Patterson & Candès, 2019) https://arxiv.org/abs/1905.03222
    """
    alpha = check_number("alpha", alpha, above=0, below=1)
    targets = posterior.bnn.likelihood.targets
    if targets.classes:
        raise ValueError("the outcomes are classes: use pyrobnn.conformal_set")
    if targets.censoring is not None:
        raise Refused("conformal intervals need outcomes that were observed: these targets are censored")
    levels = torch.tensor([alpha / 2, 0.5, 1 - alpha / 2], dtype=torch.float64)

    def quantiles(p: Prediction) -> Tensor:
        found = p.quantile(levels)
        if found.shape[-1] != 1:
            raise Refused(f"conformal intervals are of one output, got {found.shape[-1]}: fit a model for each")
        return found[..., 0].double().T

    x_held, y = _checked(calibration)
    low, median, high = _predicted(posterior, x_held, quantiles).T
    tiny = torch.finfo(torch.float64).tiny  # of counts a quantile may be the median
    below, above = (median - low).clamp_min(tiny), (high - median).clamp_min(tiny)
    q = _quantile(torch.maximum((median - y) / below, (y - median) / above), alpha)
    low, median, high = _predicted(posterior, as_tensor("x", x), quantiles).T
    below, above = (median - low).clamp_min(tiny), (high - median).clamp_min(tiny)
    return median - q * below, median + q * above


def conformal_set(posterior: Posterior, x: Tensor, *, calibration: Rows, alpha: float = 0.1) -> Tensor:
    r"""Sets of classes that hold a new label with probability 1 − α or more, from rows that the fit has not seen.

    A class belongs to the set where its probability is at least the ⌊α (n + 1)⌋-th smallest that the labels of the n
    calibration rows have. A set may be empty: no class is as probable there as the labels of nearly all rows are.

    Args:
        posterior: of a BNN with a likelihood of labels, or a Bernoulli one of one output (classes 0 and 1).
        x, calibration, alpha: as of :func:`pyrobnn.conformal_interval`; y are labels (n,).

    Returns:
        Whether a class belongs to the set of a point, (point, class).

    Raises:
        Refused: several Bernoulli outputs.
        TypeError, ValueError: naming the argument; a likelihood of numbers.

    Warns, caveats: as of :func:`pyrobnn.conformal_interval`; the share is on average over the classes, not for each.

    Reference: Least ambiguous set-valued classifiers with bounded error levels (Sadinle, Lei & Wasserman, 2019)
    https://arxiv.org/abs/1609.00451
    """
    alpha = check_number("alpha", alpha, above=0, below=1)
    targets = posterior.bnn.likelihood.targets
    if not targets.classes:
        raise ValueError("the outcomes are numbers: use pyrobnn.conformal_interval")

    def probabilities(p: Prediction) -> Tensor:
        if targets.kind == "label":
            return p.probs.double()
        if p.probs.shape[-1] != 1:
            raise Refused("conformal sets are of one label at a time: fit a model for each output")
        return torch.cat([1 - p.probs, p.probs], -1).double()

    x_held, y = _checked(calibration)
    held = _predicted(posterior, x_held, probabilities)
    q = _quantile(-held[torch.arange(len(y)), y.long()], alpha)
    probs = _predicted(posterior, as_tensor("x", x), probabilities)
    return -probs <= q + 1e-9  # copies of a row agree up to rounding


def _checked(calibration: Rows) -> Rows:
    """x and y (n,) of the calibration rows."""
    if not isinstance(calibration, (tuple, list)) or len(calibration) != 2:
        raise TypeError(f"'calibration' must be the pair (x, y), got {type(calibration).__name__}")
    x = as_tensor("calibration[0]", calibration[0])
    y = _as_many("calibration[1]", calibration[1], len(x))
    check_finite("calibration[1]", y)
    return x, y.cpu()


def _as_many(name: str, y: Tensor, count: int) -> Tensor:
    y = as_tensor(name, y)
    if y.numel() != count or count == 0:
        raise ValueError(f"{name!r} must hold one outcome for each of {count} points, got shape {tuple(y.shape)}")
    return y.reshape(-1)


def _predicted(posterior: Posterior, x: Tensor, part: Callable[[Prediction], Tensor]) -> Tensor:
    """``part`` (point, …) of the prediction, computed block by block."""
    size = max(1, 2**22 // (posterior.num_chains * posterior.num_draws))
    return torch.cat([part(posterior.predict(rows)).detach().cpu() for rows in x.split(size)])


def _quantile(scores: Tensor, alpha: float) -> float:
    """The score that a further row exceeds with probability α at most."""
    rank = math.ceil((1 - alpha) * (len(scores) + 1) - 1e-9)
    if rank <= len(scores):
        return float(scores.sort().values[rank - 1])
    fewest = math.ceil(1 / alpha - 1e-9) - 1
    warn([Finding("few_calibration_rows", {"rows": len(scores), "alpha": alpha, "fewest": fewest})], stacklevel=3)
    return math.inf
