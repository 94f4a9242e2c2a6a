"""What the command line fits: data split in two and a model, which a saved run can rebuild to predict with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from pyrobnn import likelihoods
from pyrobnn.core.checks import check_choice, check_count, check_number
from pyrobnn.data import Dataset, Standardizer, train_test_split
from pyrobnn.inference import Posterior
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd

    from pyrobnn.data.columns import Columns

#: most rows of a quick run
QUICK_ROWS = 500
LEVELS = (0.025, 0.5, 0.975)
UNITS = ("x_mean", "x_scale", "y_mean", "y_scale")

Settings = Mapping[str, Any]


def _gaussian(settings: Settings) -> Likelihood:
    if settings["noise"] == "heteroskedastic":
        return likelihoods.HeteroskedasticGaussian()
    return likelihoods.HomoskedasticGaussian(_scale(settings))


def _scale(settings: Settings) -> Any:
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
#: responses of studies that earlier versions saved
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
    units = Standardizer.fit(train)
    columns = dataset.x.shape[1]
    settings: dict[str, Any] = {
        "task": dataset.task,
        "shape": list(dataset.x.shape[1:]),
        "num_outputs": dataset.num_outputs,
        "features": list(dataset.feature_names) or [f"x{i}" for i in range(columns)],
        "columns": None if dataset.columns is None else dataset.columns.settings(),
        "target": dataset.target_name,
        "classes": list(dataset.class_names) or [str(i) for i in range(dataset.num_outputs)],
        "hidden": list(hidden),
        "activation": activation,
        "prior_scale": prior_scale,
        "noise": noise,
        "response": response,
        "seed": seed,
        "ranges": _ranges(train.x),
        "units": {name: _stored(getattr(units, name)) for name in UNITS},
    }
    likelihood = likelihood_of(settings)
    try:
        likelihood.target(dataset.y, likelihood.width(settings["num_outputs"]), torch.float64)
    except ValueError as error:
        named = str(error).replace("'y'", repr(dataset.target_name))
        raise ValueError(f"{dataset.name}: {named}") from error
    return Study(train, test, build(settings), settings)


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


def load_run(path: str | Path) -> tuple[Posterior, dict[str, Any]]:
    """A posterior that ``pyrobnn compare`` or ``fit`` saved, with its model rebuilt, and the settings of its study.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a file that ``pyrobnn compare`` wrote.
    """
    from pyrobnn.posterior import storage  # and xarray

    written = storage.read(path).attrs.get("study")
    if not isinstance(written, str):
        raise ValueError(
            f"{str(path)!r} does not say what model it belongs to: take a NAME.nc that 'pyrobnn fit' or 'compare' "
            "wrote, or in Python with Posterior.load(path, model).predict(x)"
        )
    settings = json.loads(written)
    return storage.load(path, build(settings)), settings


def columns_of(settings: Settings) -> Columns:
    """The columns of the table that a study was of; the features of a data set by name are numbers as they are."""
    from pyrobnn.data.columns import Column, Columns  # and pandas

    if settings.get("columns"):
        return Columns.of(settings["columns"])
    return Columns(tuple(Column(name, "number") for name in settings["features"]))


def prediction_table(posterior: Posterior, x: Tensor, settings: Settings) -> pd.DataFrame:
    """What is predicted at ``x`` (point, feature), one row each, in the units of the data.

    Regression: ``mean``, ``aleatoric_sd``, ``epistemic_sd``, ``sd`` and quantiles ``q…``, with ``_0``, ``_1``, … for
    several outputs. Classes: ``class``, the most probable one, ``p_…`` of each, and ``aleatoric_entropy`` and
    ``epistemic_entropy`` in nats.
    """
    import pandas as pd

    prediction = posterior.predict(x)
    if settings["task"] == "classification":
        return pd.DataFrame(_class_columns(prediction, settings["classes"]))
    quantiles = prediction.quantile(torch.tensor(LEVELS, dtype=torch.float64))
    columns = {
        "mean": prediction.mean,
        "aleatoric_sd": prediction.aleatoric_var.sqrt(),
        "epistemic_sd": prediction.epistemic_var.sqrt(),
        "sd": prediction.var.sqrt(),
    }
    columns |= {f"q{level:g}": values for level, values in zip(LEVELS, quantiles)}
    count = settings["num_outputs"]
    suffixes = [""] if count == 1 else [f"_{output}" for output in range(count)]
    table = {}
    for name, values in columns.items():
        for suffix, output in zip(suffixes, values.cpu().numpy().T):
            table[f"{name}{suffix}"] = output
    return pd.DataFrame(table)


def _class_columns(prediction: Prediction, names: Sequence[str]) -> dict[str, np.ndarray]:
    probs = prediction.probs.cpu().numpy()
    columns = {"class": np.array(names, dtype=object)[probs.argmax(1)]}
    columns |= {f"p_{name}": probs[:, index] for index, name in enumerate(names)}
    for kind in ("aleatoric_entropy", "epistemic_entropy"):
        columns[kind] = getattr(prediction, kind).cpu().numpy()
    return columns


def outside(x: Tensor, settings: Settings) -> list[str]:
    """Of each row of ``x`` (point, feature) the names of the features beyond those of the training data, joined."""
    low, high = (torch.tensor(bound, dtype=x.dtype) for bound in settings["ranges"])
    beyond = ((x < low) | (x > high)).cpu().numpy()
    names = np.array(settings["features"], dtype=object)
    return ["; ".join(names[row]) for row in beyond]


def describe(study: Study) -> str:
    """One line on the data and the model."""
    train = study.train
    test = study.test
    shape = "×".join(str(size) for size in train.x.shape[1:])
    return f"{train.name}: {train.num_data} train and {test.num_data} test points, {shape} inputs; {study.model!r}"
