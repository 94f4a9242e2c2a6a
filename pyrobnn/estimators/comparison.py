"""Two fits compared by what each says of rows that it has not seen."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import numpy as np


def log_density(error: np.ndarray, var: np.ndarray | np.floating | float) -> np.ndarray:
    """Of normal errors (N,)."""
    return -0.5 * (error**2 / var + np.log(2 * np.pi * var))


def gain(ours: np.ndarray, linear: np.ndarray) -> tuple[bool, str]:
    """Whether log densities (N,) gain on a linear model's, in words: log 20 in sum and two standard errors."""
    mean = float((ours - linear).mean())
    error = float((ours - linear).std()) / math.sqrt(len(ours))
    words = f"a held-out row is {mean:+.2f} ± {error:.2f} nats likelier than under a linear model"
    return mean > 2 * error and mean * len(ours) > math.log(20), words


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of fits that are tried: those of the one that is kept follow."""
    with warnings.catch_warnings(action="ignore"):
        yield
