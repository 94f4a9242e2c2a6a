"""Labels with an order: grades, stages, stars."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_count
from pyrobnn.likelihoods.base import SITE, Likelihood
from pyrobnn.likelihoods.categorical import check_labels, label_cdf, label_shape_error

GAPS = f"{SITE}gaps"


class Ordinal(Likelihood):
    r"""Ordered labels by cumulative logits: :math:`P(y \le k \mid x) = \mathrm{sigmoid}(c_{k + 1} - f(x))`.

    The net returns one number, and the larger it is the higher the label. Its bias gives the place of the cut-points,
    whose mean is therefore zero; they are ordered because the gaps between them are positive. Of two labels this is
    :class:`Bernoulli`.

    Args:
        num_classes: K; labels are integers 0 … K − 1 of shape (N,).
        cutpoints: ``"learned"``: the K − 2 gaps are a point parameter; ``"inferred"``: under the prior LogNormal(0, 1);
            a distribution on positive numbers of shape () or (K − 2,), their prior, and they are inferred as the site
            ``likelihood.gaps``; or a tensor of K − 1 increasing numbers, fixed cut-points.

    Reference: Regression models for ordinal data (McCullagh, 1980).

    Example:
        >>> Ordinal(4, cutpoints="inferred")
        Ordinal(4 classes, inferred cut-points)
    """

    task = "ordinal"
    classes = True
    labels = True

    def __init__(self, num_classes: int, cutpoints: str | Tensor | TorchDistributionMixin = "learned"):
        super().__init__()
        self.num_classes = check_count("num_classes", num_classes, minimum=2)
        num_gaps = num_classes - 2
        if isinstance(cutpoints, str):
            if cutpoints not in ("learned", "inferred"):
                raise ValueError(
                    f"'cutpoints' must be 'learned', 'inferred', a prior or a tensor, got {cutpoints!r}"
                )
            if cutpoints == "inferred":
                cutpoints = dist.LogNormal(0.0, 1.0)
            elif num_gaps:
                self.points = {GAPS: (torch.ones(num_gaps), constraints.positive)}
        if isinstance(cutpoints, torch.distributions.Distribution):
            if not getattr(cutpoints.support, "lower_bound", -1) >= 0 or cutpoints.shape() not in (
                (),
                (num_gaps,),
            ):
                raise ValueError(
                    f"the prior of the gaps between cut-points must live on positive numbers and have shape () or "
                    f"({num_gaps},), got {cutpoints}: use LogNormal(0.0, 1.0)"
                )
            if num_gaps:
                prior = cutpoints if cutpoints.event_shape else cutpoints.expand((num_gaps,)).to_event(1)
                self.priors = {GAPS: prior}
        elif isinstance(cutpoints, Tensor):
            if cutpoints.shape != (num_classes - 1,) or not bool((cutpoints.diff() > 0).all()):
                raise ValueError(
                    f"'cutpoints' must be {num_classes - 1} increasing numbers for {num_classes} classes, "
                    f"got {cutpoints}"
                )
            self.register_buffer("fixed_cutpoints", cutpoints.detach().double().clone())

    def width(self, num: int) -> int:
        return 1

    def width_error(self, width: int, y: Tensor) -> str | None:
        if error := label_shape_error("Ordinal", y):
            return error
        if width != 1:
            return f"the net returns {width} values per point but Ordinal expects one: give the net 1 output"
        return None

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if error := self.width_error(width, y):
            raise ValueError(error)
        check_labels("Ordinal", y)
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but Ordinal({self.num_classes}) expects 0 … "
                f"{self.num_classes - 1}: relabel y or pass num_classes={max(high + 1, 2)}"
            )
        return y.long()

    def cutpoints(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """The K − 1 cut-points, to be broadcast against (\\*batch, N, 1)."""
        if (fixed := getattr(self, "fixed_cutpoints", None)) is not None:
            return fixed.to(f)
        if self.num_classes == 2:
            return f.new_zeros(1)
        gaps = params[GAPS]
        cuts = F.pad(gaps, (1, 0)).cumsum(-1)
        return (cuts - cuts.mean(-1, keepdim=True)).unsqueeze(-2)

    def log_probs(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r"""Log probabilities (\*batch, N, class), by σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{b − a})."""
        cuts = self.cutpoints(f, params)
        below, above = F.logsigmoid(cuts - f), F.logsigmoid(f - cuts)
        between = (-torch.expm1(-cuts.diff(dim=-1))).log()
        inner = below[..., 1:] + above[..., :-1] + between
        return torch.cat([below[..., :1], inner, above[..., -1:]], -1)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Categorical(logits=self.log_probs(f, params))

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Probabilities of the labels (\\*batch, N, classes)."""
        return self.log_probs(f, params or {}).exp()

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y), (\\*batch, N, 1)."""
        return label_cdf(self.probs(f.double(), params), y)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \sum_k p_k s_k^2` with the scores :math:`s_k = \sigma(c_k - f) - \sigma(f - c_{k + 1})`."""
        cuts = self.cutpoints(f, params)
        lower, upper = (cuts - f).sigmoid(), (f - cuts).sigmoid()
        score = F.pad(lower, (1, 0)) - F.pad(upper, (0, 1))
        return (self.probs(f, params) * score.square()).sum(-1, keepdim=True).sqrt().unsqueeze(-1)

    def __repr__(self) -> str:
        if self.num_classes == 2:
            return "Ordinal(2 classes)"
        how = "inferred" if self.priors else "learned" if self.points else "fixed"
        return f"Ordinal({self.num_classes} classes, {how} cut-points)"
