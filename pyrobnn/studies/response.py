"""The likelihood of a study, from the plain values that the command line and a saved run have of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch

from pyrobnn import likelihoods
from pyrobnn.core.checks import check_choice, check_number
from pyrobnn.data import Dataset
from pyrobnn.likelihoods import Likelihood

COUNTS = ("poisson", "negative_binomial")
CENSORED = ("censored_normal", "weibull")
#: responses whose scale the option ``noise`` says
_SCALED = ("gaussian", "student_t", "censored_normal")

#: response → its likelihood, of the settings of a study; what they leave open is inferred or learned
RESPONSES: dict[str, Callable[[Mapping[str, Any]], Likelihood]] = {
    "gaussian": lambda given: (
        likelihoods.HeteroskedasticGaussian()
        if given["noise"] == "heteroskedastic"
        else likelihoods.HomoskedasticGaussian(_scale(given))
    ),
    "student_t": lambda given: likelihoods.StudentT("inferred", _scale(given)),
    "mixture_density": lambda given: likelihoods.MixtureDensity(),
    "poisson": lambda given: likelihoods.Poisson(given.get("exposure")),
    "negative_binomial": lambda given: likelihoods.NegativeBinomial(
        dist.LogNormal(0.0, 1.5), exposure=given.get("exposure")
    ),
    "censored_normal": lambda given: likelihoods.CensoredNormal(_scale(given)),
    "weibull": lambda given: likelihoods.Weibull(dist.LogNormal(0.0, 1.0)),
    "beta": lambda given: likelihoods.Beta(dist.LogNormal(2.0, 1.5), low=given["bounds"][0], high=given["bounds"][1]),
    "ordinal": lambda given: likelihoods.Ordinal(given["num_outputs"], "inferred"),
}  # fmt: skip


def likelihood_of(settings: Mapping[str, Any]) -> Likelihood:
    """The likelihood of a study's settings; one saved before there was a choice is Gaussian, or of plain classes.

    Raises:
        ValueError: naming the option.
    """
    response = settings.get("response", "gaussian")
    if settings["task"] == "classification" and response == "gaussian":
        return likelihoods.Categorical()
    return RESPONSES[response](settings)


def check_response(
    response: str, task: str, noise: str, *, exposure: str | None, event: str | None, given_bounds: bool
) -> None:
    """Refuse options that do not go together.

    Raises:
        ValueError: naming them, and what to do.
    """
    check_choice("response", response, tuple(RESPONSES))
    if response == "ordinal" and task != "classification":
        raise ValueError(
            "'response' ordinal is of classes in their order: say task='classification' (--task)"
        )
    if response not in ("gaussian", "ordinal") and task == "classification":
        raise ValueError(f"'response' {response} is of numbers, the target holds classes (--task regression)")
    if response not in _SCALED and noise != "inferred":
        raise ValueError(f"'noise' is of {', '.join(_SCALED)}: leave it out where 'response' is {response}")
    if response in _SCALED[1:] and noise == "heteroskedastic":
        raise ValueError(f"heteroskedastic noise is Gaussian only: leave it out of 'response' {response}")
    if exposure is not None and response not in COUNTS:
        raise ValueError(f"'exposure' is of counts ({', '.join(COUNTS)}), and 'response' is {response}")
    if event is not None and response not in CENSORED:
        raise ValueError(f"'event' is of censored targets ({', '.join(CENSORED)}), 'response' is {response}")
    if given_bounds and response != "beta":
        raise ValueError(f"'bounds' are of the response beta, and 'response' is {response}")


def check_rows(dataset: Dataset, likelihood: Likelihood, width: int, exposure: str | None) -> None:
    """Refuse rows that the response cannot take, whichever part they will be in.

    Raises:
        ValueError: naming the column.
    """
    if exposure is not None:
        values = dataset.x[:, column_of(dataset, exposure, "exposure")]
        if wrong := (values <= 0).nonzero()[:, 0].tolist():
            raise ValueError(
                f"{dataset.name}: 'exposure' {exposure!r} must be positive, got {float(values[wrong[0]]):g} "
                f"({len(wrong)} of {len(values)} rows): drop these rows"
            )
    names = dataset.class_names
    if likelihood.task == "ordinal" and len(names) > 2 and not _ascending(names):
        # classes are numbered as they sort, which is their order where they are numbers
        raise ValueError(
            f"{dataset.name}: nothing tells the order of the classes {', '.join(map(repr, names[:5]))}: write them as "
            "numbers, 1 for the first"
        )
    try:
        likelihood.target(dataset.y, width, torch.float64)
    except ValueError as error:
        told = str(error).replace("'y'", repr(dataset.target_name))
        raise ValueError(f"{dataset.name}: {told}") from error


def _ascending(names: Sequence[str]) -> bool:
    try:
        values = [float(name) for name in names]
    except ValueError:
        return False
    return values == sorted(set(values))


def column_of(dataset: Dataset, name: str, option: str) -> int:
    """The number of the input that a column of the table is.

    Raises:
        ValueError: there is none, or it became several.
    """
    if words := [each for each in dataset.feature_names if each.startswith(f"{name}=")]:
        meant = ", 1 (observed) and 0 (censored)" if option == "event" else ""
        raise ValueError(f"{option!r} {name!r} holds words ({', '.join(words[:3])}): write numbers{meant}")
    if name not in dataset.feature_names:
        raise ValueError(
            f"{option!r} must be a column of numbers among the features, got {name!r}: "
            f"{dataset.name} has {', '.join(dataset.feature_names)}"
        )
    return dataset.feature_names.index(name)


def with_events(dataset: Dataset, event: str | None, response: str) -> Dataset:
    """Censored targets (N, 2): the value, and whether it was observed, from a column that is then no input.

    Raises:
        ValueError: no such column, or one that is not 1 (observed) and 0 (censored).
    """
    if response not in CENSORED:
        return dataset
    if event is None:
        raise ValueError(
            f"'response' {response} needs 'event', the column that says what was observed (1) and what censored (0): "
            "--event COLUMN"
        )
    index = column_of(dataset, event, "event")
    observed = dataset.x[:, index]
    wrong = observed[(observed != 0) & (observed != 1)]
    if len(wrong):
        raise ValueError(f"'event' {event!r} must hold 1 (observed) or 0 (censored), got {float(wrong[0]):g}")
    if not bool(observed.any()):
        raise ValueError(f"'event' {event!r} is 0 in every row: all are censored, and nothing was observed")
    kept = [number for number in range(dataset.x.shape[1]) if number != index]
    if not kept:
        raise ValueError(f"{dataset.name} has no column to predict from beside {event!r}")
    columns = dataset.columns
    if columns is not None:
        from pyrobnn.data.columns import Columns  # pandas and scikit-learn, which help does not need

        rest = tuple(column for column in columns.columns if column.name != event)
        columns = Columns(rest, columns.missing)
    return dataclasses.replace(
        dataset,
        x=dataset.x[:, kept],
        y=torch.cat([dataset.y, observed[:, None].to(dataset.y.dtype)], 1),
        feature_names=tuple(dataset.feature_names[number] for number in kept),
        columns=columns,
    )


def _scale(settings: Mapping[str, Any]) -> Any:
    noise = settings["noise"]
    if noise == "inferred":
        return dist.HalfNormal(1.0)
    if noise == "learned":
        return "learned"
    try:
        scale = float(noise)
    except ValueError:
        scale = math.nan
    if math.isnan(scale):
        raise ValueError(
            f"'noise' must be 'inferred', 'learned', 'heteroskedastic' or a number, got {noise!r}"
        )
    return check_number("noise", scale, above=0)
