"""How a search by gradient steps is run: number of steps, rate, optimiser, and the constant rate of a sampling SGD."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import check_count, check_number, check_optional, check_type
from pyrobnn.core.matrices import power_iteration
from pyrobnn.inference.fitting.batches import Batches
from pyrobnn.inference.fitting.shares import Shares, across
from pyrobnn.model.compile import compiled
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.compile.trees import leaves_of

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Schedule = str | Callable[..., Any] | None
SCHEDULES = ("cosine", "hold_cosine")


@dataclass(frozen=True)
class Optimizer:
    """What makes a step of a gradient: ``pb.MAP(optimizer=Optimizer(schedule=None, clip_norm=1.0))``.

    Args:
        kind: ``"adam"`` (inside the compiled graph), or a ``torch.optim`` class or other factory
            ``[theta] -> torch.optim.Optimizer``, whose own learning rate counts.
        schedule: None (constant), ``"cosine"`` (to zero), ``"hold_cosine"`` (the same after a constant half) or a
            function step → factor; ``"auto"`` is the method's own.
        clip_norm: rescale gradients to at most this norm.
        average: return the mean of the last ``average * num_steps`` iterates (0: the last one); it begins again after a
            quarter, a half and three quarters of them where the loss was still falling. None is the method's own.

    Raises:
        TypeError, ValueError: naming the option.
    """

    kind: str | OptimizerFactory = "adam"
    schedule: Schedule = "auto"
    clip_norm: float | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        if self.kind != "adam" and not callable(self.kind):
            raise ValueError(
                "'optimizer' must be 'adam', a function of the parameter list that returns a torch optimizer, or an "
                f"Optimizer of one, got {self.kind!r}"
            )
        if not (
            self.schedule is None
            or callable(self.schedule)
            or self.schedule in ("auto", *SCHEDULES)
        ):
            raise ValueError(
                f"'schedule' must be None, 'cosine', 'hold_cosine' or a function step -> factor, got {self.schedule!r}"
            )
        check_optional(
            check_number,
            "clip_norm",
            self.clip_norm,
            above=0,
        )
        check_optional(
            check_number,
            "average",
            self.average,
            minimum=0,
            maximum=1,
        )

    @classmethod
    def of(
        cls,
        given: Any,
        schedule: Schedule,
        options: Mapping[str, Any] | None = None,
    ) -> Optimizer:
        """An option ``optimizer`` of a method, a map where a file has it.

        ``schedule`` is the method's own, ``options`` the keyword arguments of a factory.
        """
        fields = given if isinstance(given, dict) else {"kind": given}
        optimizer = given if isinstance(given, Optimizer) else cls(**fields)
        if options is not None:
            optimizer = replace(optimizer, kind=_with_options(optimizer.kind, options))
        return replace(optimizer, schedule=schedule) if optimizer.schedule == "auto" else optimizer

    def first_rate(self, lr: float) -> float:
        """The learning rate of the first group before any schedule; ``lr`` where the kind has none of its own."""
        if not callable(self.kind):
            return lr
        optimizer = self.kind([torch.zeros(1)])
        check_type(
            "optimizer", optimizer, torch.optim.Optimizer, "what makes a torch.optim.Optimizer"
        )
        return float(optimizer.param_groups[0]["lr"])


def _with_options(kind: str | OptimizerFactory, options: Mapping[str, Any]) -> OptimizerFactory:
    """A factory of optimizers with these keyword arguments."""
    check_type(
        "optimizer_options", options, Mapping, "a dictionary of a torch.optim class's arguments"
    )
    if not callable(kind):
        raise ValueError(
            "'optimizer_options' are the keyword arguments of a torch.optim class, which 'optimizer' names: give "
            f"the class, such as optimizer=torch.optim.SGD, got {kind!r}"
        )
    try:
        inspect.signature(kind).bind([torch.zeros(1)], **options)
    except TypeError as error:
        name = getattr(kind, "__name__", repr(kind))
        raise ValueError(f"'optimizer_options' of {name}: {error}") from error
    return partial(kind, **options)


@dataclass(frozen=True)
class Training:
    """A search by gradient steps, checked.

    Args:
        num_steps: largest number of updates.
        lr: peak learning rate.
        optimizer: an :class:`Optimizer`, or its ``kind``.
        compile: ``"auto"`` compiles the step where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.
        look_every: how often the host looks at the losses, calls back and checks that they are finite; 0 for every 100
            steps, or ten times in a short run.
        num_later: evaluations of the step after the updates, about: of its ends before they are compared.

    Raises:
        TypeError, ValueError: naming the option.
    """

    num_steps: int
    lr: float = 1e-2
    optimizer: Any = "adam"
    compile: Compile = "auto"
    look_every: int = 0
    num_later: int = 0

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        check_number("lr", self.lr, above=0)
        object.__setattr__(self, "optimizer", Optimizer.of(self.optimizer, None))
        if not self.look_every:
            object.__setattr__(self, "look_every", max(1, min(100, self.num_steps // 10)))

    @classmethod
    def of(cls, method: Any, schedule: Schedule) -> Training:
        """What the options of a method say of it, ``schedule`` being the method's own."""
        check_optional(check_count, "batch_size", method.batch_size)
        optimizer = Optimizer.of(method.optimizer, schedule, method.optimizer_options)
        return cls(method.num_steps, method.lr, optimizer, method.compile)


def learning_rate_factors(num_steps: int, schedule: Schedule) -> Tensor:
    """The factor of every step, float64 (num_steps,)."""
    progress = torch.arange(num_steps, dtype=torch.float64) / num_steps
    if schedule is None:
        return torch.ones_like(progress)
    if callable(schedule):
        return torch.tensor(
            [float(schedule(step)) for step in range(num_steps)], dtype=torch.float64
        )
    if schedule != "cosine":
        progress = (2 * progress - 1).clamp_min(0)
    return 0.5 * (1 + torch.cos(math.pi * progress))


#: of SGD (Maddox et al., 2019)
MOMENTUM = 0.9
#: nats per datum by which SGD may leave a mode beyond what is expected of it
TOLERATED_RISE = 0.1
#: of the rule for a rate: batches and products of its full trial, the least of each, and steps of SGD of which the full
#: trial takes a sixth of the time
_MOST_BATCHES = 64
_MOST_PRODUCTS = 20
_FEWEST_BATCHES = 8
_FEWEST_PRODUCTS = 4
_STEPS_OF_FULL_TRIAL = 1536
#: gradients of a trial from which on a trace repays: it costs three of them
_TRACED_FROM = 30


def constant_rate(
    loss: Callable[..., Tensor],
    theta: Tensor,
    batches: Iterator[Sequence],
    *,
    num_data: int,
    momentum: float = 0.0,
    num_steps: int | None = None,
) -> float:
    r"""Learning rate of SGD whose stationary distribution comes closest to the posterior around a mode.

    .. math:: \frac{\eta}{1 - \mu} = \min\Big( \frac{2 D}{N \operatorname{tr} \operatorname{Var}[\nabla L_b]},
        \ \frac{1}{\lambda_{\max}(\nabla^2 L)} \Big)

    The first is the minimiser of KL(q‖p) for a quadratic loss; the second keeps SGD stable where the noise is so small
    that the first would not. Both are local: at a mode that interpolates the data, gradients and curvature all but
    vanish. So the rate is tried, and halved until the loss rises by no more than twice what it should,
    :math:`\tfrac{\eta}{4 (1 - \mu)} \operatorname{tr} \operatorname{Var}[\nabla L_b]`; and once more, because a
    trial is short.

    Args:
        loss: (theta, \*batch) → loss per datum ().
        theta: near the mode (D,).
        batches: endless mini-batches; of those that are a rank's share all is by the mean over the ranks.
        num_data: N.
        momentum: μ of SGD.
        num_steps: that SGD is to make. The rule takes the time of some 240 gradients, or of a sixth of so many steps if
            those are fewer; None: of 240.

    Raises:
        FloatingPointError: the gradients at ``theta`` are not finite, or SGD leaves it at every rate.

    Caveat: with fewer data than weights most of the D directions have no gradient noise, and the bound decides.

    Reference: `Stochastic Gradient Descent as Approximate Bayesian Inference (Mandt, Hoffman & Blei, 2017)
    <https://arxiv.org/abs/1704.04289>`_, Theorem 1.

    Example:
        >>> def loss(theta, y):
        ...     return 0.5 * (theta - y).square().mean()
        >>> batches = iter(lambda: (torch.zeros(4),), None)  # no gradient noise: the bound, 1 / curvature
        >>> round(constant_rate(loss, torch.zeros(1), batches, num_data=100), 3)
        1.0
    """
    trial = RateTrial.affordable(num_steps)
    shares = batches.shares if isinstance(batches, Batches) else None
    drawn = list(itertools.islice(batches, trial.num_batches))
    slope = across(shares, _slope_of(loss, theta, drawn))
    losses: list[float] = []

    def gradients() -> Iterator[Tensor]:
        for batch in drawn:
            gradient, value = slope(theta, *batch)
            losses.append(float(value))
            yield gradient
            del gradient  # one is held at a time

    noise = _summed_variance(gradients())
    if not math.isfinite(noise):
        raise FloatingPointError(
            "the gradients at the start of SGD are not finite: start from another init"
        )
    curvature = _largest_curvature(loss, theta, drawn, shares, trial.num_products)
    bound = 1.0 / max(curvature, 1e-12)
    best = 2.0 * len(theta) / (num_data * noise) if noise > 0 else bound
    initial_rate = min(best, bound)
    rate = initial_rate
    while (
        not _rise(slope, theta, drawn, losses, (1.0 - momentum) * rate, momentum)
        <= rate * noise / 2 + TOLERATED_RISE
    ):
        rate /= 2
        if rate < 1e-6 * initial_rate:
            raise FloatingPointError(
                "SGD leaves the start at every learning rate: start from a mode"
            )
    return (1.0 - momentum) * (rate if rate == initial_rate else rate / 2)


@dataclass(frozen=True)
class RateTrial:
    """What a rate is found by.

    Args:
        num_batches: whose gradients show the noise, and which the steps of a trial go through twice.
        num_products: of the Hessian with a vector, each of which costs two gradients or more.
    """

    num_batches: int
    num_products: int

    @classmethod
    def affordable(cls, num_steps: int | None) -> RateTrial:
        """The full trial, or one that takes about a sixth of the time of so many steps; at least a short one.

        Of a few steps that is shorter still: two batches are the fewest that have a variance.
        """
        if num_steps is None:
            return cls(_MOST_BATCHES, _MOST_PRODUCTS)
        share = min(1.0, num_steps / _STEPS_OF_FULL_TRIAL)
        fewest_batches = min(_FEWEST_BATCHES, max(2, num_steps // 4))
        fewest_products = min(_FEWEST_PRODUCTS, max(2, num_steps // 8))
        return cls(
            max(fewest_batches, round(share * _MOST_BATCHES)),
            max(fewest_products, round(share * _MOST_PRODUCTS)),
        )


def _slope_of(
    loss: Callable[..., Tensor],
    theta: Tensor,
    batches: Sequence[Sequence[Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Gradient and value of the loss, (theta, \\*batch) → (D,), (); its Python runs once if the batches are alike."""
    slope = torch.func.grad_and_value(loss)
    num_calls = 3 * len(batches)
    if num_calls < _TRACED_FROM:
        return slope
    layouts = set()
    for batch in batches:
        leaves = leaves_of(batch)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return slope
        layouts.add(tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves))
    if len(layouts) != 1:
        return slope
    return compiled(
        slope,
        theta,
        *batches[0],
        enabled=False,
        calls=num_calls,
        name="the loss",
    )


def _rise(
    slope: Callable[..., tuple[Tensor, ...]],
    theta: Tensor,
    batches: Sequence[Sequence[Tensor]],
    losses: Sequence[float],
    lr: float,
    momentum: float,
) -> float:
    """Mean rise of the loss over the second half of a trial that goes through the batches twice.

    Args:
        slope: (theta, \\*batch) → gradient and loss.
        theta: where the trial starts.
        batches: of its steps.
        losses: of each batch at ``theta``.
        lr, momentum: of SGD.

    Returns:
        inf or NaN where it diverges.
    """
    moved = theta
    velocity = torch.zeros_like(theta)
    rises = []
    for batch, loss_before in [*zip(batches, losses, strict=True)] * 2:
        gradient, value = slope(moved, *batch)
        velocity = momentum * velocity + gradient
        moved = moved - lr * velocity
        rises.append(float(value) - loss_before)
    return sum(rises[len(batches) :]) / len(batches)


def _summed_variance(vectors: Iterable[Tensor]) -> float:
    """The variances of the coordinates of vectors (D,), summed; two vectors are held, in float64 (Welford, 1962)."""
    mean = torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for vector in vectors:
        count += 1
        offset = vector.double() - mean
        mean = mean.to(offset) + offset / count
        # the offset from the mean before, times that from the mean now
        total = total.to(offset) + offset.square_().sum() * ((count - 1) / count)
    return float(total) / (count - 1)


def _largest_curvature(
    loss: Callable[..., Tensor],
    theta: Tensor,
    batches: Sequence[Sequence[Tensor]],
    shares: Shares | None,
    num_products: int,
) -> float:
    """Largest eigenvalue of the Hessian by so many steps of the power iteration, a batch for each."""
    cycle = itertools.cycle(batches)
    slope = torch.func.grad(loss)

    def product(vector: Tensor, *batch: Tensor) -> Tensor:
        # reverse over reverse: forward mode does not follow the float64 sums of the density
        return torch.func.grad(lambda z: (slope(z, *batch) * vector).sum())(theta)

    product_of_batch = across(shares, product)
    products = power_iteration(
        lambda vector: product_of_batch(vector, *next(cycle)), torch.randn_like(theta), num_products
    )
    sizes = [float(vector.norm()) for vector in products]
    late = sizes[num_products // 2 :]
    return sum(late) / len(late)
