"""The form that a curvature takes: all correlations where they are cheap, else by layers; and what each would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.findings import Finding
from pyrobnn.inference.curvature.ggn import Curvature, KronCurvature, Structure, ggn
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linear_head import (
    HeadCurvature,
    HeadKronCurvature,
    LinearHead,
    head_curvature,
)
from pyrobnn.inference.curvature.mode import Centre
from pyrobnn.model.likelihoods.catalogue import Categorical

#: weights of a last layer up to which its rows are as good as its structure
_FEW_WEIGHTS = 1000
#: what a form may cost to be the default: bytes, and operations, ten seconds of one core
_MOST_BYTES = 2 * 10**9
_MOST_OPERATIONS = 25 * 10**10
_OPERATIONS_PER_SECOND = 25 * 10**9


@dataclass(frozen=True)
class Cost:
    """What a full precision takes: bytes at most at once, and floating-point operations."""

    num_bytes: int
    operations: float

    @property
    def is_small(self) -> bool:
        """Whether it takes less than ten seconds of one core and 2 GB."""
        return self.num_bytes <= _MOST_BYTES and self.operations <= _MOST_OPERATIONS

    @property
    def values(self) -> dict[str, float]:
        """In GB and seconds of one core, roughly."""
        seconds = self.operations / _OPERATIONS_PER_SECOND
        return {"gigabytes": self.num_bytes / 1e9, "seconds": seconds}

    def or_less(self, alternative: Cost) -> Cost:
        """This cost, or the alternative where that takes fewer operations."""
        return alternative if alternative.operations < self.operations else self

    @classmethod
    def of_rows(
        cls,
        size: int,
        num_outputs: int,
        item: int,
    ) -> Cost:
        """By the rows of the Jacobian: ``size`` weights, ``num_outputs`` of all data, ``item`` bytes a number."""
        if num_outputs < size:  # the rows, their basis, and the Gram matrix with its spectrum
            num_bytes = 2 * num_outputs * size * item + 3 * num_outputs**2 * 8
            return cls(num_bytes, 3.0 * num_outputs**2 * size + 10.0 * num_outputs**3)
        return cls(4 * size**2 * 8, 1.0 * num_outputs * size**2 + 2.0 * size**3)

    @classmethod
    def of_head(
        cls,
        width: int,
        num_in: int,
        num_rows: int,
    ) -> Cost:
        """By the structure of a linear last layer."""
        size = width * num_in
        products = 1.0 * num_rows * num_in**2 * width * (width + 1)
        return cls(4 * size**2 * 8, products + size**3 / 3 + 2000.0 * size**2)


@dataclass(frozen=True, eq=False)
class ChosenCurvature:
    """A ``curvature``, the ``structure`` it has, the ``operations`` it took, roughly, and ``notes`` on the choice.

    ``without_factors`` are the sites that no layer's products cover, where there are products.
    """

    curvature: Curvature
    structure: Structure
    operations: float
    notes: tuple[Finding, ...] = ()
    without_factors: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, Any]:
        """For ``meta``: the form, and how it was had."""
        curvature = self.curvature
        record: dict[str, Any] = {"structure": self.structure, "by": "rows"}
        if isinstance(curvature, HeadCurvature):
            record |= {"by": "structure of the last layer"}
        elif isinstance(curvature, HeadKronCurvature):
            record |= {"by": "structure of the last layer", "form": "kron"}
            record |= {"relative_error": curvature.error}
        elif isinstance(curvature, KronCurvature) and self.without_factors:
            record |= {"without_factors": list(self.without_factors)}
        return record


def chosen_curvature(
    jacobian: NetworkJacobian,
    centre: Centre,
    structure: str,
    prior_prec: Tensor,
) -> ChosenCurvature:
    """The whitened Gauss-Newton matrix at a centre; of ``"auto"`` in the best form that is cheap.

    Raises:
        Refused: Kronecker factors asked for where a layer is not a product.
    """
    x = centre.problem.x
    with torch.no_grad():
        f = jacobian.model.forward(jacobian.params, x[:1])
        num_columns = centre.root(f, slice(0, 1)).shape[-1]
    rows_cost = Cost.of_rows(
        jacobian.size,
        len(x) * num_columns,
        f.element_size(),
    )
    head = None
    cost = rows_cost
    if structure in ("auto", "full", "kron") and jacobian.size > _FEW_WEIGHTS:
        is_softmax = type(centre.bnn.likelihood) is Categorical
        head = LinearHead.of(jacobian, x, centre.root, is_softmax)
    if head is not None:
        head_cost = Cost.of_head(head.width, head.inputs.shape[1], len(x))
        cost = rows_cost.or_less(head_cost)
    chosen, notes = _choose_structure(structure, jacobian, cost, head)
    # each column of the root is pulled back through the net
    operations = 6.0 * len(x) * num_columns * jacobian.size
    if chosen == "full":
        operations += cost.operations
    if head is not None and chosen != "diag" and (cost is not rows_cost or chosen == "kron"):
        curvature: Curvature = head_curvature(jacobian, head, chosen, prior_prec)
        return ChosenCurvature(curvature, chosen, operations, notes)
    curvature = ggn(jacobian, x, centre.root, chosen, prior_prec)
    return ChosenCurvature(curvature, chosen, operations, notes, _without_factors(jacobian))


def _without_factors(jacobian: NetworkJacobian) -> tuple[str, ...]:
    """The sites that no layer's products cover, where there are products."""
    remainder = jacobian.remainder
    return () if remainder is None else tuple(site.name for site in remainder.sites)


def _choose_structure(
    structure: str,
    jacobian: NetworkJacobian,
    cost: Cost,
    head: LinearHead | None,
) -> tuple[Structure, tuple[Finding, ...]]:
    """The structure for what was asked for; and where ``"auto"`` is not the full one, the finding that says so."""
    if structure != "auto":
        return structure, ()  # type: ignore[return-value]
    if cost.is_small or (head is not None and head.is_product()):
        return "full", ()
    has_products = any(layer.is_product for layer in jacobian.products)
    chosen: Structure = "kron" if has_products else "diag"
    loss = ", without correlations between layers"
    if head is not None:
        loss = ", one Kronecker product (meta['curvature'] has its relative error)"
    values = {
        "size": jacobian.size,
        "chosen": chosen,
        "loss": loss,
        **cost.values,
    }
    return chosen, (Finding("form_by_cost", values),)
