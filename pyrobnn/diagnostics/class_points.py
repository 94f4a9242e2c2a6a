"""Predictions of classes beside their labels, held out or of the training data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyrobnn.core.groups import HELD_OUT, PREDICTIONS
from pyrobnn.diagnostics.evidence import Evidence, statistic


@dataclass(frozen=True, eq=False)
class ClassPoints:
    """Class probabilities at points with known labels.

    Args:
        y: labels, shape (point,). probs: shape (point, class).
        aleatoric, epistemic: entropies in nats, shape (point,), or None. x: inputs (point, feature) or None.
    """

    y: np.ndarray
    probs: np.ndarray
    aleatoric: np.ndarray | None
    epistemic: np.ndarray | None
    x: np.ndarray | None

    @property
    def correct(self) -> np.ndarray:
        """Whether the most probable class is the label, shape (point,)."""
        return self.probs.argmax(1) == self.y


@statistic
def class_points(evidence: Evidence) -> ClassPoints | None:
    """Held-out class probabilities with labels, or None. One probability per point is read as P(y = 1)."""
    probs = evidence.values(PREDICTIONS, "probs")
    y = evidence.values(HELD_OUT, "y")
    if probs is None or y is None or probs.size == 0:
        return None
    aleatoric = _stored_entropy(evidence, "aleatoric")
    epistemic = _stored_entropy(evidence, "epistemic")
    x = evidence.values(HELD_OUT, "x")
    x = None if x is None else x.reshape(len(probs), -1)
    return ClassPoints(y.reshape(-1).astype(int), _of_each_class(probs), aleatoric, epistemic, x)


def _stored_entropy(evidence: Evidence, kind: str) -> np.ndarray | None:
    entropy = evidence.values(PREDICTIONS, f"{kind}_entropy")
    return None if entropy is None else entropy.reshape(-1)


def _of_each_class(probs: np.ndarray) -> np.ndarray:
    """Probabilities (point, class); one per point is read as P(y = 1)."""
    probs = probs.reshape(len(probs), -1)
    return np.concatenate([1.0 - probs, probs], axis=1) if probs.shape[1] == 1 else probs


def class_arrays(probs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class probabilities (point, class), rows summing to one, and labels (point,)."""
    probs = _of_each_class(probs.astype(np.float64))
    return probs / probs.sum(axis=1, keepdims=True), y.reshape(len(y)).astype(np.int64)


def class_replicates(evidence: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Training replicates (draw, obs) and labels (obs,) of one label a row; None where there are none."""
    pair = evidence.replicates(whole=True) if evidence.has_classes else None
    if pair is None:
        return None
    draws, labels = pair
    if labels.shape[1] != 1 or labels.min() < 0:
        return None
    return draws[..., 0].astype(int), labels[:, 0].astype(int)
