"""Small networks for studies and examples: plain ``nn.Module`` objects, free of batch norm and dropout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import check_choice, check_count
from pyrobnn.core.seeding import seeded

ACTIVATIONS: dict[str, type[nn.Module]] = {
    each.__name__.lower(): each
    for each in (nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Sigmoid)
}


def mlp(
    num_inputs: int,
    hidden: Sequence[int] = (50,),
    num_outputs: int = 1,
    *,
    activation: str | type[nn.Module] = "tanh",
    seed: int | None = None,
) -> nn.Sequential:
    r"""A fully connected network, (…, num_inputs) to (…, num_outputs).

    .. math:: f(x) = W_L\, a(\ldots a(W_1 x + b_1) \ldots) + b_L

    Args:
        num_inputs: features per point.
        hidden: width of each hidden layer; empty gives linear regression.
        num_outputs: width of the output.
        activation: one of ``tanh relu gelu silu elu softplus sigmoid``, or an ``nn.Module`` class that is
            constructed without arguments.
        seed: seed of the initial weights, leaving the global generator untouched; ``None`` draws them from
            the global generator, as ``nn.Linear`` does.

    Raises:
        ValueError: a width below 1 or an unknown activation name.
        TypeError: widths that are not integers, or an activation of another kind.

    Example:
        >>> import torch
        >>> net = mlp(3, hidden=(20, 20), num_outputs=2, activation="relu", seed=0)
        >>> net(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    inner = _check_widths("hidden", hidden)
    widths = [
        check_count("num_inputs", num_inputs),
        *inner,
        check_count("num_outputs", num_outputs),
    ]
    if isinstance(activation, str):
        activation = ACTIVATIONS[check_choice("activation", activation, tuple(ACTIVATIONS))]
    if not isinstance(activation, type) or not issubclass(activation, nn.Module):
        raise TypeError(f"'activation' must be a name or an nn.Module class, got {activation!r}")
    with nullcontext() if seed is None else seeded(seed):
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(widths[:-2], widths[1:-1]):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def small_cnn(
    num_classes: int,
    in_channels: int = 1,
    image_size: int = 8,
    *,
    channels: Sequence[int] = (8, 16),
    seed: int | None = None,
) -> nn.Sequential:
    """A convolutional classifier for small square images: 3x3 convolutions, each halving the image.

    It takes images (N, in_channels, image_size, image_size), or the same pixels flattened, to logits (N, num_classes).
    There is no batch norm: its running statistics couple the points of a batch, so that the likelihood would not
    factorise over the data and no posterior over the weights would be defined.

    Args:
        num_classes, in_channels: logits, and channels of an image.
        image_size: side of the image in pixels; every convolution's max pooling halves it.
        channels: channels after each convolution, each with a ReLU.
        seed: as in :func:`mlp`.

    Raises:
        TypeError, ValueError: counts that are not positive integers, or an image too small for that many halvings.

    Example:
        >>> import torch
        >>> net = small_cnn(10, seed=0)
        >>> net(torch.zeros(4, 1, 8, 8)).shape, net(torch.zeros(4, 64)).shape
        (torch.Size([4, 10]), torch.Size([4, 10]))
    """
    check_count("num_classes", num_classes)
    widths = [check_count("in_channels", in_channels), *_check_widths("channels", channels)]
    side = check_count("image_size", image_size) // 2 ** len(channels)
    if side < 1:
        raise ValueError(
            f"an image of {image_size} pixels cannot be halved {len(channels)} times: "
            "pass fewer 'channels' or a larger 'image_size'"
        )
    with nullcontext() if seed is None else seeded(seed):
        # images and flattened pixels come to one shape
        layers: list[nn.Module] = [
            nn.Flatten(),
            nn.Unflatten(1, (in_channels, image_size, image_size)),
        ]
        for before, after in zip(widths, widths[1:]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(widths[-1] * side * side, num_classes)
        )


class Temperature(nn.Module):
    """Outputs divided by a temperature."""

    value: Tensor

    def __init__(self, value: float):
        super().__init__()
        self.register_buffer("value", torch.tensor(value))

    def forward(self, f: Tensor) -> Tensor:
        return f / self.value


class Exposed(nn.Module):
    r"""A net of log rates for rows of different exposure: :math:`f(x) = \mathrm{net}(x_{-c}) + \log x_c`.

    A likelihood with ``exposure=c`` puts it around the net of a :class:`pyrobnn.BNN`; the sites of its parameters are
    then ``net.net.<parameter>``.

    Args:
        net: takes inputs without the column.
        column: of x (N, feature) that holds the exposures, from the end where negative.
    """

    def __init__(self, net: nn.Module, column: int):
        super().__init__()
        self.net = net
        self.column = column

    def exposures(self, x: Tensor) -> Tensor:
        """The exposure of each row, (N, 1).

        Raises:
            ValueError: the inputs are not a table, or an exposure is not positive.
        """
        if x.dim() != 2 or not -x.shape[1] <= self.column < x.shape[1]:
            raise ValueError(
                f"'x' has shape {tuple(x.shape)} and no column {self.column} for the exposure"
            )
        exposure = x[:, self.column].unsqueeze(-1)
        if not float(exposure.min()) > 0:
            raise ValueError(
                f"'x' holds the exposure {exposure.min():g} in column {self.column}: it must be > 0"
            )
        return exposure

    def with_exposure(self, x: Tensor, exposure: Tensor | float) -> Tensor:
        """The same inputs with another exposure, a number or (N, 1)."""
        place = torch.arange(x.shape[1], device=x.device) == self.column % x.shape[1]
        return torch.where(place, exposure, x)

    def forward(self, x: Tensor) -> Tensor:
        column = self.column % x.shape[1]
        inputs = torch.cat([x[:, :column], x[:, column + 1 :]], 1)
        return self.net(inputs) + x[:, column].unsqueeze(-1).log()


def _check_widths(name: str, widths: Sequence[int]) -> list[int]:
    if isinstance(widths, str) or not isinstance(widths, Iterable):
        raise TypeError(
            f"'{name}' must be a sequence of widths, got {widths!r}: write {name}=({widths},)"
        )
    return [check_count(f"{name}[{index}]", width) for index, width in enumerate(widths)]
