"""Real data that needs no download: scikit-learn's bundled sets."""

from __future__ import annotations

import torch

from pyrobnn.data.dataset import Dataset

__all__ = ["breast_cancer", "diabetes", "digits"]


def diabetes() -> Dataset:
    """Disease progression after one year from ten measurements: regression, N = 442, in original units.

    Least Angle Regression (Efron et al., 2004), https://arxiv.org/abs/math/0406456

    Example:
        >>> diabetes().x.shape, diabetes().y.shape
        (torch.Size([442, 10]), torch.Size([442, 1]))
    """
    from sklearn import datasets

    bunch = datasets.load_diabetes(scaled=False)
    return Dataset(
        x=torch.tensor(bunch.data, dtype=torch.float32),
        y=torch.tensor(bunch.target, dtype=torch.float32).unsqueeze(-1),
        name="diabetes",
        task="regression",
        feature_names=tuple(bunch.feature_names),
        target_name="progression",
    )


def digits() -> Dataset:
    """Handwritten digits as images (N, 1, 8, 8) with pixels in [0, 1]: ten classes, N = 1797.

    Example:
        >>> digits().x.shape, float(digits().x.max())
        (torch.Size([1797, 1, 8, 8]), 1.0)
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    return Dataset(
        x=torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1),
        y=torch.tensor(bunch.target, dtype=torch.int64),
        name="digits",
        task="classification",
        target_name="digit",
        class_names=tuple(str(name) for name in bunch.target_names),
    )


def breast_cancer() -> Dataset:
    """Malignant (0) or benign (1) from thirty measurements of cell nuclei: two classes, N = 569.

    Example:
        >>> breast_cancer().class_names
        ('malignant', 'benign')
    """
    from sklearn import datasets

    bunch = datasets.load_breast_cancer()
    return Dataset(
        x=torch.tensor(bunch.data, dtype=torch.float32),
        y=torch.tensor(bunch.target, dtype=torch.int64),
        name="breast_cancer",
        task="classification",
        feature_names=tuple(bunch.feature_names),
        target_name="diagnosis",
        class_names=tuple(str(name) for name in bunch.target_names),
    )
