"""Is a trained net ever worse after `pb.posthoc`, beside temperature scaling and laplace-torch?"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

import pyrobnn as pb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from trained_net.peer import laplace_torch  # noqa: E402
from trained_net.small_sets import sets  # noqa: E402


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int = 300,
    batch: int = 64,
) -> nn.Module:
    """The net after steps of Adam on random batches, ready to predict."""
    optimizer = torch.optim.Adam(net.parameters(), 0.005)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(batch, len(x)),))
        optimizer.zero_grad()
        cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net.eval()


def mixture(f: Tensor) -> Tensor:
    """Log probabilities (row, class) of the mean over draws of logits (draw, row, class)."""
    return f.log_softmax(-1).logsumexp(0) - math.log(len(f))


def scores(log_p: Tensor, y: Tensor) -> dict[str, float]:
    """Mean log density and expected calibration error in 15 bins."""
    confidence, label = log_p.exp().max(1)
    bins = (confidence * 15).long().clamp_max(14)
    right = (label == y).double()
    gaps = [(confidence[bins == b] - right[bins == b]).sum().abs() for b in range(15)]
    return {"log_density": -float(nll_loss(log_p, y)), "ece": float(sum(gaps)) / len(y)}


@dataclass(frozen=True)
class Thirds:
    """A set in three: rows that train the net, rows that tune what comes after, rows that judge."""

    x_train: Tensor
    y_train: Tensor
    x_tune: Tensor
    y_tune: Tensor
    x_test: Tensor
    y_test: Tensor


def thirds(x: np.ndarray, y: np.ndarray) -> Thirds:
    """A random order of the rows in three, the inputs in units of the training rows."""
    order = torch.randperm(len(x))
    inputs = torch.tensor(x).float()[order]
    labels = torch.tensor(y)[order].long()
    n = len(inputs) // 3
    inputs = (inputs - inputs[:n].mean(0)) / inputs[:n].std(0).clamp_min(1e-3)
    return Thirds(
        inputs[:n],
        labels[:n],
        inputs[n : 2 * n],
        labels[n : 2 * n],
        inputs[2 * n :],
        labels[2 * n :],
    )


def compare(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    seed: int,
) -> dict[str, Any]:
    """One net on a third of a set, tuned by a third, judged by the last third and by noise from elsewhere."""
    torch.manual_seed(seed)
    data = thirds(x, y)
    num_inputs = x.shape[1]
    net = train(
        nn.Sequential(nn.Linear(num_inputs, 50), nn.ReLU(), nn.Linear(50, int(y.max()) + 1)),
        data.x_train,
        data.y_train,
    )
    far = 3 * torch.randn(len(data.x_test), num_inputs)
    tuned = pb.posthoc(
        net,
        data.x_train,
        data.y_train,
        held_out=(data.x_tune, data.y_tune),
    )
    alone = pb.posthoc(net, data.x_train, data.y_train)
    kron = laplace_torch(net, data.x_train, data.y_train)
    temperature = best_temperature(net, data.x_tune, data.y_tune)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "net": lambda z: net(z).log_softmax(1),
        "temperature": lambda z: (net(z) / temperature).log_softmax(1),
        "posthoc": lambda z: mixture(tuned.predict(z).f[0]),
        "posthoc, no held-out": lambda z: mixture(alone.predict(z).f[0]),
        "laplace-torch": lambda z: kron(z).clamp_min(1e-30).log(),
    }
    record: dict[str, Any] = {
        "set": name,
        "seed": seed,
        "chosen": tuned.meta["chosen"],
        "alone": alone.meta["chosen"],
    }
    with torch.no_grad():
        of_net = ways["net"](data.x_test)
        for way, log_p in ways.items():
            at_test = log_p(data.x_test)
            record[way] = (
                scores(at_test, data.y_test)
                | {"auroc": auroc(at_test, log_p(far))}
                | beside(of_net, at_test, data.y_test)
            )
    return record


def best_temperature(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The divisor of the logits with the highest likelihood of 60 on a grid."""
    with torch.no_grad():
        logits = net(x)
        return min(
            torch.logspace(-1, 1.5, 60),
            key=lambda divisor: float(cross_entropy(logits / divisor, y)),
        )


def auroc(at_test: Tensor, far: Tensor) -> float:
    """How well the entropy of log probabilities (row, class) tells test rows from rows far away."""
    entropy = [-(log_p.exp() * log_p).sum(1) for log_p in (at_test, far)]
    labels = np.r_[np.zeros(len(at_test)), np.ones(len(far))]
    return roc_auc_score(labels, torch.cat(entropy))


def beside(of_net: Tensor, log_p: Tensor, y: Tensor) -> dict[str, bool]:
    """Whether log probabilities (row, class) are worse than the net's by two standard errors: its own, or of pairs."""
    base = of_net.gather(1, y[:, None])[:, 0]
    gain = log_p.gather(1, y[:, None])[:, 0] - base
    error = float(gain.std()) / len(gain) ** 0.5
    return {
        "worse": float(gain.mean()) < -2 * float(base.std()) / len(base) ** 0.5,
        "worse_paired": float(gain.mean()) < -2 * error - 1e-9,
    }


def main() -> None:
    """Compare on every set and seed; the records are written anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for seed in range(options.seeds):
        for name, (x, y) in sets().items():
            rows.append(compare(name, x, y, seed))
            lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
            (HERE / "records.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
