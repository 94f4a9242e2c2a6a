"""Study 5 on images: a net of 784-64-10 units, trained on, and SWAG by the study's own recipe.

Adam at 0.001 in batches of 128 for 20 epochs, then Adam at 0.01 in batches of 16 for 50 epochs with an iterate every
ten, five in all, and 500 draws. The study's net ends in a softmax and its loss applies another (``two softmaxes``), and
its test images went in as 0 to 255, where those it was trained on had 0 to 1. Each of these is switched here. One
thing is not the study's: it divides the low-rank part by K - 1 = 24 though it has five deviations; SWAG here by 4.

    make mnist DIR=FOLDER               FOLDER/MNIST/raw as torchvision leaves it; a record in records.jsonl, its table
    make mnist                          the same on a stand-in: scikit-learn's 1,797 digits, scaled up to 28 x 28
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from mnist.claim_tables import table  # noqa: E402
from records import append_record, measured, read_records, versions  # noqa: E402

import pyrobnn as pb  # noqa: E402

RECORDS = HERE / "records.jsonl"
SIDE = 28


class SoftmaxTwice(pb.likelihoods.Categorical):
    """The study's loss: a cross-entropy, which applies a softmax, of a net that ends in one."""

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return super().distribution(f.softmax(-1), params)


LIKELIHOODS = {"one softmax": pb.likelihoods.Categorical, "two softmaxes": SoftmaxTwice}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the study did, by its printed settings."""

    epochs: int = 20
    batch_size: int = 128
    lr: float = 1e-3
    swag_epochs: int = 50
    swag_batch_size: int = 16
    swag_lr: float = 1e-2
    collect_every: int = 10
    rank: int = 25
    num_draws: int = 500


def stand_in(seed: int) -> tuple[pb.data.Dataset, pb.data.Dataset]:
    """Two thirds and a third of scikit-learn's digits, scaled up to MNIST's size."""
    digits = pb.data.digits()
    x = torch.nn.functional.interpolate(
        digits.x,
        size=(SIDE, SIDE),
        mode="bilinear",
    )
    scaled = dataclasses.replace(
        digits,
        x=x,
        name="digits, scaled up",
    )
    return pb.data.train_test_split(
        scaled,
        1 / 3,
        seed=seed,
    )


def model_of(likelihood: pb.likelihoods.Likelihood, num_inputs: int, seed: int) -> pb.BNN:
    """The study's net. Its prior is as wide as none: the study has no weight decay."""
    net = torch.nn.Sequential(
        torch.nn.Flatten(),
        pb.networks.mlp(
            num_inputs,
            (64,),
            10,
            activation="relu",
            seed=seed,
        ),
    )
    return pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 100.0)), likelihood)


def probabilities(posterior: pb.Posterior, x: Tensor) -> Tensor:
    """Mean over the draws of what the study's net returns: one softmax of its last layer, (image, class)."""
    parts = []
    for rows in x.split(500):
        f = posterior.predict(rows).f.flatten(0, 1)
        parts.append(f.softmax(-1).mean(0))
    return torch.cat(parts)


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy in percent, negative log likelihood in nats (at most that of the smallest number), calibration error."""
    positive = probs.clamp_min(torch.finfo(probs.dtype).tiny)
    return {
        "accuracy": 100 * pb.metrics.accuracy(probs, y),
        "nll": pb.metrics.nll(positive / positive.sum(-1, keepdim=True), y),
        "ece": pb.metrics.ece(probs, y),
    }


def run(
    train: pb.data.Dataset,
    test: pb.data.Dataset,
    softmaxes: str,
    recipe: Recipe,
    seed: int,
) -> dict[str, Any]:
    """Train, go on by SWAG, and score both on test images as they are and as 0 to 255."""
    model = model_of(LIKELIHOODS[softmaxes](), train.x[0].numel(), seed)
    pretraining = pb.MLE(
        num_steps=recipe.epochs * math.ceil(train.num_data / recipe.batch_size),
        lr=recipe.lr,
        batch_size=recipe.batch_size,
        optimizer=pb.Optimizer(schedule=None),
    )
    start = pretraining.fit(
        model,
        train.x,
        train.y,
        seed=seed,
    )
    epoch = math.ceil(train.num_data / recipe.swag_batch_size)
    swag = pb.SWAG(
        optimizer="adam",
        lr=recipe.swag_lr,
        batch_size=recipe.swag_batch_size,
        num_steps=recipe.swag_epochs * epoch,
        collect_every=recipe.collect_every * epoch,
        burn_in=0.0,
        rank=recipe.rank,
    )
    posterior = swag.fit(
        model,
        train.x,
        train.y,
        init=start,
        num_draws=recipe.num_draws,
        seed=seed,
    )
    one_draw = dataclasses.replace(
        posterior, draws={name: value[:, :1] for name, value in posterior.draws.items()}
    )
    fits = {
        "start": start,
        "SWAG": posterior,
        "one draw of SWAG": one_draw,
    }
    scored = {}
    for name, fit in fits.items():
        scored[name] = scores(probabilities(fit, test.x), test.y)
        scored[f"{name}, test images as 0 to 255"] = scores(
            probabilities(fit, 255 * test.x), test.y
        )
    return {
        "iterates": posterior.meta["num_collected"],
        "rank": posterior.meta["rank"],
        "scores": scored,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run what the command line says, append its records and print the table of all of these data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        help="where MNIST/raw is; the stand-in where left out",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
    )
    parser.add_argument(
        "--softmaxes",
        nargs="+",
        choices=list(LIKELIHOODS),
        default=list(LIKELIHOODS),
    )
    parser.add_argument(
        "--results",
        default=str(RECORDS),
        help="file to append the records to",
    )
    for field in dataclasses.fields(Recipe):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=f"the study's: {field.default}",
        )
    arguments = parser.parse_args(words)
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**values)
    for seed in arguments.seeds:
        if arguments.folder is None:
            train, test = stand_in(seed)
        else:
            train, test = pb.data.mnist(arguments.folder)
        for softmaxes in arguments.softmaxes:
            task = {
                "data": train.name,
                "num_train": train.num_data,
                "num_test": test.num_data,
                "softmaxes": softmaxes,
                "seed": seed,
                "recipe": dataclasses.asdict(recipe),
                "versions": versions(),
            }
            work = partial(run, train, test, softmaxes, recipe, seed)
            append_record(arguments.results, measured(task, work))
    print(table(read_records(arguments.results)))


if __name__ == "__main__":
    main()
