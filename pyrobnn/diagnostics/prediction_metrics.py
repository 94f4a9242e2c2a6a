"""Scores of point forecasts, densities, draws, intervals and probabilities; imported as ``pyrobnn.metrics``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def rmse(mean: Tensor, y: Tensor, *, scale: Tensor | None = None) -> float:
    r"""Root mean squared error of the predictive mean, in the units of y.

    .. math:: \frac1O \sum_o \frac1{s_o} \sqrt{\frac1N \sum_n (y_{no} - m_{no})^2}

    Args:
        mean: predictive mean (point, output) or (point,).
        y: observed, of the same shape.
        scale: s, units of the outputs (output,), such as ``train.y.std(0)``; default 1, for one output only.

    Returns:
        The error over points; the mean over outputs of each one's error in its own ``scale``.

    Raises:
        ValueError: shapes that differ, no points, or several outputs without ``scale``.

    Example:
        >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        1.4142135...
    """
    if mean.shape != y.shape:
        raise ValueError(
            f"'mean' has shape {tuple(mean.shape)} and 'y' {tuple(y.shape)}: they must agree"
        )
    _check_nonempty("y", y)
    if scale is None and y.ndim > 1 and y.shape[1] > 1:
        raise ValueError(
            f"{y.shape[1]} outputs (shape {tuple(y.shape)}) have units of their own: score one at a time, [:, k], or "
            "each in its scale, such as train.y.std(0)"
        )
    errors = (y.double() - mean.double()).square().mean(0).sqrt()
    return float((errors if scale is None else errors / scale).mean())


def log_predictive_density(log_prob: Tensor) -> float:
    """The mean over points of log p(y | x), (point,): the log of the *mixture* over draws, per point.

    It is what ``Prediction.log_prob(y)`` gives. The mean over draws of log densities is another, smaller number.
    """
    _check_nonempty("log_prob", log_prob)
    return float(log_prob.double().mean())


def crps(draws: Tensor, y: Tensor) -> Tensor:
    r"""Continuous ranked probability score of the empirical distribution of the draws, exactly.

    .. math:: \mathrm{CRPS}(F, y) = \mathbb E|Z - y| - \tfrac12 \mathbb E|Z - Z'|
        = \frac1S\sum_s |z_s - y| - \frac1{S^2}\sum_{s=1}^S (2s - S - 1)\, z_{(s)}

    Sorting replaces the S² pairs of the second mean. Smaller is better; in the units of y; for a single
    draw it is the absolute error. With few draws the score is that of their empirical distribution, which is
    a little worse than that of the distribution they were drawn from.

    Args:
        draws: of the predictive of y, noise included, (draw, point[, output]).
        y: observed (point[, output]).

    Returns:
        The score of every entry of y, of its shape: average it over points.

    Raises:
        ValueError: shapes that do not fit, or no draws.

    References:
        Strictly Proper Scoring Rules, Prediction, and Estimation (Gneiting & Raftery, 2007),
        https://doi.org/10.1198/016214506000001437

    Example:
        >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.5000], dtype=torch.float64)
    """
    _check_draws(draws, y)
    # the shift by y leaves the score and keeps the digits of draws far from zero
    z = (draws.double() - y.double()).sort(dim=0).values
    num_draws = len(z)
    rank = torch.arange(
        1,
        num_draws + 1,
        dtype=z.dtype,
        device=z.device,
    )
    return z.abs().mean(0) - torch.tensordot(
        (2 * rank - num_draws - 1) / num_draws**2,
        z,
        dims=1,
    )


def pit(draws: Tensor, y: Tensor, seed: int = 0) -> Tensor:
    r"""Probability integral transform: where y falls among the draws, uniform on (0, 1) if calibrated.

    .. math:: u = \frac{\#\{z_s < y\} + v\,(\#\{z_s = y\} + 1)}{S + 1},\quad v \sim U(0, 1)

    The rank is randomised over its step, so that u is exactly uniform for any number of draws.

    Args:
        draws: of the predictive of y, noise included, (draw, point[, output]).
        y: observed (point[, output]).
        seed: of v; global generators are untouched.

    Returns:
        The values in (0, 1), of the shape of y.
    """
    _check_draws(draws, y)
    generator = torch.Generator().manual_seed(~seed)  # a user's data are often of the same seed
    v = torch.rand(
        y.shape,
        generator=generator,
        dtype=torch.float64,
    ).to(y.device)
    below = (draws < y).sum(0)
    ties = (draws == y).sum(0)
    return (below + v * (ties + 1)) / (len(draws) + 1)


def pit_of(draws: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`pit` of arrays."""
    return pit(torch.as_tensor(draws), torch.as_tensor(y)).numpy()


def accuracy(probs: Tensor, y: Tensor) -> float:
    """The share of points whose most probable class (point, class) is the label (point,)."""
    _check_probs(probs, y)
    return float((probs.argmax(-1) == y).double().mean())


def nll(probs: Tensor, y: Tensor) -> float:
    """The mean of −log p(label), in nats; probs (point, class), labels (point,). Infinite for a p of 0."""
    _check_probs(probs, y)
    return float(-probs.double().gather(-1, y.unsqueeze(-1)).log().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    r"""Brier score of all classes, in [0, 2]: the mean of :math:`\sum_c (p_c - 1[y = c])^2`.

    Args:
        probs: (point, class), rows that sum to 1.
        y: labels (point,), int64.
    """
    _check_probs(probs, y)
    return float(
        (probs.double() - torch.nn.functional.one_hot(y, probs.shape[-1])).square().sum(-1).mean()
    )


def ece(probs: Tensor, y: Tensor, num_bins: int = 15) -> float:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|`.

    It is biased upwards when bins hold few points: compare it between methods on the same points only.

    Args:
        probs: (point, class), rows that sum to 1.
        y: labels (point,), int64.
        num_bins: bins of equal width on [0, 1] of the confidence in the predicted class.

    References:
        On Calibration of Modern Neural Networks (Guo et al., 2017), https://arxiv.org/abs/1706.04599
    """
    _check_probs(probs, y)
    confidence, predicted = probs.double().max(-1)
    # right-closed bins: a confidence of exactly 1 belongs to the last
    index = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    gaps = torch.bincount(
        index,
        weights=(predicted == y).double() - confidence,
        minlength=num_bins,
    )
    return float(gaps.abs().sum() / len(y))


def expected_calibration_error(
    confidence: np.ndarray, correct: np.ndarray, *, num_bins: int = 10
) -> tuple[float, np.ndarray]:
    """Expected calibration error in bins of equal *count*, and the reliability table behind it.

    Equal counts leave no bin to a handful of points, as equal widths do (:func:`pyrobnn.metrics.ece`).

    Args:
        confidence: Probability of the predicted class (point,).
        correct: Whether it was right (point,).
        num_bins: Number of bins.

    Returns:
        The error, and an array (bin, 3) of mean confidence, share correct and count.
    """
    order = np.argsort(confidence, kind="stable")
    bins = [rows for rows in np.array_split(order, num_bins) if len(rows)]
    table = np.array([(confidence[rows].mean(), correct[rows].mean(), len(rows)) for rows in bins])
    claimed, accuracy, counts = table.T
    return float(np.average(np.abs(claimed - accuracy), weights=counts)), table


def _check_nonempty(name: str, values: Tensor) -> None:
    if values.numel() == 0:
        raise ValueError(
            f"{name!r} is empty (shape {tuple(values.shape)}): there is nothing to score"
        )


def _check_draws(draws: Tensor, y: Tensor) -> None:
    if draws.ndim != y.ndim + 1 or draws.shape[1:] != y.shape:
        raise ValueError(
            f"'draws' has shape {tuple(draws.shape)}, expected (draw, *y.shape) with y {tuple(y.shape)}: "
            "flatten chains and draws into one leading dimension"
        )
    _check_nonempty("draws", draws)


def _check_probs(probs: Tensor, y: Tensor) -> None:
    if probs.ndim != 2 or y.shape != probs.shape[:1]:
        raise ValueError(
            f"expected probs (point, class) and labels (point,), got {tuple(probs.shape)} and {tuple(y.shape)}"
        )
    if y.dtype != torch.int64:
        raise ValueError(f"class labels must be int64, got {y.dtype}: use y.long()")
    _check_nonempty("probs", probs)
    if int(y.min()) < 0 or int(y.max()) >= probs.shape[1]:
        raise ValueError(
            f"class labels must lie in 0 … {probs.shape[1] - 1}, got {int(y.min())} … {int(y.max())}"
        )
    if not torch.allclose(
        probs.sum(-1),
        torch.ones_like(probs[:, 0]),
        atol=1e-3,
    ):
        raise ValueError(
            "the rows of 'probs' must sum to 1: pass probabilities (softmax), not logits"
        )
