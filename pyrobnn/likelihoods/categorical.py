"""Class labels, truth values, and labels with an order: grades, stages, stars."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count
from pyrobnn.likelihoods.base import SITE, Likelihood, Targets

GAPS = f"{SITE}gaps"


class _Labels(Likelihood):
    """Integer labels (N,), which have the order of their numbers."""

    targets = Targets("label")

    def num_labels(self, width: int) -> int:
        """How many labels there are for a network of output ``width``."""
        return width

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        name, count = type(self).__name__, self.num_labels(width)
        if y.dim() != 1:
            fix = "use y.squeeze(-1)" if y.shape[-1] == 1 else "use y.argmax(-1)"
            raise ValueError(f"'y' has shape {tuple(y.shape)} but {name} expects ({len(y)},): {fix}")
        if y.is_floating_point() or y.is_complex():
            raise TypeError(f"'y' has dtype {y.dtype} but {name} expects integer labels: use y.long()")
        if count < 2 or width != self.width(count):
            raise ValueError(
                f"the net returns {width} values per point but {name} expects {self.width(max(count, 2))} for {count} "
                "labels: give the net as many outputs; for two labels, Bernoulli() takes one"
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= count:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but {name} expects 0 … {count - 1} here: relabel y, or make "
                f"it {max(high + 1, 2)} classes"
            )
        return y.long()

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y) in the order of the labels, (\\*batch, N, 1)."""
        probs, place = self.probs(f.double(), params), y.long().unsqueeze(-1)
        batch = torch.broadcast_shapes(probs.shape[:-1], y.shape)
        probs, place = probs.expand(*batch, probs.shape[-1]), place.expand(*batch, 1)
        upper = probs.cumsum(-1).gather(-1, place)
        return (upper - probs.gather(-1, place)).clamp_min(0.0), upper.clamp_max(1.0)


class Categorical(_Labels):
    r"""Class labels: :math:`y \sim \mathrm{Categorical}(\mathrm{softmax}(f(x)))`; the network returns logits.

    The network's output is (N, classes).

    Labels are integers 0 … classes − 1 of shape (N,).

    Example:
        >>> Categorical()
        Categorical()
    """

    task = "categorical"

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Categorical(logits=f)

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Class probabilities (\\*batch, N, classes)."""
        return f.softmax(-1)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(p) - p p^\top` with root :math:`\mathrm{diag}(\sqrt p) - p \sqrt p^\top`."""
        p = f.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)


class Bernoulli(Likelihood):
    r"""Binary labels: :math:`y \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f(x)))`; one logit per output, (N, out).

    Labels are 0 or 1 of shape (N, out), or (N,) for one output.

    Example:
        >>> Bernoulli()
        Bernoulli()
    """

    task = "bernoulli"
    targets = Targets("binary")

    def _value_error(self, y: Tensor) -> str | None:
        if bool(((y == 0) | (y == 1)).all()):
            return None
        return f"'y' must hold 0 and 1 only for Bernoulli, got values from {y.min():g} to {y.max():g}"

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        return dist.Bernoulli(logits=f).to_event(1)

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Probability of label 1, (\\*batch, N, out)."""
        return f.sigmoid()

    def cdf(self, f: Tensor, y: Tensor, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """P(Y < y) and P(Y ≤ y), (\\*batch, N, out)."""
        zero = (-f.double()).sigmoid()
        return zero * y, torch.where(y == 1, 1.0, zero)

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \mathrm{diag}(p (1 - p))`."""
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())


class Ordinal(_Labels):
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
        Ordinal(inferred gaps, 4 classes)
    """

    task = "ordinal"

    def __init__(self, num_classes: int, cutpoints: str | Tensor | TorchDistributionMixin = "learned"):
        super().__init__()
        self.num_classes = check_count("num_classes", num_classes, minimum=2)
        num_gaps = num_classes - 2
        if isinstance(cutpoints, Tensor):
            if cutpoints.shape != (num_classes - 1,) or not bool((cutpoints.diff() > 0).all()):
                raise ValueError(
                    f"'cutpoints' must be {num_classes - 1} increasing numbers for {num_classes} classes, "
                    f"got {cutpoints}"
                )
            self.own.fixed["cutpoints"] = cutpoints.detach().double().clone()
            return
        if isinstance(cutpoints, str):
            if check_choice("cutpoints", cutpoints, ("learned", "inferred")) == "learned":
                self.own.points = {GAPS: (torch.ones(num_gaps), constraints.positive)} if num_gaps else {}
                return
            cutpoints = dist.LogNormal(0.0, 1.0)
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
            self.own.priors = {GAPS: prior}

    def width(self, num: int) -> int:
        return 1

    def num_labels(self, width: int) -> int:
        return self.num_classes

    def cutpoints(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """The K − 1 cut-points, to be broadcast against (\\*batch, N, 1)."""
        if (fixed := self.own.fixed.get("cutpoints")) is not None:
            return fixed.to(f)
        if self.num_classes == 2:
            return f.new_zeros(1)
        cuts = F.pad(params[GAPS], (1, 0)).cumsum(-1)
        return (cuts - cuts.mean(-1, keepdim=True)).unsqueeze(-2)

    def distribution(self, f: Tensor, params: Mapping[str, Tensor]) -> TorchDistributionMixin:
        r"""By log probabilities (\*batch, N, class), with σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{b − a})."""
        cuts = self.cutpoints(f, params)
        below, above = F.logsigmoid(cuts - f), F.logsigmoid(f - cuts)
        between = (-torch.expm1(-cuts.diff(dim=-1))).log()
        inner = below[..., 1:] + above[..., :-1] + between
        return dist.Categorical(logits=torch.cat([below[..., :1], inner, above[..., -1:]], -1))

    def probs(self, f: Tensor, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Probabilities of the labels (\\*batch, N, classes)."""
        return self.distribution(f, params or {}).probs

    def fisher_root(self, f: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        r""":math:`H = \sum_k p_k s_k^2` with the scores :math:`s_k = \sigma(c_k - f) - \sigma(f - c_{k + 1})`."""
        cuts = self.cutpoints(f, params)
        lower, upper = (cuts - f).sigmoid(), (f - cuts).sigmoid()
        score = F.pad(lower, (1, 0)) - F.pad(upper, (0, 1))
        return (self.probs(f, params) * score.square()).sum(-1, keepdim=True).sqrt().unsqueeze(-1)

    def _options(self) -> list[str]:
        return [f"{self.num_classes} classes"]
