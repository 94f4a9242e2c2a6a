"""What a fit of a deep net costs and what its predictions are worth, method by method, each in a process of its own.

    python scripts/deep/run.py                      99,550 weights on scikit-learn's digits, scaled up to 28 x 28
    python scripts/deep/run.py --net resnet18           11.2 million weights on the same digits as 3 x 32 x 32
    python scripts/deep/run.py --methods MAP --num-train 200 --num-steps 20      a quick look

One record a method goes to records.jsonl. Every training has the same number of gradient steps in batches of 64, and an
ensemble five of them; SWAG has half as many besides, from where MAP ends. What begins with a trained net (posthoc,
Laplace on the loop's net, laplace-torch) begins with the loop's, and its seconds contain that training.
Images that are not of the training's kind: the test digits turned by a quarter, and patches of two photographs.
laplace-torch runs where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from deep.claim_tables import METHODS, table  # noqa: E402
from deep.images import Images, images  # noqa: E402
from deep.nets import NETS  # noqa: E402
from records import append_record, measured, peak_mb, read_records, versions  # noqa: E402

import pyrobnn as pb  # noqa: E402

RECORDS = HERE / "records.jsonl"
BATCH_SIZE = 64
#: of what is fitted on the net of the plain loop, the options beside tune="marginal_likelihood"
ON_THE_LOOP: dict[str, dict[str, Any]] = {
    "last-layer Laplace, loop's net": {"subset": "last_layer"},
    "Kronecker Laplace, loop's net": {"structure": "kron"},
}
#: of laplace-torch, the weights that vary
_OF_LAPLACE_TORCH = {
    "laplace-torch, last layer": "last_layer",
    "laplace-torch, Kronecker": "all",
}


def trained(net: nn.Module, data: Images, num_steps: int) -> nn.Module:
    """The net after a plain loop of Adam, in evaluation mode."""
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    order = torch.randperm(len(data.x))
    for step in range(num_steps):
        start = step * BATCH_SIZE % max(len(order) - BATCH_SIZE, 1)
        rows = order[start : start + BATCH_SIZE]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
        optimizer.step()
    return net.eval()


def _temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature under which held-out labels are likeliest, of a grid of 200 from 0.05 to 20."""
    grid = torch.logspace(-1.3, 1.3, 200)
    losses = [nn.functional.cross_entropy(logits / value, labels) for value in grid]
    return float(grid[torch.stack(losses).argmin()])


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a method gave: probabilities (N, class) of images, and the bytes of its file."""

    probs: Callable[[Tensor], Tensor]
    file_bytes: int


def _of_net(net: nn.Module, divisor: float) -> Fit:
    """A net whose logits are divided by a temperature."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.pt")
        torch.save(net.state_dict(), path)
        return Fit(lambda x: (net(x) / divisor).softmax(-1), path.stat().st_size)


def _of_posterior(posterior: pb.Posterior) -> Fit:
    """A posterior, with the file that it saves."""
    with tempfile.TemporaryDirectory() as folder:
        path = posterior.save(Path(folder, "posterior.nc"))
        return Fit(lambda x: posterior.predict(x).probs, path.stat().st_size)


def _of_laplace_torch(
    net: nn.Module,
    data: Images,
    weights: str,
) -> Fit:
    """laplace-torch's Kronecker Laplace, the prior by its evidence, with the file that it saves."""
    from trained_net.peer import laplace_torch

    fitted = laplace_torch(net, data.x, data.y, weights)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "laplace.bin")
        torch.save(fitted.state_dict(), path)
        return Fit(lambda x: fitted(x).detach(), path.stat().st_size)


def fit_of(
    method: str,
    net: nn.Module,
    data: Images,
    num_steps: int,
    seed: int,
    num_draws: int,
) -> Fit:
    """The fit of a method: of those that begin with a trained net, the training as well."""
    kept_back = len(data.x) // 5
    held_out = (data.x[:kept_back], data.y[:kept_back])
    inner = dataclasses.replace(
        data,
        x=data.x[kept_back:],
        y=data.y[kept_back:],
    )
    if method == "torch loop":
        return _of_net(trained(net, data, num_steps), 1.0)
    if method == "temperature scaling":
        ready = trained(net, inner, num_steps)
        return _of_net(ready, _temperature(ready(held_out[0]), held_out[1]))
    if method == "posthoc":
        ready = trained(net, inner, num_steps)
        return _of_posterior(
            pb.posthoc(
                ready,
                inner.x,
                inner.y,
                held_out=held_out,
                seed=seed,
            )
        )
    if method in _OF_LAPLACE_TORCH:
        ready = trained(net, data, num_steps)
        return _of_laplace_torch(ready, data, _OF_LAPLACE_TORCH[method])
    if method in ON_THE_LOOP:
        ready = trained(net, data, num_steps)
        laplace = pb.Laplace(tune="marginal_likelihood", **ON_THE_LOOP[method])
        model = pb.BNN(ready, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
        return _of_posterior(
            laplace.fit(
                model,
                data.x,
                data.y,
                init=ready,
                seed=seed,
                num_draws=num_draws,
            )
        )
    return _of_posterior(posterior_of(method, net, data, num_steps, seed, num_draws))


def posterior_of(
    method: str,
    net: nn.Module,
    data: Images,
    num_steps: int,
    seed: int,
    num_draws: int,
) -> pb.Posterior:
    """The posterior of a method that trains the net itself."""
    steps: dict[str, Any] = {
        "num_steps": num_steps,
        "batch_size": BATCH_SIZE,
        "lr": 1e-3,
    }
    search = pb.MAP(polish_steps=0, **steps)
    model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.Categorical())
    swag_steps = num_steps // 2
    # an iterate an epoch, or of trainings too short for that one a step
    is_short = swag_steps < 4 * len(data.x) // BATCH_SIZE
    methods: dict[str, Any] = {
        "MAP": search,
        "ensemble of 5": pb.DeepEnsemble(num_members=5, **steps),
        "MC dropout": pb.MCDropout(p=0.2, **steps),
        "SVI, mean field": pb.SVI(**steps),
        "SWAG": pb.SWAG(
            num_steps=swag_steps,
            batch_size=BATCH_SIZE,
            collect_every=1 if is_short else None,
        ),
        "last-layer Laplace": pb.Laplace(subset="last_layer", tune=None, map=search),
        "Kronecker Laplace": pb.Laplace(structure="kron", tune=None, map=search),
    }
    options: dict[str, Any] = {"seed": seed}
    if method not in ("MAP", "ensemble of 5"):
        options["num_draws"] = num_draws
    if method == "SWAG":
        options["init"] = search.fit(model, data.x, data.y, seed=seed)
    return methods[method].fit(
        model,
        data.x,
        data.y,
        **options,
    )


@torch.no_grad()
def scores(fit: Fit, data: Images) -> dict[str, Any]:
    """Held-out log density in nats, accuracy, calibration error, and AUROC of other images by entropy."""
    probs = _in_parts(fit.probs, data.test_x)
    entropy = torch.special.entr(probs).sum(-1)
    aurocs = {
        name: auroc(torch.special.entr(_in_parts(fit.probs, x)).sum(-1), entropy)
        for name, x in data.others.items()
    }
    positive = probs.clamp_min(torch.finfo(probs.dtype).tiny)
    return {
        "log_density": -pb.metrics.nll(positive / positive.sum(-1, keepdim=True), data.test_y),
        "accuracy": pb.metrics.accuracy(probs, data.test_y),
        "ece": pb.metrics.ece(probs, data.test_y),
        "auroc": aurocs,
        "file_mb": fit.file_bytes / 1e6,
    }


def auroc(others: Tensor, usual: Tensor) -> float:
    """The probability that an image of another kind has the larger score, ties counting half."""
    difference = others[:, None] - usual[None]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def _in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(rows) for rows in x.split(100)])


def run_one(arguments: argparse.Namespace) -> None:
    """Fit and score one method in this process, and append its record."""
    data = images(arguments.net, arguments.num_train, arguments.seed, arguments.num_test)
    torch.manual_seed(arguments.seed)
    net = NETS[arguments.net]()
    before = peak_mb()
    task = {
        "net": arguments.net,
        "weights": sum(param.numel() for param in net.parameters()),
        "method": arguments.methods[0],
        "num_train": len(data.x),
        "num_steps": arguments.num_steps,
        "num_draws": arguments.num_draws,
        "num_test": len(data.test_x),
        "seed": arguments.seed,
        "mb_before": before,
        "versions": versions(),
    }
    work = partial(
        fit_of,
        arguments.methods[0],
        net,
        data,
        arguments.num_steps,
        arguments.seed,
        arguments.num_draws,
    )
    fits: list[Fit] = []

    def fit() -> dict[str, Any]:
        fits.append(work())
        return {}

    record = measured(task, fit)
    record |= {"compile_seconds": round(os.times().children_user, 2)}
    append_record(arguments.results, record | scores(fits[0], data))


def main(words: Sequence[str] | None = None) -> None:
    """Run what the command line says, each method in a new process, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--net",
        choices=list(NETS),
        default="cnn",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=METHODS,
    )
    parser.add_argument(
        "--num-train",
        type=int,
        help="rows to fit; all where left out",
    )
    parser.add_argument(
        "--num-test",
        type=int,
        help="images of each kind to predict; all where left out",
    )
    parser.add_argument(
        "--num-draws",
        type=int,
        default=30,
        help="draws of every method that has as many as are asked for",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=200,
        help="gradient steps of a training",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
    )
    parser.add_argument(
        "--results",
        default=str(RECORDS),
        help="file to append the records to",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="in this process, of one method",
    )
    arguments = parser.parse_args(words)
    if arguments.here:
        run_one(arguments)
        return
    for method in arguments.methods:
        options = [f"--net={arguments.net}", f"--num-steps={arguments.num_steps}"]
        options += [f"--seed={arguments.seed}", f"--results={arguments.results}"]
        options.append(f"--num-draws={arguments.num_draws}")
        if arguments.num_train is not None:
            options.append(f"--num-train={arguments.num_train}")
        if arguments.num_test is not None:
            options.append(f"--num-test={arguments.num_test}")
        command = [sys.executable, __file__, "--here", *options, "--methods", method]
        finished = subprocess.run(command, check=False)
        if finished.returncode:
            print(f"{method}: no record, exit status {finished.returncode}", file=sys.stderr)
    print(table(read_records(arguments.results)))


if __name__ == "__main__":
    main()
