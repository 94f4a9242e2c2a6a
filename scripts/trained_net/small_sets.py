"""Classification sets that need no download."""

from __future__ import annotations

import numpy as np
from sklearn import datasets


def sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Classification sets that come with scikit-learn, and made ones of several difficulties."""
    tables = {
        name: getattr(datasets, f"load_{name}")(return_X_y=True)
        for name in ("digits", "wine", "breast_cancer", "iris")
    }
    for k in range(8):
        shape = {
            "n_samples": (150, 400)[k % 2],
            "n_features": 10,
            "n_informative": 6,
            "n_classes": 2 + k % 3,
        }
        tables[f"made_{k}"] = datasets.make_classification(
            flip_y=0.1 * (k % 4),
            random_state=k,
            **shape,
        )
    for k in range(4):
        tables[f"moons_{k}"] = datasets.make_moons(
            100 + 100 * k,
            noise=0.2 + 0.1 * k,
            random_state=k,
        )
        tables[f"circles_{k}"] = datasets.make_circles(
            100 + 100 * k,
            noise=0.1 + 0.05 * k,
            factor=0.5,
            random_state=k,
        )
    return tables
