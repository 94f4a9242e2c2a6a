"""Any differentiable log density in torch, made a Pyro program that the methods fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions.constraints import Constraint, real

from pyrobnn.core.checks import Refused, as_tensor, check_type
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import Method
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.point_methods import MAP
from pyrobnn.inference.smc import SMC
from pyrobnn.inference.svi import SVI
from pyrobnn.model.density import bijection
from pyrobnn.model.handlers import RADIUS, Supply
from pyrobnn.model.log_terms import without_validation
from pyrobnn.posterior import Posterior

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pyrobnn.model.density import Program

Function = Callable[[dict[str, Tensor]], Tensor]
FACTOR = "log_density"


class LogDensity:
    """A log density as a Pyro program, for what :func:`sample` has no option for.

    ``pb.NUTS(until="converged").fit(LogDensity(f, init), checkpoint="run.pt")`` takes all options of ``fit``, and
    ``Posterior.load(path, LogDensity(f, init))`` reads a saved posterior. The arguments are those of :func:`sample`.
    """

    def __init__(
        self,
        log_density: Function,
        init: Mapping[str, ArrayLike],
        *,
        support: Mapping[str, Constraint | dist.Distribution] | None = None,
    ) -> None:
        _check_arguments(log_density, init, support)
        support = dict(support or {})
        self.log_density = log_density
        self.init = _in_one_dtype(_tensors(init))
        self._sites = {
            name: _site(name, value, support.get(name, real)) for name, value in self.init.items()
        }
        for name, value in self.init.items():
            if not bool(torch.as_tensor(self._sites[name].support.check(value)).all()):
                raise ValueError(
                    f"'init' has {name!r} outside of its support, {support.get(name, real)}"
                )
        _check_value(log_density, self.init)

    def __call__(self, x: None = None, y: None = None) -> None:
        """The program: every value from its support, then the density as a factor."""
        # type and device
        like: dict[str, Any] = {name: {"like": value} for name, value in self.init.items()}
        values = {name: pyro.sample(name, fn, infer=like[name]) for name, fn in self._sites.items()}
        proper = [
            name for name, fn in self._sites.items() if not isinstance(fn, dist.ImproperUniform)
        ]
        reference = sum(self._sites[name].log_prob(values[name]) for name in proper)
        with pyro.poutine.block(), Supply({}, {}):  # which may itself run a program
            density = self.log_density(dict(values)).squeeze()
        pyro.factor(FACTOR, density - reference)

    def starts(self, num_chains: int, seed: int) -> Posterior:
        """A start for each chain: uniform on (-2, 2) of unconstrained space around ``init``, or nearer."""
        maps = {name: bijection(name, fn.support) for name, fn in self._sites.items()}
        centre = {name: maps[name].inv(value) for name, value in self.init.items()}
        drawn: list[dict[str, Tensor]] = []
        with (
            seeded(seed, next(iter(centre.values())).device),
            torch.no_grad(),
            without_validation(),
        ):
            for _ in range(num_chains):
                for radius in (RADIUS, RADIUS / 2, RADIUS / 4, RADIUS / 20, 0.0):
                    moved = {
                        n: u + radius * (2 * torch.rand_like(u) - 1) for n, u in centre.items()
                    }
                    values = {name: maps[name](u) for name, u in moved.items()}
                    if bool(torch.isfinite(self.log_density(dict(values)))):
                        break
                drawn.append(values)  # at radius zero these are `init`, which was checked
        return chain_starts(self, drawn)


def _check_arguments(
    log_density: Function,
    init: Mapping[str, ArrayLike],
    support: Mapping[str, Constraint | dist.Distribution] | None,
) -> None:
    """TypeError or ValueError unless they are a function, and values and supports by name."""
    check_type("log_density", log_density, Callable, "a function of a dict of tensors")
    check_type("init", init, Mapping, "a dict of tensors by name, {'z': init}")
    check_type("support", support, Mapping | None, "a dict of constraints or distributions by name")
    if not init or FACTOR in init or not {*(support or {})} <= {*init}:
        raise ValueError(
            f"'init' needs a tensor by name, {FACTOR!r} not among them, and 'support' no other names: got "
            f"{[*init]} and {[*(support or {})]}"
        )


def _check_value(log_density: Function, init: Mapping[str, Tensor]) -> None:
    """ValueError unless the density is a finite scalar at ``init``."""
    with without_validation():
        value = log_density(dict(init))
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value)):
        raise ValueError(
            f"'log_density' must return one finite number, a tensor, at 'init', got {value!r}"
        )


def _in_one_dtype(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values in the floating type that holds those of them that are floating."""
    floats = [value.dtype for value in values.values() if value.is_floating_point()]
    dtype = reduce(torch.promote_types, floats or [torch.get_default_dtype()])
    return {name: value.to(dtype) for name, value in values.items()}


def _tensors(init: Mapping[str, ArrayLike]) -> dict[str, Tensor]:
    """The values as tensors; a number of Python has the default floating type."""
    values = {}
    for name, value in init.items():
        values[name] = (
            torch.as_tensor(value) if isinstance(value, float) else as_tensor(name, value)
        )
    return values


def _site(name: str, value: Tensor, support: Constraint | dist.Distribution) -> Any:
    """A flat prior on the support, or the reference distribution given in its place."""
    if isinstance(support, Constraint):
        return dist.ImproperUniform(support, (), value.shape)
    kind = dist.torch_distribution.TorchDistributionMixin
    reference: Any = check_type(
        f"support[{name!r}]", support, kind, "a constraint or a distribution of Pyro"
    )
    with seeded(0, value.device):
        drawn = reference.sample()
    if drawn.shape != value.shape or drawn.dtype != value.dtype:
        raise ValueError(
            f"the distribution of {name!r} draws {tuple(drawn.shape)} of {drawn.dtype}, and 'init' has "
            f"{tuple(value.shape)} of {value.dtype}: make them the same by expand(…) and the type of its parameters"
        )
    return reference.to_event(len(reference.batch_shape))


def chain_starts(program: Program, values: list[dict[str, Tensor]]) -> Posterior:
    """What ``fit(init=…)`` takes to start each chain exactly at values of its own."""
    draws = {}
    for name in values[0]:
        draws[name] = torch.stack([start[name] for start in values])[:, None]
    same = all(bool((value == value[:1]).all()) for value in draws.values())
    return Posterior(
        program,
        draws,
        meta={"kind": "chains", "common_start": same},
    )


@options_explained
def sample(
    log_density: Function,
    init: Mapping[str, ArrayLike],
    *,
    support: Mapping[str, Constraint | dist.Distribution] | None = None,
    method: Method = NUTS(),  # noqa: B008  (frozen)
    num_draws: int | None = None,
    seed: int = 0,
) -> Posterior:
    r"""Draws from a density known up to its constant: :math:`p(\theta) \propto e^{f(\theta)}`, f any function in torch.

    Args:
        log_density: f, from values by name to a scalar, in nats; it is differentiated, and run for all chains at once.
        init: a value by name: their shapes, their floating type (float64 computes in float64), their device, and where
            to start; chains start uniform on (-2, 2) around it in unconstrained space.
        support: by name, where a value lives: a constraint of ``torch.distributions`` (default the reals; the
            Jacobian is added), or a distribution on it, which SMC starts from. The density sampled is the same.
        method: NUTS, SMC, SVI, Laplace or MAP.
        num_draws: of each chain; default the method's own number.
        seed: of all randomness.

    Returns:
        Posterior with ``draws`` by name (chain, draw, …). With distributions as ``support``, the ``log_evidence`` of
        SMC is :math:`\log \int e^{f(\theta)} d\theta`.

    Raises:
        TypeError, ValueError: ``init`` outside of its support, or f no finite scalar there.
        Refused: a method that needs more than a density.

    Caveat: whether f can be normalised nobody checks; chains that drift for ever are all that shows it.

    Example:
        >>> import pyrobnn as pb, torch
        >>> def normal(values):
        ...     return -values["z"].square().sum() / 2
        >>> method = pb.NUTS(num_chains=2, num_warmup=50, compile=False)
        >>> pb.sample(normal, {"z": torch.zeros(2)}, method=method, num_draws=20).draws["z"].shape
        torch.Size([2, 20, 2])
    """
    if not isinstance(method, (NUTS, SMC, SVI, Laplace, MAP)):
        raise Refused(
            f"'method' is {method!r}, and a log density has no network and no data: use NUTS, SMC, SVI, "
            "Laplace or MAP"
        )
    program = LogDensity(log_density, init, support=support)
    chains = method.num_chains if isinstance(method, NUTS) else 0
    start = program.starts(chains, seed) if chains else chain_starts(program, [program.init])
    return method.fit(
        program,
        num_draws=num_draws,
        seed=seed,
        init=start if "init" in method.uses else None,
    )
