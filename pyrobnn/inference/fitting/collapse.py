"""Whether a fit has found a function at all: one that is constant, or no better than the shares of the classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyrobnn.core.checks import Refused, as_tensor
from pyrobnn.core.findings import Finding
from pyrobnn.inference.fitting.batches import even_rows
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import widest_layer

#: the most rows and draws that are looked at, and the fewest rows
_ROWS = 200
_DRAWS = 8
_FEWEST_ROWS = 50
#: numbers that the widest layer of a net may have for all of these
_NUMBERS = 2**24
#: of the targets' standard deviation, or in probability, below which predictions are constant
_CONSTANT = 1e-3
#: nats per row by which probabilities have to be better than shares
_BETTER = 1e-3


@torch.no_grad()
def collapsed(posterior: Posterior, x: Any, y: Any) -> list[Finding]:
    """A finding where the predictions of a net at its training rows are constant or no better than class shares.

    Nothing of a program, a loader, fewer than twenty rows, equal inputs or targets, a likelihood whose law has no mean,
    and of a search that has not ended.

    Args:
        posterior: with its ``meta``.
        x, y: the rows of the fit as the user gave them.
    """
    model = posterior.model
    if not isinstance(model, BNN) or isinstance(x, (DataLoader, Dataset)) or _unfinished(posterior):
        return []
    targets = model.likelihood.targets
    all_labels = targets.columns(targets.read(y))
    inputs = as_tensor("x", x)
    if len(inputs) < 20 or targets.censoring is not None:
        return []
    width = widest_layer(model, posterior.inputs(inputs[:2]))
    num_rows = max(_FEWEST_ROWS, min(_ROWS, _NUMBERS // (2 * width)))
    num_draws = max(1, min(_DRAWS, _NUMBERS // (width * num_rows)))
    rows = even_rows(len(inputs), num_rows)
    inputs = inputs[rows.to(inputs.device)]
    labels = all_labels[rows.to(all_labels.device)]
    if bool((inputs == inputs[:1]).all()) or bool((labels == labels[:1]).all()):
        return []
    try:
        prediction = posterior.thin(max(1, num_draws // posterior.num_chains)).predict(inputs)
        if targets.classes:
            spread = _spread_of_probs(prediction.probs)
        else:
            spread = _relative_spread(prediction.mean, labels)
    except (NotImplementedError, Refused):  # a law without a mean, or no memory: the fit is there
        return []
    if spread < _CONSTANT:
        return [Finding("constant_function", {"rows": len(rows), "spread": spread})]
    if targets.kind != "label":
        return []
    density = float(prediction.log_prob(labels).double().mean())
    shares = _log_density_of_shares(all_labels, labels)
    if density <= shares + _BETTER:
        values = {"rows": len(rows), "density": density, "shares": shares}
        return [Finding("no_better_than_shares", values)]
    return []


def _unfinished(posterior: Posterior) -> bool:
    """Whether the search is known to have ended too early: what it would have found is not known."""
    meta = posterior.meta
    codes = {finding["code"] for finding in meta["findings"]}
    stopped = meta.get("stopped") in ("callback", "interrupt")
    return bool(meta["interrupted"]) or stopped or "search_unfinished" in codes


def _spread_of_probs(probs: Tensor) -> float:
    """Root mean square distance of probabilities (N, class) from their mean: of many classes each is small."""
    return float(probs.double().var(0).sum().sqrt())


def _relative_spread(mean: Tensor, y: Tensor) -> float:
    """The largest sd over rows of predicted means (N, out), in the spread of the targets; inf where there is none.

    The spread is the sd or, where a few outliers make that large, the distance of the quartiles.
    """
    values = mean.reshape(len(mean), -1).double()
    targets = y.reshape(len(y), -1).double().to(values.device)
    sd = targets.std(0)
    lower, upper = targets.quantile(torch.tensor([0.25, 0.75]).to(targets), 0)
    middle = upper - lower  # zero of counts that are mostly zero
    scale = torch.where(middle > 0, torch.minimum(sd, middle), sd)
    if values.shape[1] != len(scale) or not bool((scale > 0).all() & values.isfinite().all()):
        return float("inf")
    return float((values.std(0) / scale).max())


def _log_density_of_shares(all_labels: Tensor, labels: Tensor) -> float:
    """Mean log probability of labels (n,) that are predicted by the shares of all labels (N,), in nats."""
    counts = torch.bincount(all_labels.long().reshape(-1)).double()
    shares = counts / counts.sum()
    return float(shares[labels.long().reshape(-1)].log().mean())
