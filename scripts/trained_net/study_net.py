"""The Laplace approximation of study 2's net by this library and by laplace-torch: the same weights, prior and noise.

    python scripts/trained_net/study_net.py      # a minute; writes study_net.json

The net is 1-10-1 with tanh, the data are the study's 150 points, and the variances are those of the function on its
window, [-10, 13]. Notebook 02 reads the file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pyro.distributions as dist
import torch
from torch import Tensor

import pyrobnn as pb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from peer import Torch  # noqa: E402

RESULTS = HERE / "study_net.json"
PRIOR_SD = 2.0
NOISE_SD = 0.3
GRID = torch.linspace(-10, 13, 500, dtype=torch.float64)[:, None]


def main() -> None:
    """Fit once, approximate by both libraries in three structures, and write what they say."""
    data = pb.data.study("laplace")
    data = replace(data, x=data.x.double(), y=data.y.double(), true_f=data.true_f.double())
    units = pb.data.Standardizer.fit(data)
    noise = NOISE_SD / float(units.y_scale)
    net = pb.networks.mlp(1, (10,), seed=42).double()
    prior = pb.priors.IIDPrior(dist.Normal(0.0, PRIOR_SD))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(noise), standardizer=units)
    mode = pb.MAP(num_steps=4000, lr=0.01).fit(model, data.x, data.y, seed=42)
    record: dict[str, object] = {
        "versions": {name: version(name) for name in ("torch", "laplace-torch")},
        "pyrobnn": pb.__version__,
    }
    for structure in ("full", "kron", "diag"):
        laplace = pb.Laplace(structure=structure, tune=None, compile=False)
        posterior = laplace.fit(model, data.x, data.y, init=mode, seed=0)
        ours = posterior.predict(GRID).epistemic_var[:, 0]
        theirs = variance_by_peer(mode, data, units, noise, structure)
        record[structure] = {
            "pyrobnn": float(ours.mean()),
            "laplace-torch": float(theirs.mean()),
            "largest difference": float((ours / theirs - 1.0).abs().max()),
        }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


def variance_by_peer(
    mode: pb.Posterior,
    data: pb.data.Dataset,
    units: pb.data.Standardizer,
    noise: float,
    structure: str,
) -> Tensor:
    """Variance of the function on the grid (point,) by laplace-torch, in squared units of y."""
    net = pb.networks.mlp(1, (10,), seed=42).double()
    net.load_state_dict({name: mode.draws[f"net.{name}"][0, 0] for name in net.state_dict()})
    laplace = Torch(
        net,
        "regression",
        subset_of_weights="all",
        hessian_structure=structure,
        sigma_noise=noise,
        prior_precision=PRIOR_SD**-2,
    )
    rows = torch.utils.data.TensorDataset(units.transform_x(data.x), units.transform_y(data.y))
    laplace.fit(torch.utils.data.DataLoader(rows, batch_size=len(rows)))
    _, variance = laplace(units.transform_x(GRID))
    return variance[:, 0, 0].detach() * units.y_scale.double() ** 2


if __name__ == "__main__":
    main()
