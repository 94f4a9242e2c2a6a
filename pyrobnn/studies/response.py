"""What the command line's ``--response`` and ``--noise`` make of a target: its likelihood."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist

from pyrobnn import likelihoods
from pyrobnn.core.checks import check_number
from pyrobnn.likelihoods import Likelihood

Settings = Mapping[str, Any]


def _gaussian(given: Settings) -> Likelihood:
    if given["noise"] == "heteroskedastic":
        return likelihoods.HeteroskedasticGaussian()
    return likelihoods.HomoskedasticGaussian(_scale(given))


def _scale(given: Settings) -> Any:
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


#: response → the likelihood of a study's settings; what they leave open is inferred
RESPONSES: dict[str, Callable[[Settings], Likelihood]] = {
    "gaussian": _gaussian,
    "student_t": lambda given: likelihoods.StudentT("inferred", _scale(given)),
    "poisson": lambda given: likelihoods.Poisson(given.get("exposure")),
    "negative_binomial": lambda given: likelihoods.NegativeBinomial(
        dist.LogNormal(0.0, 1.5), exposure=given.get("exposure")
    ),
    "mixture_density": lambda given: likelihoods.MixtureDensity(),
    "ordinal": lambda given: likelihoods.Ordinal(given["num_outputs"], "inferred"),
}
#: responses of studies that earlier versions saved
_SAVED: dict[str, Callable[[Settings], Likelihood]] = RESPONSES | {
    "censored_normal": lambda given: likelihoods.CensoredNormal(_scale(given)),
    "weibull": lambda given: likelihoods.Weibull(dist.LogNormal(0.0, 1.0)),
    "beta": lambda given: likelihoods.Beta(
        dist.LogNormal(2.0, 1.5), low=given["bounds"][0], high=given["bounds"][1]
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
