"""What the command line fits: data split in two and a model, which a saved run can rebuild to predict with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyrobnn import likelihoods
from pyrobnn.core.checks import check_choice, check_count, check_number
from pyrobnn.data import Dataset, Standardizer, train_test_split
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.model.likelihoods.base import Likelihood

#: most rows of a quick run
QUICK_ROWS = 500
#: the fields of a Standardizer
UNITS = ("x_mean", "x_scale", "y_mean", "y_scale")

Settings = Mapping[str, Any]


def _gaussian(settings: Settings) -> Likelihood:
    if settings["noise"] == "heteroskedastic":
        return likelihoods.HeteroskedasticGaussian()
    return likelihoods.HomoskedasticGaussian(_scale(settings))


def _scale(settings: Settings) -> float | str | dist.HalfNormal:
    noise = settings["noise"]
    if noise in ("inferred", "learned"):
        return dist.HalfNormal(1.0) if noise == "inferred" else noise
    try:
        scale = float(noise)
    except ValueError as error:
        raise ValueError(
            "'noise' must be 'inferred', 'learned' or a number, or 'heteroskedastic' where 'response' is gaussian, "
            f"got {noise!r}"
        ) from error
    return check_number("noise", scale, above=0)


#: response → the likelihood of a study's settings; what they leave open is inferred
RESPONSES: dict[str, Callable[[Settings], Likelihood]] = {
    "gaussian": _gaussian,
    "student_t": lambda settings: likelihoods.StudentT("inferred", _scale(settings)),
    "poisson": lambda settings: likelihoods.Poisson(settings.get("exposure")),
    "negative_binomial": lambda settings: likelihoods.NegativeBinomial(
        dist.LogNormal(0.0, 1.5), exposure=settings.get("exposure")
    ),
    "mixture_density": lambda settings: likelihoods.MixtureDensity(),
    "ordinal": lambda settings: likelihoods.Ordinal(settings["num_outputs"], "inferred"),
}
#: every response that a saved study may name: those of today and of earlier versions
_SAVED: dict[str, Callable[[Settings], Likelihood]] = RESPONSES | {
    "censored_normal": lambda settings: likelihoods.CensoredNormal(_scale(settings)),
    "weibull": lambda settings: likelihoods.Weibull(dist.LogNormal(0.0, 1.0)),
    "beta": lambda settings: likelihoods.Beta(
        dist.LogNormal(2.0, 1.5),
        low=settings["bounds"][0],
        high=settings["bounds"][1],
    ),
}


def likelihood_of(settings: Settings) -> Likelihood:
    """The likelihood of a study's settings; one saved before there was a choice is Gaussian, or of plain classes.

    Raises:
        ValueError: naming the option.
    """
    response = settings.get("response", "gaussian")
    if settings["task"] == "classification" and response == "gaussian":
        return likelihoods.Categorical()
    return _SAVED[response](settings)


@dataclass(frozen=True, eq=False)
class Study:
    """A data set split in two and the model that every method fits.

    Attributes: ``train`` and ``test`` in original units; ``model``, whose standardizer was fitted on ``train``;
    ``settings``, plain values from which :func:`build` makes that model again.
    """

    train: Dataset
    test: Dataset
    model: BNN
    settings: dict[str, Any]


def make_study(
    dataset: Dataset,
    *,
    hidden: Sequence[int] = (50,),
    activation: str = "tanh",
    prior_scale: float = 1.0,
    noise: str = "inferred",
    response: str = "gaussian",
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Study:
    """Split the data and build the model.

    Args:
        dataset: regression or classification.
        hidden, activation: of the network; images get a small convolutional network instead.
        prior_scale: s of the fan-in scaled normal prior on the weights.
        noise: ``"inferred"`` (a HalfNormal(1) prior on the scale in standard units), ``"learned"``,
            ``"heteroskedastic"``, or a number in standard units; ignored for classes.
        response: the likelihood of a number, one of `RESPONSES`, or ``"ordinal"`` of classes in their order; plain
            classes have none.
        test_fraction: share of the points held out.
        seed: of the split and of the net's initial weights.

    Raises:
        ValueError: naming the option.
    """
    check_count("seed", seed, minimum=0)
    check_choice("response", response, tuple(RESPONSES))
    needed = "classification" if response == "ordinal" else "regression"
    if response != "gaussian" and dataset.task != needed:
        raise ValueError(
            f"'response' {response} is of {needed}, these data are of {dataset.task} (--task {needed})"
        )
    train, test = train_test_split(dataset, test_fraction, seed)
    settings = _data_settings(dataset, train) | {
        "hidden": list(hidden),
        "activation": activation,
        "prior_scale": prior_scale,
        "noise": noise,
        "response": response,
        "seed": seed,
    }
    likelihood = likelihood_of(settings)
    try:
        likelihood.target(dataset.y, likelihood.width(settings["num_outputs"]), torch.float64)
    except ValueError as error:
        named = str(error).replace("'y'", repr(dataset.target_name))
        raise ValueError(f"{dataset.name}: {named}") from error
    return Study(train, test, build(settings), settings)


def _data_settings(dataset: Dataset, train: Dataset) -> dict[str, Any]:
    """What the model and its predictions need to know of the data: shapes, names, ranges, units."""
    units = Standardizer.fit(train)
    features = dataset.feature_names or [f"x{i}" for i in range(dataset.x.shape[1])]
    classes = dataset.class_names or [str(i) for i in range(dataset.num_outputs)]
    return {
        "task": dataset.task,
        "shape": list(dataset.x.shape[1:]),
        "num_outputs": dataset.num_outputs,
        "features": list(features),
        "columns": None if dataset.columns is None else dataset.columns.settings(),
        "target": dataset.target_name,
        "classes": list(classes),
        "ranges": _ranges(train.x),
        "units": {name: _stored(getattr(units, name)) for name in UNITS},
    }


def _ranges(x: Tensor) -> list[list[float]] | None:
    """Least and largest value of each feature; None of images."""
    return [x.amin(0).tolist(), x.amax(0).tolist()] if x.ndim == 2 else None


def _stored(values: Tensor) -> dict[str, Any]:
    """As plain values, from which :func:`build` makes the tensor again."""
    return {"dtype": str(values.dtype).removeprefix("torch."), "values": values.tolist()}


def some_rows(dataset: Dataset, num_rows: int, seed: int) -> Dataset:
    """The data set, or so many of its rows at random, as its name then says; classes keep their shares."""
    if dataset.num_data <= num_rows:
        return dataset
    _, sample = train_test_split(dataset, num_rows / dataset.num_data, seed)
    name = f"{dataset.name} ({sample.num_data:,} of its {dataset.num_data:,} rows, drawn at random for --quick)"
    return dataclasses.replace(sample, name=name)


def build(settings: Settings) -> BNN:
    """The model of a study's settings."""
    shape = settings["shape"]
    seed = settings["seed"]
    likelihood = likelihood_of(settings)
    width = likelihood.width(settings["num_outputs"])
    if len(shape) > 1:
        net = networks.small_cnn(
            width,
            shape[0],
            shape[-1],
            seed=seed,
        )
    else:
        inputs = shape[0] - (likelihood.targets.exposure is not None)
        net = networks.mlp(
            inputs,
            tuple(settings["hidden"]),
            width,
            activation=settings["activation"],
            seed=seed,
        )
    stored = [settings["units"][name] for name in UNITS]
    units = [torch.tensor(unit["values"], dtype=getattr(torch, unit["dtype"])) for unit in stored]
    return BNN(
        net,
        priors.FanInNormal(settings["prior_scale"]),
        likelihood,
        standardizer=Standardizer(*units),
    )


def describe(study: Study) -> str:
    """One line on the data and the model."""
    train = study.train
    test = study.test
    shape = "×".join(str(size) for size in train.x.shape[1:])
    return f"{train.name}: {train.num_data} train and {test.num_data} test points, {shape} inputs; {study.model!r}"
