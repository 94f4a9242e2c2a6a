"""Widths of the prior that the evidence prefers, each judged at the mode that belongs to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.prior import with_precision
from pyrobnn.inference.laplace import Laplace
from pyrobnn.model import BNN, NET
from pyrobnn.posterior import Posterior

#: rows that widths and noise are found of, evenly spaced: several fits of so many take minutes
MAX_TRIED_ROWS = 20_000


@dataclass(frozen=True, eq=False)
class _Try:
    """Factors on the prior's precision by layer, and the fit at the mode that they have."""

    factors: Mapping[str, float]
    posterior: Posterior

    @property
    def evidence(self) -> float:
        return cast(float, self.posterior.log_evidence)


def select_prior_width(
    method: Laplace, model: BNN, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any]
) -> tuple[Posterior, str]:
    """The fit whose prior widths, one per layer, have the largest evidence, and those widths in words.

    Widths that are tuned once, at the mode of the declared prior, leave the mean where it was: underconfident where the
    classes can be told apart, and following the labels where they cannot, for there the evidence has a second maximum,
    at a net that is constant. So the mode is found anew for every width: for narrower and narrower ones until the
    evidence has fallen twice in a row, and then, from the best, for those that suit the last mode, as long as the
    evidence rises. Of more than 20,000 rows so many are tried, evenly spaced, and the mode under the widths that were
    found is sought among all.

    Args:
        method: Laplace; its ``tune`` is replaced.
        model: with normal priors.
        x, y: (N, feature) and (N,), in the units of the data.
        options: of ``method.fit``.

    Reference: A Practical Bayesian Framework for Backpropagation Networks (MacKay, 1992).
    """
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model.priors if name.startswith(NET)))
    common = {name: value for name, value in options.items() if name != "num_draws"}
    still = replace(method, tune=None)
    search = method.search
    # from a mode under another prior; on all of the data L-BFGS follows it, and stays in the valley where it starts
    steps = 1 if search.batch_size is None else max(1, search.num_steps // 10)
    warm = replace(still, map=replace(search, num_steps=steps))
    few = len(x) <= MAX_TRIED_ROWS
    keep = torch.linspace(0, len(x) - 1, min(len(x), MAX_TRIED_ROWS), dtype=torch.float64).round().long()
    tried = x[keep], y[keep]

    def attempt(factors: Mapping[str, float], start: _Try | None = None) -> _Try:
        around = model if start is None else _at_mode(model, start.posterior)
        fitted = (still if start is None else warm).fit(
            _scaled(around, factors), *tried, num_draws=1, **common
        )
        return _Try(factors, fitted)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # those of the one that is kept follow below
        tries: list[_Try] = []
        for factor in (1.0, 9.0, 81.0, 729.0):  # widths of 1, 1/3, 1/9, 1/27
            tries.append(attempt(dict.fromkeys(layers, factor), tries[-1] if tries else None))
            best = max(tries, key=lambda each: each.evidence)
            if len(tries) > 2 and best.evidence > max(each.evidence for each in tries[-2:]):
                break
        if best is not tries[0]:
            # from a wider prior, whose mode has not shrunk to nothing
            tries.append(attempt(dict.fromkeys(layers, 1 / 9)))
            best = max(tries, key=lambda each: each.evidence)
        tuning = replace(still, tune="per_layer")
        for _ in range(6):
            here = _scaled(_at_mode(model, best.posterior), best.factors)
            tuned = tuning.fit(here, *tried, init=here.net, num_draws=1, **common).meta["tuned"]
            found = tuned["prior_precision_factor"]
            factors = {name: best.factors[name] * found.get(name, found.get("all")) for name in layers}
            tries.append(attempt(factors, best))
            gained = tries[-1].evidence - best.evidence
            best = max(best, tries[-1], key=lambda each: each.evidence)
            if gained < 0.5:  # nats
                break
    last = warm if few else still
    posterior = last.fit(_scaled(_at_mode(model, best.posterior), best.factors), x, y, **options)
    tuned = {"prior_precision_factor": dict(best.factors), "noise_factor": 1.0}
    widths = ", ".join(f"{factor**-0.5:.2g} ({name})" for name, factor in best.factors.items())
    words = f"times {widths}, the best of {len(tries)} by the evidence, each at its own mode"
    if not few:
        words += f", of {MAX_TRIED_ROWS:,} of {len(x):,} rows"
    if min(best.factors.values()) >= 81:
        words += ": the inputs tell so little of the target that it is predicted nearly the same everywhere"
    return replace(posterior, meta=posterior.meta | {"tuned": tuned}), f"its prior's widths {words}"


def _scaled(model: BNN, factors: Mapping[str, float]) -> BNN:
    """The model with its prior's precision times a factor in each layer."""
    scaled = copy.copy(model)
    weights = {name: prior for name, prior in model.priors.items() if name.startswith(NET)}
    scaled.priors = model.priors | {
        name: with_precision(name, prior, factors[name.rpartition(".")[0]]) for name, prior in weights.items()
    }
    return scaled


def _at_mode(model: BNN, posterior: Posterior) -> BNN:
    """The model with its net where the posterior's mode is, so that a search starts there."""
    approximation = cast(BlockGaussian, posterior.approximation)
    held = {name: value[0, 0] for name, value in posterior.draws.items()}  # of weights without a prior
    values = held | approximation.layout.constrain(approximation.centre)
    moved = copy.copy(model)
    moved.net = copy.deepcopy(model.net)
    with torch.no_grad():
        for name, parameter in moved.net.named_parameters():
            parameter.copy_(values[NET + name])
    return moved
