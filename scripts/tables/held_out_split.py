"""Tables from files, a fifth of each held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from pandas import DataFrame

#: table → its file, its target, and the columns that are not features
TABLES = {
    "airfoil": ("airfoil.csv", "target", ()),
    "bike": ("bike_sharing_hour.csv", "cnt", ("instant", "dteday", "casual", "registered")),
}


@dataclass(frozen=True)
class Split:
    """A table by its name: features and targets to fit to, and those held out."""

    name: str
    x: DataFrame
    x_test: DataFrame
    y: np.ndarray
    y_test: np.ndarray


def split(spec: str, dropped: Sequence[str] = (), standard: bool = False) -> Split:
    """``FILE:TARGET`` (else the last column) without the columns ``dropped``, y in standard units where asked for."""
    import pandas as pd
    from sklearn.model_selection import train_test_split

    file, _, target = spec.partition(":")
    text: dict[str, Any] = {} if file.endswith("csv") else {"sep": r"\s+", "header": None}
    frame = pd.read_csv(file, **text).dropna().rename(columns=str).filter(regex="^(?!Unnamed)")
    name = Path(file).stem if file.endswith("csv") else Path(file).parent.name
    y = frame.pop(target or frame.columns[-1]).to_numpy(float)
    x, x_test, y, y_test = train_test_split(
        frame.drop(columns=[*dropped]),
        y,
        test_size=0.2,
        random_state=0,
    )
    mean, sd = (y.mean(), y.std()) if standard else (0.0, 1.0)
    return Split(name, x, x_test, (y - mean) / sd, (y_test - mean) / sd)
