"""What every loader returns, how it is split, and how it is standardised and brought back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor, check_choice, check_finite

if TYPE_CHECKING:
    from pyrobnn.data.columns import Columns

__all__ = ["Dataset", "Standardizer", "train_test_split"]

Task = Literal["regression", "classification"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets with their names and, for synthetic data, the truth behind them.

    Args:
        x: inputs, float (N, feature) or images (N, channel, height, width); a tensor, or what can be made one.
        y: regression targets, float (N, output), or class labels, int64 (N,) in 0 … num_classes − 1.
        name: of the data set.
        task: ``"regression"`` or ``"classification"``.
        feature_names: one per column of x (empty for images).
        target_name: name of the target.
        class_names: one per class, in the order of the labels (empty for regression).
        true_f: the true function at ``x``, (N, output), where known.
        true_noise: the true standard deviation of the noise at ``x``, (N, output), where known.
        true_function: the true function of any inputs (M, feature) → (M, output), where known.
        target_unit: unit of the target, where known.
        columns: how the columns of a table became x, where it was one.

    Raises:
        ValueError: empty data, NaN or infinity, shapes that disagree, labels out of range.
        TypeError: y of the wrong dtype for the task.
    """

    x: Tensor
    y: Tensor
    name: str
    task: Task
    feature_names: tuple[str, ...] = ()
    target_name: str = "y"
    class_names: tuple[str, ...] = ()
    true_f: Tensor | None = None
    true_noise: Tensor | None = None
    true_function: Callable[[Tensor], Tensor] | None = None
    target_unit: str = ""
    columns: Columns | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.task, get_args(Task))
        for name in ("x", "y"):  # NumPy and pandas are taken too
            object.__setattr__(self, name, as_tensor(name, getattr(self, name)))
            check_finite(name, getattr(self, name))
        x = self.x
        if x.ndim < 2 or not len(x):
            raise ValueError(
                f"'x' must be (N, feature), N > 0, got {tuple(x.shape)}: use x.unsqueeze(-1)"
            )
        if len(x) != len(self.y):
            raise ValueError(
                f"x has {len(x)} rows and y has {len(self.y)}: they must be the same points"
            )
        if self.task == "regression":
            self._check_target(self.y.is_floating_point(), "float", 2, "(N, output)", "unsqueeze")
        else:
            self._check_target(self.y.dtype == torch.int64, "long", 1, "(N,)", "squeeze")
            self._check_labels()

    def _check_target(
        self,
        dtype_fits: bool,
        cast: str,
        num_axes: int,
        shape: str,
        remedy: str,
    ) -> None:
        y = self.y
        if not dtype_fits:
            raise TypeError(f"'y' of a {self.task} must not be {y.dtype}: use y.{cast}()")
        if y.ndim != num_axes:
            raise ValueError(f"'y' must be {shape}, got shape {tuple(y.shape)}: use y.{remedy}(-1)")

    def _check_labels(self) -> None:
        least = self.y.min()
        largest = self.y.max()
        num_names = len(self.class_names)
        if least < 0 or (num_names and largest >= num_names):
            expected = f"0 … {num_names - 1}" if num_names else "0 and above"
            raise ValueError(f"labels span {least} … {largest}, expected {expected}")

    @property
    def num_data(self) -> int:
        """Number of points N."""
        return len(self.x)

    @property
    def num_outputs(self) -> int:
        """Number of outputs (regression) or of classes (classification)."""
        if self.task == "regression":
            return self.y.shape[1]
        return len(self.class_names) or int(self.y.max()) + 1

    def subset(self, index: Tensor | np.ndarray | list[int]) -> Dataset:
        """The points at ``index`` (row numbers), with the truth that belongs to them."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        true_f = None if self.true_f is None else self.true_f[rows]
        true_noise = None if self.true_noise is None else self.true_noise[rows]
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            true_f=true_f,
            true_noise=true_noise,
        )

    def widest_gap(self) -> tuple[float, float]:
        """The two neighbouring inputs of a 1-D data set with the widest gap between them.

        Raises:
            ValueError: the inputs are not one-dimensional, or fewer than two.
        """
        if self.x.shape[1:] != (1,) or len(self.x) < 2:
            raise ValueError(
                f"a gap needs two or more inputs (N, 1), got shape {tuple(self.x.shape)}"
            )
        ordered = self.x[:, 0].sort().values
        index = int(ordered.diff().argmax())
        return float(ordered[index]), float(ordered[index + 1])


def train_test_split(
    dataset: Dataset, test_fraction: float = 0.2, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """A random split into train and test part; classes keep their shares where each has points enough.

    Args:
        dataset: what is split.
        test_fraction: share of the points that are held out, in (0, 1).
        seed: of the permutation; global generators are untouched.

    Raises:
        ValueError: a fraction outside (0, 1), or one that leaves a part empty.

    Example:
        >>> from pyrobnn.data import sinusoid
        >>> train, test = train_test_split(sinusoid(), test_fraction=0.2, seed=0)
        >>> train.num_data, test.num_data
        (120, 30)
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"'test_fraction' must lie in (0, 1), got {test_fraction}")
    num_test = round(test_fraction * dataset.num_data)
    if num_test in (0, dataset.num_data):
        raise ValueError(
            f"test_fraction={test_fraction} of {dataset.num_data} points leaves a part empty: use another"
        )
    stratify = None
    if dataset.task == "classification":
        counts = torch.bincount(dataset.y)
        present = int((counts > 0).sum())
        if counts[counts > 0].min() >= 2 and present <= min(num_test, dataset.num_data - num_test):
            stratify = dataset.y.numpy()
    from sklearn import model_selection

    train, test = model_selection.train_test_split(
        np.arange(dataset.num_data),
        test_size=num_test,
        random_state=seed,
        stratify=stratify,
    )
    return dataset.subset(train), dataset.subset(test)


@dataclass(frozen=True, eq=False)
class Standardizer:
    r"""The affine map to mean 0 and standard deviation 1, and its inverse.

    .. math:: x' = (x - m_x) / s_x, \quad y' = (y - m_y) / s_y

    Means and standard deviations (ddof 0) are per feature and per output, and one for each channel of images, whose
    pixels so stay comparable; a constant column or channel gets scale 1. Class labels are left as they are (m_y = 0,
    s_y = 1). They keep the floating type of the data: standardise float64 data first and cast to float32 after, as
    ``fit`` and ``predict`` of a :class:`pyrobnn.BNN` do.

    Args:
        x_mean, x_scale: (feature,), or (channel, 1, …) of images.
        y_mean, y_scale: (output,), and (1,) for classes.

    Raises:
        ValueError: values so large or so small that their squares overflow or vanish.

    Example:
        >>> from pyrobnn.data import diabetes
        >>> standardizer = Standardizer.fit(diabetes())
        >>> y = standardizer.transform(diabetes()).y
        >>> round(float(standardizer.inverse_mean(y)[0]), 3)
        151.0
    """

    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    def __post_init__(self) -> None:
        # variances are computed on the way, and of targets they are predicted
        for name, variance in (("x", self.x_scale), ("y", self.y_scale.square())):
            bad = ~(torch.isfinite(variance) & (variance > 0))
            if bool(bad.any()):
                raise ValueError(
                    f"{name!r} has values so large or small that their squares overflow or vanish in {variance.dtype} "
                    f"(column {int(bad.reshape(-1).int().argmax()) + 1}): give them in other units"
                )

    @classmethod
    def fit(cls, train: Dataset) -> Standardizer:
        """The standardizer of a data set: fit it on the train part only.

        Raises:
            ValueError: x of three dimensions, of which nothing says which holds features.
        """
        if train.x.ndim == 3:
            raise ValueError(
                f"'x' has shape {tuple(train.x.shape)} and does not say which dimension holds features: give "
                "Standardizer your own means and scales, or pass x.unsqueeze(1) for images without a channel"
            )
        x_mean, x_scale = _moments(train.x)
        if train.task == "classification":
            return cls(x_mean, x_scale, torch.zeros(1), torch.ones(1))
        return cls(x_mean, x_scale, *_moments(train.y))

    def to(self, device: torch.device | str) -> Standardizer:
        """The same map with its numbers on ``device``."""
        return Standardizer(*(value.to(device) for value in dataclasses.astuple(self)))

    def transform_x(self, x: Tensor) -> Tensor:
        """Inputs (N, ``*feature``) in standard units."""
        return (x - self.x_mean) / self.x_scale

    def transform_y(self, y: Tensor) -> Tensor:
        """Targets (…, output) in standard units; integer labels come back unchanged."""
        return (y - self.y_mean) / self.y_scale if y.is_floating_point() else y

    def transform(self, dataset: Dataset) -> Dataset:
        """The data set in standard units, without the truth behind it."""
        x = self.transform_x(dataset.x)
        y = self.transform_y(dataset.y)
        return dataclasses.replace(
            dataset,
            x=x,
            y=y,
            true_f=None,
            true_noise=None,
            true_function=None,
        )

    def inverse_mean(self, y: Tensor) -> Tensor:
        """Targets, means, draws or quantiles (…, output) back in original units; labels unchanged."""
        return y * self.y_scale + self.y_mean if y.is_floating_point() else y


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sd over all dimensions but the second, to be broadcast against one point."""
    wide = values.double()  # a float32 sum over many rows loses digits of the mean
    over = [dim for dim in range(values.dim()) if dim != 1]
    mean = wide.mean(over, keepdim=True)
    # the mean of squares of what is left: a running update rounds differently where the data have an offset
    scale = (wide - mean).square().mean(over, keepdim=True).sqrt()
    # compared by range: the sd of a constant column need not round to exactly zero
    scale = torch.where(wide.amax(over, keepdim=True) == wide.amin(over, keepdim=True), 1.0, scale)
    dtype = values.dtype if values.is_floating_point() else torch.float64
    return mean[0].to(dtype), scale[0].to(dtype)
