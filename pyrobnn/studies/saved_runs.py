"""Runs that the command line has saved: their posterior with its model, and tables of what it predicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.inference import Posterior
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.studies.study import Settings, build

if TYPE_CHECKING:
    import pandas as pd

    from pyrobnn.data.columns import Columns

LEVELS = (0.025, 0.5, 0.975)


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
        for suffix, column in zip(suffixes, values.cpu().numpy().T):
            table[f"{name}{suffix}"] = column
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
