"""Labels of positions: a class for every pixel of an image or every token of a sequence."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count, check_type
from pyrobnn.model.likelihoods.base import Likelihood, Pair, Sampled, Targets
from pyrobnn.model.likelihoods.parameters import Params

#: where the classes stand in the net's output, by the option ``class_dim``
_CLASS_DIMS = {1: "(N, class, …)", -1: "(N, …, class)"}


class DenseCategorical(Likelihood):
    r"""A class label for every position of a row: the pixels of an image, the tokens of a sequence.

    .. math:: \log p(y_n \mid f_n) = \sum_p \log \mathrm{softmax}(f_{n p})_{y_{n p}}

    A row, an image or a sequence, is one datum; given the net its positions are independent.

    Args:
        num_classes: K; labels are integers 0 … K - 1 of shape (N, …), one for each position.
        class_dim: where the net has its logits: 1 for (N, K, …), as ``torch.nn.functional.cross_entropy`` takes them;
            -1 for (N, …, K), as a transformer with a linear head returns them.
        ignore_index: the label of positions that are not observed (padding, borders); they count for nothing.

    Predictions have ``probs`` (point, position, class) and entropies (point, position), positions in the order of
    ``y.flatten(1)``; ``prediction.shaped(…)`` gives them the shape of the net's output.

    Caveat: labels of neighbouring positions depend on each other even given the true function. The density then counts
    an image as more evidence than it is, and the posterior is too narrow.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        >>> DenseCategorical(3, class_dim=-1)
        DenseCategorical(num_classes=3, class_dim=-1)
    """

    task = "dense_categorical"
    targets = Targets("labels")

    def __init__(
        self,
        num_classes: int,
        class_dim: int = 1,
        ignore_index: int | None = None,
    ):
        super().__init__()
        self.num_classes = check_count(
            "num_classes",
            num_classes,
            minimum=2,
        )
        check_type("class_dim", class_dim, int, "1 or -1")
        check_choice("class_dim", str(class_dim), [str(dim) for dim in _CLASS_DIMS])
        self.class_dim = class_dim
        if ignore_index is not None:
            check_type("ignore_index", ignore_index, int, "an integer label, or None")
        self.ignore_index = ignore_index

    def width(self, num: int) -> int:
        return self.num_classes * num

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(
                f"'y' has dtype {y.dtype} but DenseCategorical expects integer labels: use y.long()"
            )
        labels = y.reshape(len(y), -1).long()
        if width != self.width(labels.shape[1]):
            raise ValueError(
                f"the net returns {width} values per row but DenseCategorical expects "
                f"{self.width(labels.shape[1])}, {self.num_classes} for each of the {labels.shape[1]} labels of a row"
            )
        seen = labels[self.observed(labels)]
        if not len(seen):
            raise ValueError(f"'y' holds nothing but ignore_index={self.ignore_index}")
        low = int(seen.min())
        high = int(seen.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but DenseCategorical({self.num_classes}) expects 0 … "
                f"{self.num_classes - 1}: relabel y, or give the label of positions without one as ignore_index"
            )
        return labels

    def logits(self, f: Tensor) -> Tensor:
        """Logits (\\*batch, N, position, class) of the net's flattened output (\\*batch, N, width)."""
        if self.class_dim == 1:
            return f.unflatten(-1, (self.num_classes, -1)).transpose(-1, -2)
        return f.unflatten(-1, (-1, self.num_classes))

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return Sampled(self, f, params, f.shape[-1] // self.num_classes)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        observed = self.observed(y)
        labels = torch.where(observed, y, 0).long().unsqueeze(-1)
        log_probs = self.logits(f).log_softmax(-1)
        batch = torch.broadcast_shapes(log_probs.shape[:-1], y.shape)
        log_probs = log_probs.expand(*batch, self.num_classes)
        chosen = log_probs.gather(-1, labels.expand(*batch, 1)).squeeze(-1)
        return (chosen * observed).sum(-1)

    def draw(self, f: Tensor, params: Params) -> Tensor:
        """Labels (\\*batch, N, position)."""
        probs = self.probs(f)
        return torch.multinomial(probs.flatten(0, -2), 1).reshape(probs.shape[:-1])

    def probs(self, f: Tensor, params: Params | None = None) -> Tensor:
        """Probabilities (\\*batch, N, position, class)."""
        return self.logits(f).softmax(-1)

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """P(Y < y) and P(Y ≤ y) of every position in the order of the labels; 0 and 1 where none was observed."""
        observed = self.observed(y)
        probs = self.probs(f.double())
        labels = torch.where(observed, y, 0).long().unsqueeze(-1)
        batch = torch.broadcast_shapes(probs.shape[:-1], y.shape)
        labels = labels.expand(*batch, 1)
        probs = probs.expand(*batch, self.num_classes)
        upper = probs.cumsum(-1).gather(-1, labels).squeeze(-1)
        lower = (upper - probs.gather(-1, labels).squeeze(-1)).clamp_min(0.0)
        return torch.where(observed, lower, 0.0), torch.where(observed, upper.clamp_max(1.0), 1.0)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""Of every position :math:`\mathrm{diag}(\sqrt p) - p \sqrt p^\top`; nothing between positions."""
        return self._spread(self._roots(f))

    def curvature_root(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """As :meth:`fisher_root`; nothing of positions without a label."""
        return self._spread(self._roots(f) * self.observed(y)[..., None, None])

    def _roots(self, f: Tensor) -> Tensor:
        """The root of every position's information, (N, position, class, class)."""
        probs = self.probs(f)
        root = probs.sqrt()
        return torch.diag_embed(root) - probs.unsqueeze(-1) * root.unsqueeze(-2)

    def _spread(self, roots: Tensor) -> Tensor:
        """Roots of positions as one of a row, (N, width, width), in the order of the flattened output."""
        num, positions, classes, _ = roots.shape
        # (N, class, column, position, position)
        blocks = torch.diag_embed(roots.permute(0, 2, 3, 1))
        order = (0, 1, 3, 2, 4) if self.class_dim == 1 else (0, 3, 1, 4, 2)
        return blocks.permute(order).reshape(num, classes * positions, classes * positions)

    def observed(self, y: Tensor) -> Tensor:
        """Which positions have a label."""
        if self.ignore_index is None:
            return torch.ones_like(y, dtype=torch.bool)
        return y != self.ignore_index
