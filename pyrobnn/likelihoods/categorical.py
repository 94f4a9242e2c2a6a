"""Class labels and truth values."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
import tyxe.likelihoods
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_finite
from pyrobnn.likelihoods.base import Likelihood


class Categorical(Likelihood, tyxe.likelihoods.Categorical):
    r"""Class labels: :math:`y \sim \mathrm{Categorical}(\mathrm{softmax}(f(x)))`; the network returns logits.

    The network's output is (N, classes).

    Labels are integers 0 … classes − 1 of shape (N,).

    Example:
        >>> Categorical()
        Categorical()
    """

    task = "categorical"
    classes = True
    labels = True

    def __init__(self) -> None:
        super().__init__(dataset_size=None, event_dim=0, name="likelihood")

    def width_error(self, width: int, y: Tensor) -> str | None:
        if error := label_shape_error("Categorical", y):
            return error
        if width < 2:
            return f"the net returns {width} value per point but Categorical expects a logit per class: use Bernoulli()"
        return None

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        check_labels("Categorical", y)
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= width:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but the net returns {width} classes: "
                f"labels must lie in 0 … {width - 1}; relabel y or give the net {max(high + 1, 2)} outputs"
            )
        return y.long()

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Categorical(logits=f)

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Class probabilities (\\*batch, N, classes)."""
        return f.softmax(-1)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y) in the order of the labels, (\\*batch, N, 1)."""
        return label_cdf(self.probs(f.double()), y)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(p) - p p^\top` with root :math:`\mathrm{diag}(\sqrt p) - p \sqrt p^\top`."""
        p = f.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)

    def __repr__(self) -> str:
        return "Categorical()"


class Bernoulli(Likelihood, tyxe.likelihoods.Bernoulli):
    r"""Binary labels: :math:`y \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f(x)))`; one logit per output, (N, out).

    Labels are 0 or 1 of shape (N, out), or (N,) for one output.

    Example:
        >>> Bernoulli()
        Bernoulli()
    """

    task = "bernoulli"
    classes = True

    def __init__(self) -> None:
        super().__init__(dataset_size=None, event_dim=1, name="likelihood")

    def width_error(self, width: int, y: Tensor) -> str | None:
        out = 1 if y.dim() == 1 else y.shape[-1]
        if width == out and y.dim() <= 2:
            return None
        return (
            f"the net returns {width} values per point but Bernoulli expects one logit per label, "
            f"'y' has shape {tuple(y.shape)}: give the net {out} outputs"
        )

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        check_finite("y", y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(
                f"'y' must hold 0 and 1 only for Bernoulli, got values from {y.min():g} to {y.max():g}"
            )
        return y.reshape(len(y), -1).to(dtype)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Bernoulli(logits=f).to_event(1)

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Probability of label 1, (\\*batch, N, out)."""
        return f.sigmoid()

    def mean_variance(self, f: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The probability p of label 1 and p (1 − p)."""
        p = f.sigmoid()
        return p, p * (1 - p)

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y), (\\*batch, N, out)."""
        zero = (-f.double()).sigmoid()
        return zero * y, torch.where(y == 1, 1.0, zero)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(p (1 - p))`."""
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())

    def __repr__(self) -> str:
        return "Bernoulli()"


def label_shape_error(name: str, y: Tensor) -> str | None:
    """What is wrong with the shape of integer labels."""
    if y.dim() == 1:
        return None
    fix = "use y.squeeze(-1)" if y.shape[-1] == 1 else "use y.argmax(-1)"
    return f"'y' has shape {tuple(y.shape)} but {name} expects ({len(y)},): {fix}"


def check_labels(name: str, y: Tensor) -> None:
    """Raise where labels are no integers."""
    if y.is_floating_point() or y.is_complex():
        raise TypeError(f"'y' has dtype {y.dtype} but {name} expects integer labels: use y.long()")


def label_cdf(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """P(Y < y) and P(Y ≤ y), (\\*batch, N, 1), of labels (N,) by their probabilities (\\*batch, N, class)."""
    place = y.long().unsqueeze(-1)
    batch = torch.broadcast_shapes(probs.shape[:-1], y.shape)
    probs, place = probs.expand(*batch, probs.shape[-1]), place.expand(*batch, 1)
    upper = probs.cumsum(-1).gather(-1, place)
    return (upper - probs.gather(-1, place)).clamp_min(0.0), upper.clamp_max(1.0)
