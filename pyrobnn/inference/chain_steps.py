"""One step of stochastic-gradient chains: its mini-batch, its dynamics, and the compiled whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyrobnn.inference.fitting.batches import Batches, PermutedRows, same
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.shares import Shares, across
from pyrobnn.model import Density
from pyrobnn.model.compile import Compiled, compiled

if TYPE_CHECKING:
    from pyrobnn.inference.sgmcmc import _StochasticGradientMCMC


@dataclass(frozen=True, eq=False)
class State:
    """All chains at one step of the plan.

    Position and momentum (chain, dim), mean squared gradient (dim,), and the heat (chain,) that the noise has added.
    """

    step: int
    z: Tensor
    v: Tensor
    second: Tensor
    heat: Tensor


class Setting(NamedTuple):
    """What the dynamics of a step depend on: ε, the temperature, and the preconditioner's metric (dim,)."""

    epsilon: Tensor
    temperature: Tensor
    metric: Tensor


class Moved(NamedTuple):
    """One step of all chains.

    Position and momentum (chain, dim) after it; gradient (chain, dim), log joint and energy (chain,) before it; the
    heat (chain,) that it adds.
    """

    z: Tensor
    v: Tensor
    gradient: Tensor
    lp: Tensor
    energy: Tensor
    heat: Tensor


def kinetic(momentum: Tensor) -> Tensor:
    """The energy (chain,) of momenta (chain, dim), in float64."""
    return 0.5 * momentum.double().square().sum(1)


class Batch(NamedTuple):
    """Row numbers (chain, batch) into whole tensors, or tensors that all chains share."""

    rows: Tensor
    tensors: tuple[Tensor, ...]
    per_chain: bool


def chain_batches(problem: Problem, num_chains: int, batch_size: int | None) -> Batches[Batch]:
    """Endless mini-batches; each chain walks through permutations of its own."""
    no_rows = torch.zeros(
        0,
        dtype=torch.int64,
        device=problem.device,
    )
    if not problem.is_bnn:
        data = tuple(value for value in (problem.x, problem.y) if isinstance(value, Tensor))
        if len(data) < 2:
            data = ()  # the density calls the program with its stored arguments
        return same(Batch(no_rows, data, per_chain=False))
    num_data = problem.num_rows
    if problem.loader is not None or batch_size is None or batch_size >= num_data:
        return problem.batches().mapped(lambda pair: Batch(no_rows, pair, per_chain=False))
    rows = torch.empty(
        num_chains,
        batch_size,
        dtype=torch.int64,
        device=problem.device,
    )
    batch = Batch(
        rows,
        (problem.x, problem.y),
        per_chain=True,
    )

    def of_rows(drawn: Tensor) -> Batch:
        rows.copy_(drawn)
        return batch

    return PermutedRows(num_data, batch_size, problem.device, num_chains).mapped(of_rows)


class LogJoint(NamedTuple):
    """The log joint of a batch as a function of (z, rows), the rows, and which of their dimensions is the chain's.

    ``shares``, of a rank's part of a batch: what is computed from it counts by its mean over the ranks.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    rows: Tensor
    chain_dim: int | None
    shares: Shares | None = None


def batch_log_joint(problem: Problem, batch: Batch) -> LogJoint:
    """The log joint of a batch, for every chain."""
    log_joint = _batch_function(problem.density.subsampled(), batch.tensors, batch.per_chain)
    return LogJoint(log_joint, batch.rows, 0 if batch.per_chain else None, problem.shares)


def _batch_function(
    density: Density,
    data: tuple[Tensor, ...],
    per_chain: bool,
) -> Callable[[Tensor, Tensor], Tensor]:
    """(z, rows) → the log joint on the chain's own rows of the data, or on the batch that all chains share."""

    def with_rows(z: Tensor, rows: Tensor) -> Tensor:
        return density.log_joint(z, *(tensor[rows] for tensor in data))

    def with_batch(z: Tensor, rows: Tensor) -> Tensor:
        return density.log_joint(z, *data)

    return with_rows if per_chain else with_batch


def metric_of(second: Tensor) -> Tensor:
    """1 / root mean square gradient, scaled to geometric mean 1; no weight moves more than 10³ times that mean."""
    log = -0.5 * second.clamp_min(torch.finfo(second.dtype).tiny).log()
    return (log - log.mean()).clamp(-math.log(1e3), math.log(1e3)).exp()


def _slopes(problem: Problem, per_chain: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    r"""(z, rows, \*data) → gradients (chain, dim) and values (chain,) of the log joint of a batch."""
    density = problem.density.subsampled()
    # each chain draws a subsample of its own
    randomness = "error" if density.stochastic is None else "different"

    def slopes(z: Tensor, rows: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.grad_and_value(_batch_function(density, data, per_chain))
        rows_dim = 0 if per_chain else None
        chain_slopes = torch.func.vmap(
            slope,
            in_dims=(0, rows_dim),
            randomness=randomness,
        )
        return chain_slopes(z, rows)

    return slopes


@dataclass(frozen=True, eq=False)
class HessianProducts:
    """The Hessian of the log joint of a batch times a vector, for every chain; traced once for every batch shape.

    Attributes: ``problem``; ``num_products`` that are computed in a run.
    """

    problem: Problem
    num_products: int
    _traces: dict[tuple[torch.Size, ...], Compiled] = field(default_factory=dict)

    def at(self, z: Tensor, batch: Batch) -> Callable[[Tensor], Tensor]:
        """From vectors (chain, dim) to their products at the positions ``z`` (chain, dim)."""
        data = (batch.rows, *batch.tensors)
        key = tuple(value.shape for value in batch.tensors)
        if key not in self._traces:
            self._traces[key] = compiled(
                _hessian_products(self.problem, batch.per_chain),
                z,
                z,
                *data,
                enabled=False,
                calls=self.num_products,
            )
        product = across(self.problem.shares, self._traces[key])
        return lambda vector: product(z, vector, *data)


def _hessian_products(problem: Problem, per_chain: bool) -> Callable[..., Tensor]:
    r"""(z, vectors, rows, \*data) → products (chain, dim) of the Hessian of the log joint of a batch."""
    density = problem.density.subsampled()

    def products(z: Tensor, vectors: Tensor, rows: Tensor, *data: Tensor) -> Tensor:
        gradient = torch.func.grad(_batch_function(density, data, per_chain))

        def product(z: Tensor, vector: Tensor, rows: Tensor) -> Tensor:
            # reverse over reverse: forward mode does not follow the float64 sums of the density
            return torch.func.grad(lambda point: (gradient(point, rows) * vector).sum())(z)

        chain_products = torch.func.vmap(
            product,
            in_dims=(0, 0, 0 if per_chain else None),
            randomness="different",
        )
        return chain_products(z, vectors, rows)

    return products


def _transition(
    config: _StochasticGradientMCMC,
    problem: Problem,
    slopes: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, ...]]:
    r"""One step of all chains, by ``slopes`` as of :func:`_slopes`.

    (z, v, second, heat, control, rows, \*data) → the first four after it, log joint of the batch, energy less the heat.
    """
    num_data = problem.num_rows
    precondition = config.preconditioner is not None

    def step(
        z: Tensor,
        v: Tensor,
        second: Tensor,
        heat: Tensor,
        control: Tensor,
        rows: Tensor,
        *data: Tensor,
    ) -> tuple[Tensor, ...]:
        epsilon, second_weight, temperature = control.unbind()
        metric = metric_of(second) if precondition else torch.ones_like(second)
        setting = Setting(epsilon, temperature, metric)
        moved = config.move(z, v, lambda point: slopes(point, rows, *data), setting)
        if precondition:
            squares = (moved.gradient / num_data).square().mean(0)
            second = torch.lerp(second, squares, second_weight)
        return moved.z, moved.v, second, heat + moved.heat, moved.lp, moved.energy - heat

    return step


class Stepped(NamedTuple):
    """The chains after a step, the log joint (chain,) of its batch and the energy less the heat (chain,) before it."""

    state: State
    lp: Tensor
    energy: Tensor


class ChainStep:
    """The compiled transition, anew for every batch shape (a loader's last batch is smaller).

    Attributes:
        control: ε, the weight of the squared gradient in the preconditioner's mean, and the temperature (3,), of the
            last step.
        seconds: that compiling took.
    """

    def __init__(
        self,
        config: _StochasticGradientMCMC,
        problem: Problem,
        control: Tensor,
        num_steps: int,
    ):
        self.num_steps = num_steps
        # says what is done now and is no step
        self.announce: Callable[[str], None] = lambda words: None
        self.config = config
        self.problem = problem
        self.control = control
        self.seconds = 0.0
        self.kernels: dict[tuple[torch.Size, ...], Compiled] = {}

    def __call__(
        self,
        batch: Batch,
        state: State,
        epsilon: float,
        second_weight: float,
    ) -> Stepped:
        settings = [epsilon, second_weight, self.config.temperature]
        self.control.copy_(torch.tensor(settings, dtype=torch.float64))
        # made anew at every step, used where this shape is not compiled yet
        slopes: Callable[..., Any] = _slopes(self.problem, batch.per_chain)
        present = (state.z, state.v, state.second, state.heat)
        data = (batch.rows, *batch.tensors)
        shares = self.problem.shares
        step: Callable[..., tuple[Tensor, ...]]
        if shares is None:
            step = _transition(self.config, self.problem, slopes)
            step = self._kernel(step, batch, (*present, self.control, *data))
        else:
            slopes = across(shares, self._kernel(slopes, batch, (state.z, *data)))
            step = _transition(self.config, self.problem, slopes)
        with torch.no_grad():
            *after, lp, energy = step(*present, self.control, *data)
        return Stepped(State(state.step + 1, *after), lp, energy)

    def _kernel(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        batch: Batch,
        arguments: tuple[Tensor, ...],
    ) -> Callable[..., Any]:
        """The function compiled for batches of this shape, once."""
        key = tuple(value.shape for value in batch.tensors)
        if key not in self.kernels:
            name = f"the {type(self.config).__name__} step"
            self.kernels[key] = compiled(
                function,
                *arguments,
                enabled=self.config.compile,
                calls=self.num_steps,
                name=name,
                say=self.announce,
            )
            self.seconds += self.kernels[key].seconds
        return self.kernels[key]
