"""Runs that the command line has saved: their posterior with its model, and tables of what it predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyrobnn.inference import Posterior
from pyrobnn.posterior.streaming import prediction_columns, rows_at_once
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

    classes = settings["classes"] if settings["task"] == "classification" else None
    return pd.DataFrame(prediction_columns(posterior.predict(x), LEVELS, classes))


def prediction_blocks(
    posterior: Posterior,
    x: Tensor,
    keep: np.ndarray,
    settings: Settings,
) -> Iterator[pd.DataFrame]:
    """What is predicted of every row of a file, block by block.

    Args:
        posterior: of the run.
        x: inputs (point, feature) of the rows that have all of them.
        keep: which rows these are, (row,); the predictions of others are gaps.
        settings: of the study; with its ranges there is the column ``outside``.
    """
    places = keep.nonzero()[0]
    num_draws = posterior.num_chains * posterior.num_draws
    size = rows_at_once(num_draws, settings["num_outputs"])
    start = 0
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        table = prediction_table(posterior, x[rows], settings)
        if settings.get("ranges"):
            table["outside"] = outside(x[rows], settings)
        # gaps belong to the block of the row before them, those at the beginning to the first
        end = len(keep) if first + size >= len(x) else places[first + size]
        yield table.set_index(places[rows]).reindex(range(start, end))
        start = end


def outside(x: Tensor, settings: Settings) -> list[str]:
    """Of each row of ``x`` (point, feature) the names of the features beyond those of the training data, joined."""
    low, high = (torch.tensor(bound, dtype=x.dtype) for bound in settings["ranges"])
    beyond = ((x < low) | (x > high)).cpu().numpy()
    names = np.array(settings["features"], dtype=object)
    return ["; ".join(names[row]) for row in beyond]
