"""The likelihood of a study, from the plain values that the command line and a saved run have of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch

from pyrobnn import likelihoods
from pyrobnn.core.checks import check_choice, check_number
from pyrobnn.data import Dataset
from pyrobnn.likelihoods import Likelihood


@dataclass(frozen=True)
class Response:
    """A likelihood by name.

    Attributes: ``likelihood`` of the settings of a study, what they leave open being inferred or learned; ``options``,
    those of the study that it has a use for, among noise, exposure and event; ``task`` that it is of.
    """

    likelihood: Callable[[Mapping[str, Any]], Likelihood]
    options: tuple[str, ...] = ()
    task: str = "regression"


def _gaussian(given: Mapping[str, Any]) -> Likelihood:
    if given["noise"] == "heteroskedastic":
        return likelihoods.HeteroskedasticGaussian()
    return likelihoods.HomoskedasticGaussian(_scale(given))


def _scale(given: Mapping[str, Any]) -> Any:
    noise = given["noise"]
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


#: response → its likelihood
RESPONSES: dict[str, Response] = {
    "gaussian": Response(_gaussian, ("noise",)),
    "student_t": Response(lambda given: likelihoods.StudentT("inferred", _scale(given)), ("noise",)),
    "poisson": Response(lambda given: likelihoods.Poisson(given.get("exposure")), ("exposure",)),
    "negative_binomial": Response(
        lambda given: likelihoods.NegativeBinomial(dist.LogNormal(0.0, 1.5), exposure=given.get("exposure")),
        ("exposure",),
    ),
    "censored_normal": Response(lambda given: likelihoods.CensoredNormal(_scale(given)), ("noise", "event")),
    "weibull": Response(lambda given: likelihoods.Weibull(dist.LogNormal(0.0, 1.0)), ("event",)),
    "ordinal": Response(
        lambda given: likelihoods.Ordinal(given["num_outputs"], "inferred"), task="classification"
    ),
}


def likelihood_of(settings: Mapping[str, Any]) -> Likelihood:
    """The likelihood of a study's settings; one saved before there was a choice is Gaussian, or of plain classes.

    Raises:
        ValueError: naming the option.
    """
    response = settings.get("response", "gaussian")
    if settings["task"] == "classification" and response == "gaussian":
        return likelihoods.Categorical()
    return RESPONSES[response].likelihood(settings)


def check_response(response: str, task: str, options: Mapping[str, Any]) -> None:
    """Refuse a task or an option that the response has no use for.

    Args:
        response: one of `RESPONSES`.
        task: of the data.
        options: name → value of noise, exposure and event; None where it was not given.

    Raises:
        ValueError: naming them, and what to do.
    """
    check_choice("response", response, tuple(RESPONSES))
    needed = RESPONSES[response].task
    if task != needed and response != "gaussian":
        raise ValueError(f"'response' {response} is of {needed}, these data are of {task} (--task {needed})")
    for name, value in options.items():
        if value is not None and name not in RESPONSES[response].options:
            takers = ", ".join(each for each, known in RESPONSES.items() if name in known.options)
            raise ValueError(
                f"{name!r} is an option of {takers}: leave it out where 'response' is {response}"
            )


def check_rows(dataset: Dataset, likelihood: Likelihood, width: int, exposure: str | None) -> None:
    """Refuse rows that the response cannot take, whichever part they will be in.

    Raises:
        ValueError: naming the column.
    """
    if exposure is not None:
        values = dataset.x[:, column_of(dataset, exposure, "exposure")]
        if len(wrong := values[values <= 0]):
            raise ValueError(
                f"{dataset.name}: 'exposure' {exposure!r} must be positive, got {float(wrong[0]):g} "
                f"({len(wrong)} of {len(values)} rows): drop these rows"
            )
    names = dataset.class_names
    # classes are numbered as they sort, which is their order where they are numbers
    if likelihood.task == "ordinal" and len(names) > 2 and not _ascending(names):
        raise ValueError(
            f"{dataset.name}: nothing gives the order of the classes {', '.join(map(repr, names[:5]))}: write them as "
            "numbers, 1 for the first"
        )
    try:
        likelihood.target(dataset.y, width, torch.float64)
    except ValueError as error:
        named = str(error).replace("'y'", repr(dataset.target_name))
        raise ValueError(f"{dataset.name}: {named}") from error


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
    if "event" not in RESPONSES[response].options:
        return dataset
    if event is None:
        raise ValueError(
            f"'response' {response} needs 'event', the column of 1 (observed) and 0 (censored): --event COLUMN"
        )
    index = column_of(dataset, event, "event")
    observed = dataset.x[:, index]
    if wrong := observed[(observed != 0) & (observed != 1)].tolist():
        raise ValueError(f"'event' {event!r} must hold 1 (observed) or 0 (censored), got {wrong[0]:g}")
    if not bool(observed.any()):
        raise ValueError(f"'event' {event!r} is 0 in every row: all are censored, and nothing was observed")
    kept = [number for number in range(dataset.x.shape[1]) if number != index]
    if not kept:
        raise ValueError(f"{dataset.name} has no column to predict from beside {event!r}")
    columns = dataset.columns
    if columns is not None:
        rest = tuple(column for column in columns.columns if column.name != event)
        columns = dataclasses.replace(columns, columns=rest)
    return dataclasses.replace(
        dataset,
        x=dataset.x[:, kept],
        y=torch.cat([dataset.y, observed[:, None].to(dataset.y.dtype)], 1),
        feature_names=tuple(dataset.feature_names[number] for number in kept),
        columns=columns,
    )
