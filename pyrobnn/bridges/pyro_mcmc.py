"""``MCMC``, ``NUTS`` and ``HMC`` with the signatures of ``pyro.infer``: change one import, keep the program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform
from pyro.infer.mcmc import util
from torch import Tensor
from torch.distributions import Transform

from pyrobnn.core.checks import (
    Refused,
    as_tensor,
    check_choice,
    check_count,
    check_finite,
    check_type,
)
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.seeding import seeded
from pyrobnn.inference import NUTS as Sampler
from pyrobnn.inference.log_density import LogDensity, chain_starts
from pyrobnn.model import Density
from pyrobnn.model.density import Program
from pyrobnn.model.dtypes import types_explained
from pyrobnn.model.handlers import Supply, own_store
from pyrobnn.posterior import Posterior

_Value = TypeVar("_Value")


class _Kernel:
    """Keeps the arguments of a kernel of Pyro by name, from the ``__signature__`` of the subclass, which is Pyro's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        bound = inspect.signature(type(self)).bind(*args, **options)
        bound.apply_defaults()
        self.options = dict(bound.arguments)
        super().__init__(*args, **options)


class HMC(_Kernel, pyro.infer.HMC):
    """Hamiltonian Monte Carlo with paths of a fixed number of leapfrogs; the arguments are those of ``pyro.infer.HMC``.

    A path has ``num_steps`` leapfrogs, or ``int(trajectory_length / step_size)``, and keeps their number while the step
    size adapts, where Pyro keeps the length. Otherwise as :class:`NUTS`.
    """

    __signature__ = inspect.signature(pyro.infer.HMC)


class NUTS(_Kernel, pyro.infer.NUTS):
    """The No-U-Turn Sampler; the arguments are those of ``pyro.infer.NUTS``.

    ``step_size`` is the step where nothing is adapted; adaptation finds its own first one. Without effect:
    ``jit_compile``, ``jit_options``, ``ignore_jit_warnings`` (the gradient is always compiled) and
    ``max_plate_nesting``. Discrete latent sites are refused: sum them out.

    Raises:
        Refused: by :class:`MCMC`: slice sampling, blocks of a mass matrix, a step size or a mass matrix that adapts
            while the other does not, ``transforms`` of a model.
    """

    __signature__ = inspect.signature(pyro.infer.NUTS)


class MCMC:
    """Runs a kernel; the arguments are those of ``pyro.infer.MCMC``, and so are the methods.

    The seed is the one that was last set (``pyro.set_rng_seed``, ``torch.manual_seed``). Without effect:
    ``mp_context`` and ``disable_validation`` (values are never checked while a density runs). ``hook_fn`` is called
    when the run is over, for each kept draw of each chain, with the values in unconstrained space.

    Args:
        kernel: :class:`NUTS` or :class:`HMC`.
        num_samples, warmup_steps: of each chain; the warm-up is as long as the sampling by default.
        initial_params: by name, unconstrained, with a leading axis of chains where there are several.
        num_chains: chains, which share each gradient: four cost little more than one, and show whether they agree.
        hook_fn, mp_context, disable_progbar, disable_validation: see above.
        transforms: of a kernel with ``potential_fn``: by name, from where the values live to the reals.
        save_params: names of the sites to keep.

    Attributes: ``method``, the :class:`pyrobnn.NUTS` that runs; replace it before ``run`` for what Pyro has no name
    for (``dataclasses.replace(mcmc.method, until="converged")``). ``posterior``, after ``run``: the
    :class:`pyrobnn.Posterior`, to save, to judge (``pb.diagnose(mcmc.posterior.to_datatree())``).

    Raises:
        TypeError, ValueError, Refused: naming the option.

    Example:
        >>> import dataclasses, pyro, pyro.distributions as dist, torch
        >>> from pyrobnn.bridges.pyro_mcmc import MCMC, NUTS  # was: from pyro.infer import MCMC, NUTS
        >>> def model(data):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(data)):
        ...         pyro.sample("data", dist.Normal(mean, 1.0), obs=data)
        >>> mcmc = MCMC(NUTS(model), num_samples=50, num_chains=2, disable_progbar=True)
        >>> mcmc.method = dataclasses.replace(mcmc.method, compile=False)  # starts at once, runs slower
        >>> mcmc.run(torch.ones(3))
        >>> mcmc.get_samples()["mean"].shape
        torch.Size([100])
    """

    posterior: Posterior

    @options_explained
    def __init__(
        self,
        kernel: HMC | NUTS,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Mapping[str, Tensor] | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        mp_context: str | None = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        transforms: Mapping[str, Transform] | None = None,
        save_params: Sequence[str] | None = None,
    ) -> None:
        check_type(
            "kernel",
            kernel,
            HMC | NUTS,
            "pyrobnn.bridges.pyro_mcmc.NUTS or HMC (change its import too)",
        )
        self.kernel = kernel
        self.num_samples = check_count("num_samples", num_samples)
        self.num_chains = num_chains
        self.warmup_steps = (
            num_samples if warmup_steps is None else check_count("warmup_steps", warmup_steps, 0)
        )
        self.hook_fn = hook_fn
        self.save_params = save_params
        self._progress = not disable_progbar
        self.transforms = dict(transforms or kernel.options["transforms"] or {})
        if self.transforms and kernel.potential_fn is None:
            raise Refused(
                "'transforms' belong to a potential_fn; change a model's sites by pyro.poutine.reparam"
            )
        if kernel.potential_fn is not None and initial_params is None:
            raise ValueError("a kernel with 'potential_fn' needs initial_params: a tensor by name")
        check_type("initial_params", initial_params, Mapping | None, "a dict of tensors by name")
        self.initial_params = _by_chain(initial_params or {}, num_chains)
        self.method = _sampler(kernel.options, num_chains, self.warmup_steps)

    def __getattr__(self, name: str) -> Any:
        """Only for what is not set: draws before a run, or a wrong name."""
        if name in ("posterior", "_samples"):
            raise AttributeError("there are no draws yet: call run first")
        raise AttributeError(f"MCMC has no attribute {name!r}")

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Draw from the posterior of the model given ``args`` and ``kwargs``; warns of divergences and the like."""
        seed = torch.initial_seed() % 2**32
        call = _RunArguments(self.kernel.model, args, kwargs)
        program = self._program(call)
        self._density = self._checked_density(program, call)
        # without adaptation Pyro's warm-up is draws that are thrown away
        num_discarded = 0 if self.kernel.options["adapt_step_size"] else self.warmup_steps
        posterior = self.method.fit(
            program,
            num_draws=self.num_samples + num_discarded,
            seed=seed,
            init=self._starts(program, seed),
            progress=self._progress,
        )
        draws = _without_first(posterior.draws, num_discarded)
        stats = _without_first(posterior.sample_stats, num_discarded)
        self.posterior = dataclasses.replace(
            posterior,
            draws=draws,
            sample_stats=stats,
        )
        latent = [site.name for site in self._density.sites]
        saved = latent if self.save_params is None else self.save_params
        self._samples = {name: self._inverse(name, draws[name]) for name in saved}
        if self.hook_fn is not None:
            self._call_hook({name: draws[name] for name in latent})

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Tensor]:
        """Draws by site, (chain · draw, …), as ``pyro.infer.Predictive`` takes them.

        Args:
            num_samples: so many, picked at random with replacement.
            group_by_chain: (chain, draw, …) instead.
        """
        samples = dict(self._samples)
        for name, dtype in self.posterior.meta.get("program_dtypes", {}).items():
            if name in samples:
                samples[name] = samples[name].to(getattr(torch, dtype))
        return util.select_samples(samples, num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Any]:
        """``n_eff`` and ``r_hat`` by site, and by chain the draws that diverged and the mean acceptance rate."""
        stats = self.posterior.sample_stats
        diverged = [row.nonzero()[:, 0].tolist() for row in stats["diverging"]]
        by_site: dict[str, Any] = util.diagnostics(self._samples)
        return by_site | {
            "divergences": _named_chains(diverged),
            "acceptance rate": _named_chains(stats["acceptance_rate"].mean(1).tolist()),
        }

    def summary(self, prob: float = 0.9) -> None:
        """Print mean, sd, median, the interval that holds ``prob``, n_eff and r_hat of every value."""
        util.print_summary(self._samples, prob=prob)
        print(f"Number of divergences: {int(self.posterior.sample_stats['diverging'].sum())}")  # noqa: T201

    def _program(self, call: _RunArguments) -> Program:
        """The kernel's model with its arguments bound, or the density of its potential."""
        if self.kernel.potential_fn is None:
            return functools.partial(_call, call.model, call.args, call.kwargs)
        start = {name: value[0] for name, value in self.initial_params.items()}
        return LogDensity(functools.partial(_negative, self.kernel.potential_fn), start)

    def _checked_density(self, program: Program, call: _RunArguments) -> Density:
        """The density of the program, which runs once; data of a wrong type are explained."""
        data = {} if call.model is None else call.arguments_by_name()
        with types_explained(call.called_with, data):
            density = Density(program, points="held")
            density.log_joint(density.sample_prior(1, seed=0)[0])
        return density

    def _starts(self, program: Program, seed: int) -> Posterior | None:
        """Starts of the chains, by ``initial_params`` or by Pyro's strategy; None for the sampler's own, uniform."""
        strategy = self.kernel.options["init_strategy"]
        density = Density(program, points="held")
        shapes_by_site = {
            site.name: (self.num_chains, *site.unconstrained_shape) for site in density.sites
        }
        # here, where the sites are first known
        for name in self.save_params or ():
            check_choice("save_params", name, [*shapes_by_site])
        if not self.initial_params and strategy is init_to_uniform:
            return None
        if self.initial_params:
            starts = self._initial_values(density, shapes_by_site)
        else:
            starts = self._values_by_strategy(program, density, seed)
        return chain_starts(program, starts)

    def _initial_values(
        self, density: Density, shapes_by_site: dict[str, tuple[int, ...]]
    ) -> list[dict[str, Tensor]]:
        """``initial_params``, constrained, by site for each chain."""
        initial_shapes = {name: tuple(value.shape) for name, value in self.initial_params.items()}
        if initial_shapes != shapes_by_site:
            raise ValueError(
                f"'initial_params' has {initial_shapes}, but the latent sites, unconstrained, are {shapes_by_site}"
            )
        z = torch.cat(
            [self.initial_params[name].reshape(self.num_chains, -1) for name in shapes_by_site], 1
        )
        values = density.constrain(z.to(density.dtype))
        starts = []
        for chain in range(self.num_chains):
            starts.append({name: value[chain] for name, value in values.items()})
        return starts

    def _values_by_strategy(
        self,
        program: Program,
        density: Density,
        seed: int,
    ) -> list[dict[str, Any]]:
        """What Pyro's strategy makes of a run of the program for each chain, by site."""
        strategy = self.kernel.options["init_strategy"]
        starts = []
        supply = Supply({}, density.initial_points)  # the point parameters
        with (
            seeded(seed, density.device),
            pyro.poutine.block(),
            own_store(),
            supply,
            torch.no_grad(),
        ):
            for _ in range(self.num_chains):
                with InitMessenger(strategy):
                    nodes = pyro.poutine.trace(program).get_trace().nodes
                starts.append({site.name: nodes[site.name]["value"] for site in density.sites})
        return starts

    def _inverse(self, name: str, values: Tensor) -> Tensor:
        """Draws in the space where the values live, of a kernel that has a transform of them."""
        return self.transforms[name].inv(values) if name in self.transforms else values

    def _call_hook(self, draws: dict[str, Tensor]) -> None:
        z = self._density.unconstrain(draws)
        for chain in range(self.num_chains):
            stage = "Sample" if self.num_chains == 1 else f"Sample [{chain}]"
            for i, row in enumerate(z[chain]):
                params = {site.name: value for site, value in self._density.parts(row)}
                self.hook_fn(self.kernel, params, stage, i)  # type: ignore[misc]


def _by_chain(initial_params: Mapping[str, Tensor], num_chains: int) -> dict[str, Tensor]:
    """The initial parameters as tensors (chain, …), checked."""
    tensors = {name: as_tensor(name, value) for name, value in initial_params.items()}
    if num_chains == 1:
        tensors = {name: value[None] for name, value in tensors.items()}
    for name, value in tensors.items():
        check_finite(f"initial_params[{name!r}]", value)
        if value.shape[:1] != (num_chains,):
            raise ValueError(
                f"'initial_params' of {name!r} needs a leading axis of {num_chains} chains"
            )
    return tensors


def _sampler(options: Mapping[str, Any], num_chains: int, num_warmup: int) -> Sampler:
    """Our sampler as the options of a kernel say; Refused where it has no such way."""
    adapts = options["adapt_step_size"]
    leapfrogs = options.get("num_steps")
    step_size_bounds = options.get("min_stepsize", 1e-10), options.get("max_stepsize", 1e10)
    refusals = {
        "slice sampling (use_multinomial_sampling=False)": not options.get(
            "use_multinomial_sampling", True
        ),
        "a mass matrix in blocks (full_mass=[…])": not isinstance(options["full_mass"], bool),
        "a step size that adapts without the mass matrix, or it without the step size": (
            adapts != options["adapt_mass_matrix"]
        ),
        "a bound on the step size (min_stepsize, max_stepsize)": step_size_bounds != (1e-10, 1e10),
    }
    for feature, requested in refusals.items():
        if requested:
            raise Refused(f"{feature} is not supported: leave it out, or use pyro.infer")
    # HMC alone has num_steps: where it is None, or a length is given, the length decides
    if "num_steps" in options and (leapfrogs is None or options["trajectory_length"] is not None):
        length = options["trajectory_length"] or 2 * torch.pi
        leapfrogs = max(1, int(length / options["step_size"]))
    return Sampler(
        num_chains,
        num_warmup=num_warmup if adapts else 0,
        step_size=None if adapts else float(options["step_size"]),
        target_accept=options["target_accept_prob"],
        max_tree_depth=options.get("max_tree_depth", 10),
        mass_matrix="dense" if options["full_mass"] else "diag",
        trajectory=leapfrogs,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _RunArguments:
    """A model, None of a kernel with a potential, and the arguments of a run."""

    model: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments_by_name(self) -> dict[str, Any]:
        """The arguments by the names that the model gives them."""
        names = [*inspect.signature(self.model).parameters][: len(self.args)]
        names += [f"args[{index}]" for index in range(len(names), len(self.args))]
        return dict(zip(names, self.args, strict=True)) | self.kwargs

    def called_with(self, *values: Any) -> Any:
        """The model called with these values: those by position first, then those by name."""
        count = len(self.args)
        return self.model(*values[:count], **dict(zip(self.kwargs, values[count:], strict=True)))


# keep the name: pickles of posteriors hold it
def _call(
    model: Program,
    args: tuple,
    kwargs: dict,
    x: Tensor | None = None,
    y: Tensor | None = None,
) -> Any:
    """The model with its arguments bound: x and y, which every program is given, are ignored."""
    return model(*args, **kwargs)


def _negative(
    potential: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]
) -> Tensor:
    """The log density of a potential energy."""
    return -potential(values)


def _without_first(values: Mapping[str, Tensor], num_discarded: int) -> dict[str, Tensor]:
    """Values (chain, draw, …) without the first ``num_discarded`` draws of each chain."""
    return {name: value[:, num_discarded:] for name, value in values.items()}


def _named_chains(values: Sequence[_Value]) -> dict[str, _Value]:
    return {f"chain {chain}": value for chain, value in enumerate(values)}
