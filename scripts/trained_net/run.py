"""Is a trained net ever worse after `pb.posthoc`, beside temperature scaling and laplace-torch?"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

import pyrobnn as pb

# torchvision beside a torch of another build lacks its operators, and laplace-torch imports it
OPERATORS = """
roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool
_ps_roi_pool_backward nms qnms qroi_align deform_conv2d _deform_conv2d_backward
"""
LIBRARY = torch.library.Library("torchvision", "DEF")
for operator in OPERATORS.split():
    LIBRARY.define(f"{operator}(Tensor x) -> Tensor")
Torch = importlib.import_module("laplace").Laplace
HERE = Path(__file__).parent


def sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Classification sets that come with scikit-learn, and made ones of several difficulties."""
    tables = {
        name: getattr(datasets, f"load_{name}")(return_X_y=True)
        for name in ("digits", "wine", "breast_cancer", "iris")
    }
    for k in range(8):
        shape = {
            "n_samples": (150, 400)[k % 2],
            "n_features": 10,
            "n_informative": 6,
            "n_classes": 2 + k % 3,
        }
        tables[f"made_{k}"] = datasets.make_classification(
            flip_y=0.1 * (k % 4),
            random_state=k,
            **shape,
        )
    for k in range(4):
        tables[f"moons_{k}"] = datasets.make_moons(
            100 + 100 * k,
            noise=0.2 + 0.1 * k,
            random_state=k,
        )
        tables[f"circles_{k}"] = datasets.make_circles(
            100 + 100 * k,
            noise=0.1 + 0.05 * k,
            factor=0.5,
            random_state=k,
        )
    return tables


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int = 300,
    batch: int = 64,
) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), 0.005)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(batch, len(x)),))
        optimizer.zero_grad()
        cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net.eval()


def mixture(f: Tensor) -> Tensor:
    return f.log_softmax(-1).logsumexp(0) - math.log(len(f))


def scores(log_p: Tensor, y: Tensor) -> dict[str, float]:
    """Mean log density and expected calibration error in 15 bins."""
    confidence, label = log_p.exp().max(1)
    bins = (confidence * 15).long().clamp_max(14)
    right = (label == y).double()
    gaps = [(confidence[bins == b] - right[bins == b]).sum().abs() for b in range(15)]
    return {"log_density": -float(nll_loss(log_p, y)), "ece": float(sum(gaps)) / len(y)}


def laplace_torch(net: nn.Module, x: Tensor, y: Tensor) -> Torch:
    """laplace-torch's Kronecker Laplace of the last layer, its prior precision by the marginal likelihood."""
    laplace = Torch(
        copy.deepcopy(net),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure="kron",
    )
    laplace.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64))
    laplace.optimize_prior_precision(method="marglik")
    return laplace


def compare(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    seed: int,
) -> dict:
    """One net on a third of a set, tuned by a third, judged by the rest and by noise from elsewhere."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    xs = torch.tensor(x).float()[order]
    ys = torch.tensor(y)[order].long()
    n = len(xs) // 3
    xs = (xs - xs[:n].mean(0)) / xs[:n].std(0).clamp_min(1e-3)
    xt = xs[:n]
    yt = ys[:n]
    x_tune = xs[n : 2 * n]
    y_tune = ys[n : 2 * n]
    xn = xs[2 * n :]
    yn = ys[2 * n :]
    net = train(
        nn.Sequential(nn.Linear(xs.shape[1], 50), nn.ReLU(), nn.Linear(50, int(ys.max()) + 1)),
        xt,
        yt,
    )
    far = 3 * torch.randn(len(xn), xs.shape[1])
    tuned = pb.posthoc(
        net,
        xt,
        yt,
        held_out=(x_tune, y_tune),
    )
    alone = pb.posthoc(net, xt, yt)
    torch_kron = laplace_torch(net, xt, yt)
    with torch.no_grad():
        best = min(
            torch.logspace(-1, 1.5, 60),
            key=lambda t: float(cross_entropy(net(x_tune) / t, y_tune)),
        )
    ways = {
        "net": lambda z: net(z).log_softmax(1),
        "temperature": lambda z: (net(z) / best).log_softmax(1),
        "posthoc": lambda z: mixture(tuned.predict(z).f[0]),
        "posthoc, no held-out": lambda z: mixture(alone.predict(z).f[0]),
        "laplace-torch": lambda z: torch_kron(z).clamp_min(1e-30).log(),
    }
    record: dict = {
        "set": name,
        "seed": seed,
        "chosen": tuned.meta["chosen"],
        "alone": alone.meta["chosen"],
    }
    with torch.no_grad():
        base = ways["net"](xn).gather(1, yn[:, None])[:, 0]
        for way, log_p in ways.items():
            entropy = [-(p.exp() * p).sum(1) for p in (log_p(xn), log_p(far))]
            labels = np.r_[np.zeros(len(xn)), np.ones(len(far))]
            gain = log_p(xn).gather(1, yn[:, None])[:, 0] - base
            error = float(gain.std()) / len(gain) ** 0.5
            record[way] = scores(log_p(xn), yn) | {
                "auroc": roc_auc_score(labels, torch.cat(entropy)),
                "worse": float(gain.mean()) < -2 * float(base.std()) / len(base) ** 0.5,
                "worse_paired": float(gain.mean()) < -2 * error - 1e-9,
            }
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict] = []
    for s in range(args.seeds):
        for n, (x, y) in sets().items():
            rows.append(compare(n, x, y, s))
            lines = "".join(json.dumps(r, sort_keys=True) + "\n" for r in rows)
            (HERE / "records.jsonl").write_text(lines, encoding="utf-8")
