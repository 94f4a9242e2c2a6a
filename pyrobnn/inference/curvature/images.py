"""Mirror images of a mode: units of a hidden layer exchanged, and those of an odd activation with both signs turned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyrobnn.core.seeding import seeded
from pyrobnn.inference.curvature.gaussian import BlockGaussian
from pyrobnn.inference.curvature.jacobian import CHUNK_SCALARS
from pyrobnn.model import BNN, NET

#: squared distance in posterior sds up to which two equal normals have one peak, and so are no two modes
ONE_PEAK = 4.0

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Units:
    """The units of a hidden layer: rows of the weight and bias of one layer, columns of the weight of the next."""

    before: str
    after: str
    count: int

    def moved(self, values: Values, order: Tensor, signs: Tensor) -> dict[str, Tensor]:
        """Site values with the units in another order and with other signs (unit,)."""
        found = dict(values)
        for name in (f"{self.before}.weight", f"{self.before}.bias"):
            if name in values:
                value = values[name]
                found[name] = value[order] * signs.to(value).reshape(-1, *[1] * (value.dim() - 1))
        name = f"{self.after}.weight"
        columns = values[name].reshape(len(values[name]), self.count, -1)
        found[name] = (columns[:, order] * signs.to(columns)[:, None]).reshape(values[name].shape)
        return found

    def exchanged(self, values: Values, one: int, other: int, sign: float = 1.0) -> dict[str, Tensor]:
        """With two units exchanged, both with a sign."""
        order, signs = torch.arange(self.count), torch.ones(self.count)
        order[[one, other]] = order[[other, one]]
        signs[[one, other]] = sign
        return self.moved(values, order, signs)


@torch.no_grad()
def log_images(model: BNN, mode: BlockGaussian, x: Tensor) -> float:
    r"""Log of the number of modes that make the same function and have the same prior density as this one.

    .. math:: \sum_{\mathrm{layers}} \log H! - \sum_g \log m_g! + T \log 2

    H units of a hidden layer can stand in any order, but those of a group of m that are one another's image within the
    posterior's own width are not told apart; T of them have another image with both signs turned. Only what leaves the
    net's output and the log prior as they are is counted: at values drawn at random it is tried.

    ``x`` are a few inputs in the units of the program.
    """
    values = mode.layout.constrain(mode.loc)
    own, at_once = mode.log_prob(values), max(1, CHUNK_SCALARS // len(mode.loc))

    def apart(images: Sequence[Values]) -> list[bool]:
        """Whether each has a peak of its own beside the mode."""
        found = []
        for start in range(0, len(images), at_once):
            part = images[start : start + at_once]
            stacked = {name: torch.stack([image[name] for image in part]) for name in values}
            found += (2 * (own - mode.log_prob(stacked)) > ONE_PEAK).tolist()
        return found

    total = 0.0
    for units in _hidden(model, values):
        count = units.count
        # a roll and one exchange make all orders
        rolled = partial(units.moved, order=torch.arange(count).roll(1), signs=torch.ones(count))
        one_exchanged = partial(units.exchanged, one=0, other=count - 1)
        if not all(_unchanged(model, values, x, image) for image in (rolled, one_exchanged)):
            continue
        odd = _unchanged(model, values, x, partial(units.exchanged, one=0, other=0, sign=-1.0))
        signs = (1.0, -1.0) if odd else (1.0,)
        if odd:
            turned = [units.exchanged(values, unit, unit, -1.0) for unit in range(count)]
            total += math.log(2.0) * sum(apart(turned))
        groups: list[list[int]] = []
        for unit in range(count):
            images = [units.exchanged(values, group[0], unit, sign) for group in groups for sign in signs]
            found = apart(images)
            alike = [k for k in range(len(groups)) if not all(found[k * len(signs) : (k + 1) * len(signs)])]
            if alike:
                groups[alike[0]].append(unit)
            else:
                groups.append([unit])
        total += math.lgamma(count + 1) - sum(math.lgamma(len(group) + 1) for group in groups)
    return total


def _hidden(model: BNN, values: Values) -> Iterator[Units]:
    """Between each two layers with a weight, one after the other, of which the second takes what the first gives."""
    layers = [
        (NET + name, module.weight)
        for name, module in model.net.named_modules()
        if isinstance(module, LAYERS) and f"{NET}{name}.weight" in values
    ]
    for (before, first), (after, second) in pairwise(layers):
        if second.shape[1] % len(first) == 0:
            yield Units(before, after, len(first))


def _unchanged(model: BNN, values: Values, x: Tensor, image: Callable[[Values], Values]) -> bool:
    """Whether output and log prior are the same at the image, at values drawn from the prior."""
    with seeded(0, x.device):
        drawn = {name: prior.sample() for name, prior in model.priors.items()}
    there = image(drawn)
    prior, moved = (
        sum(model.priors[name].log_prob(each[name]).double().sum() for name in drawn)
        for each in (drawn, there)
    )
    f, g = (model.forward({**values, **each}, x).double() for each in (drawn, there))
    return torch.allclose(f, g, rtol=1e-4, atol=1e-4 * float(f.abs().max())) and bool(
        torch.isclose(torch.as_tensor(prior), torch.as_tensor(moved), rtol=1e-5)
    )
